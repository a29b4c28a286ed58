"""A request gets the same tokens as alone, whatever happens around it, with exact log-probs."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from etude.core.sampling import Sample, VersionSpan, expand_spans
from etude.engine.batch import ForwardBatch
from etude.engine.engine import Engine, ExpiredRequest, FinishedRequest, StreamedToken
from etude.engine.runner import BLOCK_SIZE, TorchRunner, _prepacked
from etude.engine.sampler import inverse_cdf, uniforms
from etude.model.attention import KVCache, PagedAttention
from etude.model.files import hf_state_dict
from etude.model.transformer import Transformer
from tests.engine.reference import FAMILIES, OnlyEven, Overlapping, check
from tests.small_model import (
    ROUNDING,
    Asked,
    add,
    config,
    drain,
    plain_logprobs,
    request,
    sharp,
)


def engine_with(
    model: Transformer, num_blocks: int = 64, *, overlaps: bool = False, **options: object
) -> Engine:
    runner = TorchRunner(model, num_blocks)
    return Engine(model, runner=Overlapping(runner) if overlaps else runner, **options)  # type: ignore[arg-type]


def alone(model: Transformer, asked: Asked) -> Sample:
    engine = Engine(model, max_num_seqs=1)
    add(engine, asked)
    return drain(engine)[asked.id]


@pytest.fixture(params=FAMILIES)
def any_model(request: pytest.FixtureRequest) -> Transformer:
    # deeper, so that rounding errors grow more
    return sharp(FAMILIES[request.param], seed=0, factor=3.0)


def some_request(id: int, rng: random.Random) -> Asked:
    """A random request: many share a prefix, some are long, some short; all sampling methods."""
    common = [rng.randrange(2)] * rng.choice((0, 20, 40, 90))
    own = [rng.randrange(61) for _ in range(rng.randrange(1, 40))]
    return request(
        str(id), common + own, max_tokens=rng.randrange(1, 30), seed=rng.randrange(99),
        priority=rng.choice(("standard", "standard", "interactive")),
        temperature=rng.choice((0.0, 0.7, 1.0, 1.0)),
        top_k=rng.choice((0, 0, 5)), stream=rng.random() < 0.3,
        stop_token_ids=tuple(rng.sample(range(61), 2)),
    )  # fmt: skip


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_watches_a_request_may_end_it(any_model: Transformer, overlaps: bool) -> None:
    """A stop text ends requests like this. The sample is as complete as any other, without a single
    token after its end."""
    told: list[int] = []

    def third(token: int) -> bool:
        told.append(token)
        return len(told) == 3

    plain = request("1", [5, 9, 20], max_tokens=10, stop_token_ids=())
    engine = engine_with(any_model, overlaps=overlaps, max_num_seqs=2)
    add(engine, replace(plain, stop_check=third))
    sample = drain(engine)["1"]
    assert sample.finish_reason == "stop" and list(sample.tokens) == told == list(
        alone(any_model, plain).tokens[:3]
    )
    check(any_model, replace(plain, max_tokens=3), replace(sample, finish_reason="length"))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_schedules(any_model: Transformer, seed: int, overlaps: bool) -> None:
    """Requests arrive late, are aborted, are preempted for lack of blocks or for others, are read
    in chunks, and share prefixes."""
    rng = random.Random(seed)
    engine = engine_with(
        any_model,
        11,
        overlaps=overlaps,
        max_num_seqs=rng.choice((3, 6)),
        max_batched_tokens=rng.choice((8, 25, 200)),
    )
    asked = {str(id): some_request(id, rng) for id in range(20)}
    waiting, done, streamed, aborted = list(asked.values()), {}, {}, set()
    while waiting or not engine.idle:
        if waiting and rng.random() < 0.5:
            add(engine, waiting.pop())
        if rng.random() < 0.02:
            aborted.add(id := rng.choice(list(asked)))
            engine.abort(id)
            waiting = [each for each in waiting if each.id != id]
        for event in engine.step():
            if isinstance(event, StreamedToken):
                streamed.setdefault(event.id, []).append((event.token, event.logprob))
            else:
                done[event.id] = event.sample
    assert asked.keys() - aborted <= done.keys()
    for id, sample in done.items():
        check(any_model, asked[id], sample)
        if asked[id].stream:
            assert streamed[id] == list(zip(sample.tokens, sample.logprobs, strict=True))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_free) == (0, 0, 11)
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0


def replayed(versions: list[Transformer], asked: Asked, sample: Sample) -> torch.Tensor:
    """Log-probs of each token of a sample, by a plain loop: each with the weights that the sample
    names, over the keys and values that the weights before them computed."""
    row, num_read, found = asked.prompt + sample.tokens, 0, []
    cache = KVCache(versions[0].config, 1, len(row), like=versions[0].rope)
    for length, version in enumerate(expand_spans(sample.versions), start=len(asked.prompt)):
        places = torch.arange(num_read, length)
        attend = PagedAttention(
            cache, ids=[0], slot_mapping_GN=places[None].numpy(), starts=[0], lengths=[length],
            block_table_GBM=np.array([[[0]]]), num_decode=int(num_read > 0),
        )  # fmt: skip
        model = versions[version]
        found.append(
            torch.log_softmax(
                model.logits(model(torch.tensor(row[num_read:length]), places, attend)[-1]), -1
            )
        )
        num_read = length
    return torch.stack(found).double()


@pytest.mark.parametrize("overlaps", [False, True])
def test_random_swaps(overlaps: bool) -> None:
    """A sequence continues over a weight swap from the keys and values that the old weights
    computed. Its log-probs are as near to float64 as a plain loop in fp32 is; that loop's distance
    shows how much rounding affects this model."""
    config = FAMILIES["llama"]
    versions = [sharp(config, seed) for seed in range(3)]
    rng = random.Random(1)
    engine = engine_with(sharp(config, 0), overlaps=overlaps, max_num_seqs=4, prefix_cache=False)
    asked = [
        request(str(id), [rng.randrange(61) for _ in range(rng.randrange(1, 60))])
        for id in range(12)
    ]
    done: dict[str, Sample] = {}
    for step in range(200):
        if step % 2 == 0 and step < 24:
            add(engine, asked[step // 2])
        if step in (9, 40):
            engine.load_weights(
                engine.version + 1, hf_state_dict(versions[engine.version + 1], torch.float32)
            )
        done |= {
            event.id: event.sample for event in engine.step() if isinstance(event, FinishedRequest)
        }
    assert engine.idle
    assert {len(sample.versions) for sample in done.values()} >= {1, 2}

    ours, plain, outside, moved = [], [], [], []
    exact_versions = [sharp(config, seed).double() for seed in range(3)]
    for each in asked:
        sample = done[each.id]
        assert [span.version for span in sample.versions] == sorted(
            {span.version for span in sample.versions}
        )
        exact_TV, plain_TV = (
            replayed(models, each, sample) for models in (exact_versions, versions)
        )
        at = (torch.arange(len(sample.tokens)), torch.tensor(sample.tokens))
        ours.append(torch.tensor(sample.logprobs) - exact_TV[at])
        plain.append((plain_TV - exact_TV)[at])
        edges_TV, u_T = (
            exact_TV.exp().cumsum(1),
            torch.tensor(uniforms(each.seed, len(sample.tokens))),
        )
        outside.append(torch.maximum(u_T - edges_TV[at], edges_TV[at] - exact_TV[at].exp() - u_T))
        moved.append((plain_TV.exp().cumsum(1) - edges_TV).abs().amax(1))
    few = 4
    assert 0 < torch.cat(ours).norm() < few * torch.cat(plain).norm() < 0.1
    # each token is the one that its random number selects
    assert torch.cat(outside).max() < few * torch.cat(moved).max()


def test_a_swap_drops_nobody_and_every_token_says_its_version(
    model: Transformer, other_model: Transformer, other_weights: dict[str, torch.Tensor]
) -> None:
    engine = Engine(model, max_num_seqs=2, version=4)
    for id in ("1", "2", "3"):
        add(engine, request(id, [5, 6, 7], stop_token_ids=()))
    before = alone(model, request("1", [5, 6, 7], stop_token_ids=()))
    for _ in range(6):
        assert engine.step() == []
    engine.load_weights(9, other_weights)
    done = drain(engine)
    assert done["1"].versions == (VersionSpan(4, 6), VersionSpan(9, 14))
    assert done["1"].tokens[:6] == before.tokens[:6]
    assert done["1"].tokens[6:] != before.tokens[6:]
    assert done["2"].versions == (VersionSpan(4, 6), VersionSpan(9, 14))
    assert done["3"].versions == (VersionSpan(9, 20),)  # it waited
    check(other_model, request("3", [5, 6, 7], stop_token_ids=()), done["3"])


@pytest.mark.parametrize("max_num_seqs", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_memory_of_old_weights_is_used_again_and_the_given_model_is_left_alone(
    family: str, max_num_seqs: int
) -> None:
    given = sharp(FAMILIES[family], 0)
    before = hf_state_dict(given, torch.float32)
    versions = [hf_state_dict(sharp(FAMILIES[family], seed)) for seed in range(5)]
    engine = Engine(given, max_num_seqs=max_num_seqs)
    for version, tensors in enumerate(versions):
        engine.prepare_weights(versions[0])  # a load that failed afterwards
        engine.load_weights(version, tensors)
        engine.prepare_weights(versions[0])
        held = engine.weights()
        assert held.keys() == tensors.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in held.items())
    assert all(
        torch.equal(before[name], tensor)
        for name, tensor in hf_state_dict(given, torch.float32).items()
    )


def test_old_weights_leave_nothing_behind(
    model: Transformer, other_model: Transformer, other_weights: dict[str, torch.Tensor]
) -> None:
    """Requests that come later use neither what the old weights computed alone nor what a swap has
    mixed."""
    engine = Engine(model, max_num_seqs=2)
    old, mixed = [7] * 40, [8] * 40
    add(engine, request("1", old))
    drain(engine)
    add(engine, request("2", mixed, stop_token_ids=()))
    engine.step()
    engine.load_weights(1, other_weights)
    drain(engine)
    for id, prompt in (("3", old), ("4", mixed)):
        add(engine, request(id, prompt))
        check(other_model, request(id, prompt), drain(engine)[id])
    assert engine.stats().cached_tokens == 0
    add(engine, request("5", old))  # the new weights have read it by now
    check(other_model, request("5", old), drain(engine)["5"])
    assert engine.stats().cached_tokens == 2 * BLOCK_SIZE


class Watched(TorchRunner):
    def __init__(self, model: Transformer) -> None:
        super().__init__(model, 64)
        self.plans: list[ForwardBatch] = []

    def launch(self, batch: ForwardBatch):  # type: ignore[no-untyped-def]
        self.plans.append(batch)
        return super().launch(batch)


def test_samples_of_one_prompt_share_its_blocks(model: Transformer) -> None:
    """They share even if all of them start in the same pass."""
    runner = Watched(model)
    engine = Engine(model, max_num_seqs=8, runner=runner)
    prompt = [1] * (3 * BLOCK_SIZE) + [2]
    for id in range(4):
        add(engine, request(str(id), prompt, stop_token_ids=(), max_tokens=10))
    done = drain(engine)
    first = runner.plans[0]
    assert len(first.tokens_N) == len(prompt) + 3
    assert len({*first.block_table_BM[:, :3].flatten()}) == 3
    assert len({*first.block_table_BM[:, 3]}) == 4
    for id, sample in done.items():
        check(model, request(id, prompt, stop_token_ids=(), max_tokens=10), sample)
    assert len({sample.tokens for sample in done.values()}) > 1


def test_a_long_prompt_does_not_stall_the_others(model: Transformer) -> None:
    runner = Watched(model)
    engine = Engine(model, max_num_seqs=2, runner=runner, max_batched_tokens=8)
    add(engine, request("1", [3, 4], stop_token_ids=()))
    engine.step()
    add(engine, request("2", [5] * 50, stop_token_ids=(), max_tokens=3))
    done = drain(engine)
    # 7 of 50 in each pass, next to the other sequence
    assert [len(plan.tokens_N) for plan in runner.plans[1:9]] == [8] * 7 + [2]
    check(model, request("2", [5] * 50, stop_token_ids=(), max_tokens=3), done["2"])
    check(model, request("1", [3, 4], stop_token_ids=()), done["1"])


def test_priority_goes_first(model: Transformer) -> None:
    engine = Engine(model, max_num_seqs=1)
    finished: list[str] = []
    for id, priority in (("1", "standard"), ("2", "standard"), ("3", "interactive")):
        add(engine, request(id, [4, 2], stop_token_ids=(), priority=priority))
        engine.step()
    while not engine.idle:
        finished += [event.id for event in engine.step() if isinstance(event, FinishedRequest)]
    assert finished == ["3", "1", "2"]
    assert engine.stats().preemptions == 1


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_is_late_is_dropped_and_the_others_go_on(model: Transformer, overlaps: bool) -> None:
    runner = TorchRunner(model, 40)
    engine = Engine(model, max_num_seqs=2, runner=Overlapping(runner) if overlaps else runner)
    asked = [request(id, [4, 2, int(id)], stop_token_ids=()) for id in "123"]
    for each, deadline in zip(asked, (10.0, math.inf, 10.0), strict=True):
        engine.add(each, each.id, deadline=deadline)
    for _ in range(4):
        assert engine.expire(9.0) == [] and engine.step() == []
    assert engine.expire(10.0) == [ExpiredRequest("1"), ExpiredRequest("3")]
    done = drain(engine)
    assert done.keys() == {"2"}
    check(model, asked[1], done["2"])
    stats = engine.stats()
    assert (stats.blocks_free, stats.running, stats.waiting) == (stats.blocks, 0, 0)


def test_the_rows_of_a_swap_of_seats_stay_apart(model: Transformer) -> None:
    """Sequences end in a different order than they came, so others move to their rows."""
    engine = Engine(model, max_num_seqs=6)
    asked = [
        request(str(i), [i + 1] * (4 * i + 1), stop_token_ids=(), max_tokens=3 + 5 * (i * 5 % 6))
        for i in range(6)
    ]
    for each in asked:
        add(engine, each)
    done = drain(engine)
    for each in asked:
        check(model, each, done[each.id])


@pytest.mark.parametrize("overlaps", [False, True])
def test_constraints_are_obeyed(model: Transformer, overlaps: bool) -> None:
    engine = engine_with(model, overlaps=overlaps, max_num_seqs=3)
    constraint = OnlyEven()
    add(engine, request("1", [3], constraint=constraint, stop_token_ids=(), max_tokens=12))
    add(engine, request("2", [3], stop_token_ids=(), max_tokens=12))
    done = drain(engine)
    assert constraint.seen == list(done["1"].tokens)
    assert all(token % 2 == 0 for token in constraint.seen)
    assert constraint.seen[2::3] == [6] * 4
    assert done["1"].logprobs[2::3] == (0.0,) * 4  # there was no choice
    check(model, request("2", [3], stop_token_ids=(), max_tokens=12), done["2"])


def test_the_likeliest_tokens_are_told(model: Transformer) -> None:
    engine = Engine(model, max_num_seqs=2)
    add(engine, request("1", [3], top_logprobs=3, stop_token_ids=(), max_tokens=4, temperature=0.0))
    add(engine, request("2", [3], stop_token_ids=(), max_tokens=4))
    done = drain(engine)
    assert done["2"].top_logprobs == ()
    for token, logprob, top in zip(
        done["1"].tokens, done["1"].logprobs, done["1"].top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert top[0] == (token, pytest.approx(logprob))
        assert top[0][1] >= top[1][1] >= top[2][1]


def test_an_aborted_request_gives_its_place_back(model: Transformer) -> None:
    engine = Engine(model, max_num_seqs=2)
    for id in ("1", "2", "3", "4"):
        add(engine, request(id, [int(id)] * 3, stop_token_ids=()))
    engine.step()
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 2)
    engine.abort("1")  # runs
    engine.abort("3")  # waits
    engine.abort("5")  # never was
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    done = drain(engine)
    assert done.keys() == {"2", "4"}
    for id, sample in done.items():
        check(model, request(id, [int(id)] * 3, stop_token_ids=()), sample)


def test_the_seed_is_the_only_randomness(model: Transformer) -> None:
    once, again = (alone(model, request("1", [2, 7], seed=5)) for _ in range(2))
    assert once == again
    assert alone(model, request("1", [2, 7], seed=6)).tokens != once.tokens


def test_ends(model: Transformer) -> None:
    full = alone(model, request("1", [2, 7], stop_token_ids=(), max_tokens=8))
    assert (len(full.tokens), full.finish_reason) == (8, "length")
    stopped = alone(model, request("1", [2, 7], stop_token_ids=(full.tokens[2],), max_tokens=8))
    assert (stopped.tokens, stopped.finish_reason) == (full.tokens[:3], "stop")
    # The context is full before max_tokens; a stop token within the prompt has no effect.
    tight = alone(model, request("1", [2] * 60, stop_token_ids=(), max_tokens=8))
    assert (len(tight.tokens), tight.finish_reason) == (4, "length")
    assert (
        len(
            alone(
                model, request("1", [2], stop_token_ids=(2,), max_tokens=3, temperature=0.0)
            ).tokens
        )
        >= 1
    )


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1] * 64, {}, "no room"),
        ([], {}, "at least one"),
        ([61], {}, "from 0 to 60"),
        ([-1], {}, "from 0 to 60"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"temperature": 1e-40}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": float("nan")}, "top_p"),
        ([1], {"top_k": -1}, "top_k"),
        ([1], {"min_p": -0.1}, "min_p"),
        ([1], {"min_p": 1.1}, "min_p"),
        ([1], {"min_p": float("nan")}, "min_p"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty"),
        ([1], {"repetition_penalty": -1.0}, "repetition_penalty"),
        ([1], {"repetition_penalty": 1e9}, "repetition_penalty"),
        ([1], {"repetition_penalty": float("nan")}, "repetition_penalty"),
        ([1], {"top_logprobs": -1}, "top_logprobs"),
        ([1], {"max_tokens": 60}, "KV cache"),
    ],
)
def test_what_cannot_be_served_is_refused(
    model: Transformer, prompt: list[int], options: dict[str, object], message: str
) -> None:
    engine = engine_with(model, 2, max_num_seqs=1)
    with pytest.raises(ValueError, match=message):
        add(engine, request("1", prompt, **options))
    assert engine.idle
    assert engine.step() == []


def test_one_row_is_the_plain_loop_bit_for_bit(model: Transformer) -> None:
    """Sessions that alternate on an engine of one row, without a prefix cache, get the bits of
    separate loops."""
    engine = Engine(model, max_num_seqs=1, prefix_cache=False)
    said = {name: [name, 2, 3] for name in (1, 2, 3)}
    for turn in range(3):
        for name in said:
            id = str(10 * turn + name)
            add(engine, request(id, said[name], max_tokens=5, stop_token_ids=()))
            sampled = drain(engine)[id]
            tokens, logprobs, num_read = list(said[name]), [], 0
            cache = KVCache(model.config, 1, 64, like=model.rope)
            for u in uniforms(int(id), 5):
                places = torch.arange(num_read, len(tokens))
                attend = PagedAttention(
                    cache, ids=[0], slot_mapping_GN=places[None].numpy(), starts=[0],
                    lengths=[len(tokens)], block_table_GBM=np.array([[[0]]]),
                    num_decode=int(num_read > 0),
                )  # fmt: skip
                p = torch.softmax(
                    model.logits(model(torch.tensor(tokens[num_read:]), places, attend)[-1:]), -1
                )
                num_read = len(tokens)
                tokens.append(int(inverse_cdf(p, torch.tensor([u]))))
                logprobs.append(float(p[0, tokens[-1]].log()))
            assert (sampled.tokens, sampled.logprobs) == (
                tuple(tokens[len(said[name]) :]),
                tuple(logprobs),
            )
            said[name] = [*tokens, 7, 7]


@pytest.mark.parametrize("family", FAMILIES)
def test_prepacked_matrices_give_the_same_bits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds after a swap, and the given model is not modified."""
    model, after = (sharp(FAMILIES[family], seed, factor=3.0).to(torch.bfloat16) for seed in (0, 1))
    before, samples = hf_state_dict(model), []
    for pack in (True, False):
        monkeypatch.setattr(
            "etude.engine.runner._prepacked", _prepacked if pack else lambda model: model
        )
        engine = engine_with(model, max_num_seqs=4)
        for version in (1, 2):
            for id in range(3):
                add(
                    engine,
                    request(str(id), [id + 5] * (3 + 7 * id), stop_token_ids=(), max_tokens=9),
                )
            samples.append(drain(engine))
            engine.load_weights(version, hf_state_dict(after))
    assert samples[:2] == samples[2:]
    assert samples[0]["0"].tokens != samples[1]["0"].tokens
    assert all(torch.equal(tensor, before[name]) for name, tensor in hf_state_dict(model).items())


def test_an_answer_ends_with_the_context_however_long_it_may_be(model: Transformer) -> None:
    """There is memory for one sequence of that length, so it is enough for any."""
    engine = engine_with(model, model.config.max_position_embeddings // BLOCK_SIZE, max_num_seqs=1)
    add(engine, request("1", [1, 2, 3], max_tokens=1_000_000, stop_token_ids=()))
    assert len(drain(engine)["1"].tokens) == model.config.max_position_embeddings - 3


def test_a_model_of_one_layer_reads_a_prompt_in_parts() -> None:
    model = sharp(replace(config(), num_hidden_layers=1), seed=0)
    prompt = [1 + n % 50 for n in range(40)]
    engine = engine_with(model, max_num_seqs=2, max_batched_tokens=16)
    add(engine, request("1", prompt, max_tokens=8, stop_token_ids=()))
    sample = drain(engine)["1"]
    expected = plain_logprobs(model, tuple(prompt), sample.tokens)
    assert sample.logprobs == pytest.approx(expected.tolist(), abs=ROUNDING)
