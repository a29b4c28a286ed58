"""A draft changes how long an answer takes, and nothing else: tokens and log-probs are those of
plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.core.sampling import Sample, expand_spans
from etude.engine.batch import ForwardBatch, SamplerOutput
from etude.engine.engine import Engine, FinishedRequest, StreamedToken
from etude.engine.runner import BLOCK_SIZE, TorchRunner
from etude.engine.speculate import (
    MAX_LENGTH,
    MIN_LENGTH,
    TOKENS_PER_MATCHED_TOKEN,
    NgramDrafter,
    longest_match,
    next_length,
)
from etude.model.files import hf_state_dict
from etude.model.transformer import Transformer
from tests.engine.reference import FAMILIES, OnlyEven, Overlapping, check, plain_logits
from tests.small_model import ROUNDING, Asked, add, drain, request, sharp


def spoiled(answer: Iterable[int], rng: random.Random) -> tuple[int, ...]:
    """The answer before a simulated edit: some tokens differ, some are missing, some are added."""
    tokens: list[int] = []
    for token in answer:
        match rng.randrange(12):
            case 0:
                tokens.append(rng.randrange(61))
            case 1:
                tokens += [token, rng.randrange(61)]
            case 2:
                pass
            case _:
                tokens.append(token)
    return tuple(tokens)


def engine_with(
    model: Transformer, num_blocks: int = 64, *, overlaps: bool = False, **options: object
) -> Engine:
    runner = TorchRunner(model, num_blocks)
    return Engine(model, runner=Overlapping(runner) if overlaps else runner, **options)  # type: ignore[arg-type]


def answers(model: Transformer, asked: list[Asked]) -> dict[str, Sample]:
    engine = engine_with(model, 400, max_num_seqs=8)
    for each in asked:
        add(engine, each)
    return drain(engine)


def some_request(id: int, rng: random.Random) -> Asked:
    common = [rng.randrange(2)] * rng.choice((0, 20, 40))
    own = [rng.randrange(61) for _ in range(rng.randrange(1, 30))]
    return request(
        str(id), common + own, max_tokens=rng.randrange(1, 50), seed=rng.randrange(99),
        priority=rng.choice(("standard", "standard", "interactive")),
        temperature=rng.choice((0.0, 0.7, 1.0)),
        top_k=rng.choice((0, 5)), stream=rng.random() < 0.3,
        repetition_penalty=1.0 if id % 3 else 1.1, min_p=0.0 if id % 4 else 0.05,
        stop_token_ids=tuple(rng.sample(range(61), 1)), top_logprobs=rng.choice((0, 2)),
    )  # fmt: skip


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_schedules(family: str, overlaps: bool) -> None:
    """Requests with drafts run next to others without, are preempted, are read in chunks, and share
    prefixes."""
    rng = random.Random(1)
    model = sharp(FAMILIES[family], seed=0, factor=3.0)
    plain = {str(id): some_request(id, rng) for id in range(12)}
    expected = answers(model, list(plain.values()))
    asked = dict(plain)
    for id in rng.sample(sorted(plain), 9):
        guesses = tuple(spoiled(expected[id].tokens, rng) for _ in range(rng.randrange(3)))
        asked[id] = replace(plain[id], prediction=spoiled(expected[id].tokens, rng), drafts=guesses)
    engine = engine_with(
        model, 14, overlaps=overlaps, max_num_seqs=5, max_batched_tokens=rng.choice((25, 200))
    )
    waiting, done, streamed = list(asked.values()), {}, {}
    while waiting or not engine.idle:
        if waiting and rng.random() < 0.7:
            add(engine, waiting.pop())
        for event in engine.step():
            if isinstance(event, StreamedToken):
                streamed.setdefault(event.id, []).append((event.token, event.logprob))
            else:
                done[event.id] = event.sample
    assert done.keys() == asked.keys()
    for id, sample in done.items():
        check(model, plain[id], sample)
        assert sample.tokens == expected[id].tokens
        if asked[id].stream:
            assert streamed[id] == list(zip(sample.tokens, sample.logprobs, strict=True))
        if not asked[id].speculates:
            assert (sample.accepted_draft_tokens, sample.rejected_draft_tokens) == (0, 0)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_free) == (0, 0, 14)
    assert stats.preemptions > 0
    assert (
        stats.accepted_tokens == sum(sample.accepted_draft_tokens for sample in done.values()) > 50
    )
    assert (
        stats.draft_tokens - stats.accepted_tokens
        >= sum(sample.rejected_draft_tokens for sample in done.values())
        > 0
    )


class Watched(TorchRunner):
    def __init__(self, model: Transformer) -> None:
        super().__init__(model, 64)
        self.plans: list[ForwardBatch] = []

    def launch(self, batch: ForwardBatch) -> Callable[[], SamplerOutput]:
        self.plans.append(batch)
        return super().launch(batch)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_that_was_foreseen_takes_few_passes(temperature: float) -> None:
    model = sharp(FAMILIES["llama"], seed=0, factor=3.0)
    plain = request("7", [3, 1, 4], stop_token_ids=(), max_tokens=120, temperature=temperature)
    expected = answers(model, [plain])["7"]
    changed = (*expected.tokens[:60], 60, *expected.tokens[61:])
    for guess in ({"prediction": changed}, {"drafts": ((9, 9, 9), changed)}):
        runner = Watched(model)
        engine = Engine(model, max_num_seqs=2, runner=runner)
        add(engine, replace(plain, **guess))
        sample = drain(engine)["7"]
        assert sample.tokens == expected.tokens
        assert sample.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING)
        assert len(runner.plans) <= 12
        assert sample.accepted_draft_tokens >= 108
        assert sum(
            len(plan.logits_indices_R) for plan in runner.plans
        ) == 1 + sample.accepted_draft_tokens + sample.rejected_draft_tokens + (
            len(runner.plans) - 1
        )


def test_without_a_hit_it_is_plain_decoding(model: Transformer) -> None:
    plain = request("1", [5, 6, 7], stop_token_ids=())
    runner = Watched(model)
    engine = Engine(model, max_num_seqs=2, runner=runner)
    add(engine, replace(plain, prediction=()))
    check(model, plain, drain(engine)["1"])


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_swap_between_two_drafts(overlaps: bool) -> None:
    """Every token names the weights that sampled it, and equals that of plain decoding with the
    same swap."""
    config = FAMILIES["llama"]
    published = [hf_state_dict(sharp(config, seed, factor=3.0), torch.float32) for seed in range(2)]
    plain = [request(str(id), [id, 2, 3], stop_token_ids=(), max_tokens=60) for id in range(4)]
    rng = random.Random(3)
    old = answers(sharp(config, 0, factor=3.0), plain)
    engine = engine_with(sharp(config, 0, factor=3.0), overlaps=overlaps, max_num_seqs=4)
    for each in plain:
        add(engine, replace(each, prediction=spoiled(old[each.id].tokens, rng)))
    done: dict[str, Sample] = {}
    for step in range(400):
        if step == 6:
            engine.load_weights(1, published[1])
        done |= {
            event.id: event.sample for event in engine.step() if isinstance(event, FinishedRequest)
        }
    for each in plain:
        single = Engine(sharp(config, 0, factor=3.0), max_num_seqs=1)
        add(single, each)
        for version in expand_spans(done[each.id].versions):
            if version != single.version:
                single.load_weights(version, published[version])
            events = single.step()
        (finished,) = events
        assert isinstance(finished, FinishedRequest)
        assert len(finished.sample.versions) == 2
        assert (finished.sample.tokens, finished.sample.versions) == (
            done[each.id].tokens,
            done[each.id].versions,
        )
        assert finished.sample.logprobs == pytest.approx(done[each.id].logprobs, abs=ROUNDING)
    assert sum(sample.accepted_draft_tokens for sample in done.values()) > 0


def test_what_was_rejected_is_never_shared(model: Transformer) -> None:
    """Requests that begin with the answer find its blocks; requests that begin with the draft find
    nothing of it."""
    plain = request("1", [5, 6, 7], stop_token_ids=(), max_tokens=50, temperature=0.0)
    answer = answers(model, [plain])["1"].tokens
    wrong = tuple((token + 1) % 61 for token in answer[8:])
    engine = Engine(model, max_num_seqs=2)
    add(engine, replace(plain, prediction=answer[:8] + wrong))
    sample = drain(engine)["1"]
    assert sample.tokens == answer
    assert sample.rejected_draft_tokens > 0
    for id, text in (("2", answer), ("3", answer[:8] + wrong)):
        before = engine.stats().cached_tokens
        later = request(id, [5, 6, 7, *text][:52], max_tokens=4)
        add(engine, later)
        check(model, later, drain(engine)[id])
        assert engine.stats().cached_tokens - before == (3 * BLOCK_SIZE if text == answer else 0)


@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_under_a_constraint(model: Transformer, overlaps: bool) -> None:
    rng = random.Random(5)
    plain = [request(str(id), [3, id], stop_token_ids=(), max_tokens=40) for id in range(3)]
    expected = answers(model, [replace(each, constraint=OnlyEven()) for each in plain])
    engine = engine_with(model, overlaps=overlaps, max_num_seqs=3)
    for each in plain:
        guess = spoiled(expected[each.id].tokens, rng)
        add(engine, replace(each, constraint=OnlyEven(), prediction=guess))
    done = drain(engine)
    for each in plain:
        assert done[each.id].tokens == expected[each.id].tokens
        assert done[each.id].logprobs == pytest.approx(expected[each.id].logprobs, abs=ROUNDING)
        assert done[each.id].accepted_draft_tokens > 0


class Biased(TorchRunner):
    """A runner that accepts a draft token in one case of eight, whatever the distribution is."""

    def launch(self, batch: ForwardBatch) -> Callable[[], SamplerOutput]:
        drawn = super().launch(batch)()
        for row, place in enumerate(batch.logits_indices_R[:-1]):
            if (
                batch.logits_indices_R[row + 1] == place + 1
                and batch.num_decode <= place
                and batch.sampling.u_R[row] < 1 / 8
            ):
                drawn.tokens[row] = int(batch.tokens_N[place + 1])
        return lambda: drawn


def surprise(model: Transformer, runner: TorchRunner) -> float:
    """Chi-square of the second token of 1,500 samples, for which the likeliest was drafted, in
    standard deviations."""
    prompt, first, num_samples = (3, 1, 4), 11, 1500
    p_1 = torch.softmax(_next_logits(model, (*prompt, first)), -1)
    p_12 = torch.softmax(
        torch.stack([_next_logits(model, (*prompt, first, token)) for token in range(61)]), -1
    )
    p = (p_1[:, None] * p_12).sum(0).double().numpy()
    guess = tuple(token for pair in enumerate(p_12.argmax(-1).tolist()) for token in pair)
    engine = Engine(model, max_num_seqs=64, runner=runner, max_batched_tokens=1024)
    for seed in range(num_samples):
        add(
            engine,
            request(str(seed), [*prompt, first], max_tokens=3, stop_token_ids=(), prediction=guess),
        )
    done = drain(engine)
    assert sum(sample.accepted_draft_tokens for sample in done.values()) > 50
    counts = np.bincount([sample.tokens[1] for sample in done.values()], minlength=61)
    often = p * num_samples >= 5
    expected = np.append(p[often], p[~often].sum()) * num_samples
    seen = np.append(counts[often], counts[~often].sum())
    chi = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    return (chi - freedom) / (2 * freedom) ** 0.5


def _next_logits(model: Transformer, tokens: tuple[int, ...]) -> torch.Tensor:
    return plain_logits(model, tokens)[0][-1]


def test_samples_keep_their_distribution() -> None:
    model = sharp(FAMILIES["llama"], seed=0, factor=3.0)
    assert surprise(model, TorchRunner(model, 400)) < 4
    assert surprise(model, Biased(model, 400)) > 8  # the same test detects a small bias


def told(drafter: NgramDrafter, tokens: list[int], limit: int = 99) -> list[int]:
    return drafter.propose(tokens, limit)


def test_the_first_match_behind_the_pointer_is_continued() -> None:
    #             0  1  2  3  4  5  6  7  8  9
    prediction = [1, 2, 3, 1, 2, 4, 1, 2, 5, 6]
    drafter, said = NgramDrafter([9], 50, prediction), [9]
    assert told(drafter, said) == []  # 9 does not occur in the texts
    said += [1, 2]
    assert told(drafter, said) == [3, 1, 2, 4, 1, 2, 5, 6]
    said += [3, 1, 7]  # the pointer is after the second 1
    assert told(drafter, said) == []
    said += [1, 2]
    assert told(drafter, said) == [4, 1, 2, 5, 6]
    said += [4, 1, 8, 1, 2]
    assert told(drafter, said) == [5, 6]
    said += [5, 0, 1, 2]  # no match after the pointer: the first one is used
    assert told(drafter, said) == [3, 1, 2, 4, 1, 2, 5, 6]


def test_longer_matches_win_and_the_prediction_wins_a_tie() -> None:
    assert told(NgramDrafter([1, 2, 3, 7, 2, 3], 9, prediction=[3, 8]), [1, 2, 3, 7, 2, 3])[0] == 7
    assert told(NgramDrafter([3, 7, 1, 3], 9, prediction=[3, 8]), [3, 7, 1, 3]) == [8]
    assert told(NgramDrafter([5], 9, prediction=(), drafts=[[5], [4, 5, 6], [5, 1]]), [5]) == [
        6
    ]  # never across two texts


def test_a_draft_is_as_long_as_drafts_were_right() -> None:
    prediction = list(range(100, 1000))
    drafter, said, lengths = NgramDrafter([1], 2000, prediction), [1, 100], []
    for _ in range(8):
        draft = told(drafter, said, 500)
        said += [*draft, said[-1] + len(draft) + 1]
        lengths.append(len(draft))
    assert lengths == [TOKENS_PER_MATCHED_TOKEN, 32, 64, 128, 128, 128, 128, 128]
    said[-1] = 7  # the last token was sampled, and is not in the text
    assert told(drafter, said, 500) == []
    said += [300]
    assert len(told(drafter, said, 3)) == 3
    assert told(drafter, said, 0) == []


@given(st.integers(MIN_LENGTH, MAX_LENGTH), st.integers(1, MAX_LENGTH), st.data())
def test_the_rule_of_lengths(length: int, drafted: int, data: st.DataObject) -> None:
    accepted = data.draw(st.integers(0, drafted))
    after = next_length(length, drafted, accepted)
    assert MIN_LENGTH <= after <= MAX_LENGTH
    assert after >= length if accepted == drafted else after <= length


few_tokens = st.lists(st.integers(0, 3), max_size=40)


@given(few_tokens, few_tokens.filter(bool))
def test_the_longest_match_is_found(text: list[int], tail: list[int]) -> None:
    length, places = longest_match(np.array(text, np.int64), np.array(tail, np.int64))

    def ends(count: int) -> list[int]:
        return [
            e for e in range(count, len(text)) if text[e - count : e] == tail[len(tail) - count :]
        ]

    assert length == max(n for n in range(len(tail) + 1) if n == 0 or ends(n))
    assert not length or places.tolist() == ends(length)


@given(few_tokens, few_tokens.filter(bool), st.lists(few_tokens, max_size=3), st.data())
def test_drafts_come_from_the_texts(
    prediction: list[int], said: list[int], drafts: list[list[int]], data: st.DataObject
) -> None:
    drafter = NgramDrafter(said, 200, prediction, drafts)
    said = list(said)
    for _ in range(6):
        limit = data.draw(st.integers(0, 9))
        draft = drafter.propose(said, limit)
        assert len(draft) <= limit
        texts = [prediction, said, *drafts]
        assert not draft or any(
            text[at - 1 : at + len(draft)] == [said[-1], *draft]
            for text in texts
            for at in range(1, len(text))
        )
        right = data.draw(st.integers(0, len(draft)))
        said += [*draft[:right], data.draw(st.integers(0, 3))]
