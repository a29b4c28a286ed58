"""Whatever happens around a request, it gets the tokens that it would have got alone, with exact log-probs."""

from __future__ import annotations

import pytest
import torch

from etude.core.types import Sample, Span
from etude.engine.engine import Engine, Request
from etude.engine.sampler import draws
from etude.engine.sampler import sample as draw
from etude.model.attention import Cached, KVCache
from etude.model.transformer import Transformer
from tests.small_model import drain, plain_logprobs, request


def alone(model: Transformer, asked: Request) -> Sample:
    engine = Engine(model, max_batch=1)
    engine.add(asked)
    return drain(engine)[asked.id]


def test_a_batch_gives_what_each_request_gets_alone(model: Transformer, requests: list[Request]) -> None:
    engine = Engine(model, max_batch=4)
    for asked in requests:
        engine.add(asked)
    together = drain(engine)
    assert engine.num_running == engine.num_waiting == 0
    for asked in requests:
        single = alone(model, asked)
        assert together[asked.id].tokens == single.tokens
        assert together[asked.id].finish == single.finish
        assert together[asked.id].logprobs == pytest.approx(single.logprobs, abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward(model: Transformer, requests: list[Request], temperature: float) -> None:
    engine = Engine(model, max_batch=8)
    for asked in requests:
        engine.add(request(asked.id, list(asked.prompt), temperature=temperature))
    for id, sample in drain(engine).items():
        plain = plain_logprobs(model, requests[int(id)].prompt, sample.tokens, temperature)
        assert sample.logprobs == pytest.approx(plain.tolist(), abs=1e-4)


def test_requests_that_come_late_change_nothing_for_the_others(model: Transformer, requests: list[Request]) -> None:
    engine = Engine(model, max_batch=3)
    done: dict[str, Sample] = {}
    for asked in requests:
        engine.add(asked)
        done |= {finished.id: finished.sample for finished in engine.step()}
    done |= drain(engine)
    assert {id: sample.tokens for id, sample in done.items()} == {r.id: alone(model, r).tokens for r in requests}


def test_a_swap_drops_nobody_and_every_token_says_its_version(
    model: Transformer, other_weights: dict[str, torch.Tensor]
) -> None:
    engine = Engine(model, max_batch=2, version=4)
    for id in ("1", "2", "3"):
        engine.add(request(id, [5, 6, 7], stop=frozenset()))
    before = alone(model, request("1", [5, 6, 7], stop=frozenset()))
    for _ in range(6):
        assert engine.step() == []
    engine.load(9, other_weights)
    done = drain(engine)
    assert done["1"].versions == (Span(4, 6), Span(9, 14))
    assert done["1"].tokens[:6] == before.tokens[:6]
    assert done["1"].tokens[6:] != before.tokens[6:]
    assert done["2"].versions == (Span(4, 6), Span(9, 14))
    assert done["3"].versions == (Span(9, 20),)  # it waited for a row
    assert (
        done["3"].tokens == alone(model, request("3", [5, 6, 7], stop=frozenset())).tokens
    )  # `model` has the new weights


def turns(engine: Engine, count: int) -> list[Sample]:
    """A session: each prompt is all that was said so far, and a little more."""
    said, samples = [3, 1, 4, 1, 5], []
    for turn in range(count):
        engine.add(request(str(turn), said, max_tokens=6, stop=frozenset()))
        samples.append(drain(engine)[str(turn)])
        said = [*said, *samples[-1].tokens, 9, 2, 6]
    return samples


def test_the_prefix_cache_changes_the_work_and_not_the_answer(model: Transformer) -> None:
    with_cache, without = Engine(model, max_batch=2), Engine(model, max_batch=2, prefix_tokens=0)
    for cached, plain in zip(turns(with_cache, 5), turns(without, 5), strict=True):
        assert cached.tokens == plain.tokens
        assert cached.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def test_a_turn_reads_only_what_is_new(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    forward = Transformer.forward

    def counting(self: Transformer, tokens_BT: torch.Tensor, *rest: object) -> torch.Tensor:
        read.append(tokens_BT.numel())
        return forward(self, tokens_BT, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Transformer, "forward", counting)
    turns(Engine(model, max_batch=1), 3)
    # The last sampled token of a turn has not been read by the model yet; the next turn begins with it.
    assert read == [5, *[1] * 5, 4, *[1] * 5, 4, *[1] * 5]


def test_old_weights_leave_nothing_behind(model: Transformer, other_weights: dict[str, torch.Tensor]) -> None:
    """Neither what they computed alone nor what a swap has mixed is reused."""
    engine = Engine(model, max_batch=2)
    first = turns(engine, 1)[0]
    engine.add(request("7", [8, 8, 8], stop=frozenset(), max_tokens=4))
    engine.step()
    engine.load(1, other_weights)
    mixed = drain(engine)["7"]
    for prompt in ([3, 1, 4, 1, 5, *first.tokens, 9], [8, 8, 8, *mixed.tokens, 9]):
        engine.add(request("1", prompt))
        sample = drain(engine)["1"]
        assert sample.logprobs == pytest.approx(
            plain_logprobs(model, tuple(prompt), sample.tokens, 1.0).tolist(), abs=1e-4
        )


def test_an_aborted_request_gives_its_row_back(model: Transformer) -> None:
    engine = Engine(model, max_batch=2)
    for id in ("1", "2", "3", "4"):
        engine.add(request(id, [int(id)] * 3, stop=frozenset()))
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
        assert sample.tokens == alone(model, request(id, [int(id)] * 3, stop=frozenset())).tokens


def test_the_seed_is_the_only_randomness(model: Transformer) -> None:
    once, again = (alone(model, request("1", [2, 7], seed=5)) for _ in range(2))
    assert once == again
    assert alone(model, request("1", [2, 7], seed=6)).tokens != once.tokens


def test_ends(model: Transformer) -> None:
    full = alone(model, request("1", [2, 7], stop=frozenset(), max_tokens=8))
    assert (len(full.tokens), full.finish) == (8, "length")
    stopped = alone(model, request("1", [2, 7], stop=frozenset({full.tokens[2]}), max_tokens=8))
    assert (stopped.tokens, stopped.finish) == (full.tokens[:3], "stop")
    # The context is full before max_tokens; a stop token within the prompt means nothing.
    tight = alone(model, request("1", [2] * 60, stop=frozenset(), max_tokens=8))
    assert (len(tight.tokens), tight.finish) == (4, "length")
    assert len(alone(model, request("1", [2], stop=frozenset({2}), max_tokens=3, temperature=0.0)).tokens) >= 1


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
    ],
)
def test_what_cannot_be_served_is_refused(
    model: Transformer, prompt: list[int], options: dict[str, object], message: str
) -> None:
    engine = Engine(model, max_batch=1)
    with pytest.raises(ValueError, match=message):
        engine.add(request("1", prompt, **options))
    assert engine.idle
    assert engine.step() == []


def test_long_and_short_prompts_are_read_together(model: Transformer) -> None:
    """Padding reaches past the end of the context for the one that starts late, and harms nobody."""
    engine = Engine(model, max_batch=3)
    session = turns(engine, 1)[0]
    late = [3, 1, 4, 1, 5, *session.tokens, *[9] * 45]
    asked = [request("1", late, max_tokens=8), request("2", [4] * 60, max_tokens=8), request("3", [7], max_tokens=8)]
    for each in asked:
        engine.add(each)
    done = drain(engine)
    for each in asked:
        plain = plain_logprobs(model, each.prompt, done[each.id].tokens, 1.0)
        assert done[each.id].logprobs == pytest.approx(plain.tolist(), abs=1e-4)


def test_one_row_is_the_plain_loop_bit_for_bit(model: Transformer) -> None:
    """Sessions that take turns at an engine of one row get the bits of a loop that has a cache for each of them."""
    engine = Engine(model, max_batch=1)
    said = {name: [name, 2, 3] for name in (1, 2, 3)}
    caches = {name: KVCache(model.config, rows=1, length=64) for name in said}
    read = dict.fromkeys(said, 0)
    for turn in range(3):
        for name in said:
            id = str(10 * turn + name)
            engine.add(request(id, said[name], max_tokens=5, stop=frozenset()))
            sampled = drain(engine)[id]
            tokens, logprobs = list(said[name]), []
            for u in draws(int(id), 5):
                attend = Cached(caches[name], torch.tensor([read[name]]), len(tokens) - read[name])
                hidden = model(torch.tensor([tokens[read[name] :]]), attend.positions_BT, attend)
                read[name] = len(tokens)
                token_B, logprob_B = draw(model.logits(hidden[:, -1]), torch.ones(1), torch.tensor([u]))
                tokens.append(int(token_B))
                logprobs.append(float(logprob_B))
            assert (sampled.tokens, sampled.logprobs) == (tuple(tokens[len(said[name]) :]), tuple(logprobs))
            said[name] = [*tokens, 7, 7]
