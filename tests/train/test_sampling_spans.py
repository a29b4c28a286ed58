"""The trainer recomputes every token at its sampling temperature, whatever the temperature of its
stage."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from etude.core.advantage import to_rows
from etude.core.sampling import SamplingParams, SamplingSpan
from etude.core.types import Batch, Row, Score, Segment, Trajectory
from etude.engine.engine import Engine
from etude.model.numerics import INVARIANT
from etude.train.head import MAX_LOGITS
from etude.train.learner import Learner
from etude.train.loss import token_logprobs
from etude.train.objective import RlObjective
from etude.train.packing import RolloutSequence, pack_rollouts
from etude.train.stats import RlStats
from etude.train.teacher import Teacher
from tests.small_model import add, config, drain, plain_logprobs, request, sharp

PROMPT, TOOL = (3, 9, 20, 7), (11, 12, 13)


def at(temperature: float, count: int) -> SamplingSpan:
    return SamplingSpan(SamplingParams(temperature=temperature), count)


def session(engine: Engine, *temperatures: float, seed: int) -> Trajectory:
    """One turn at each temperature; a tool answers between two turns."""
    context, tokens, mask, logprobs, spans, versions = PROMPT, [], [], [], [], []
    for number, temperature in enumerate(temperatures):
        if number:
            tokens += TOOL
            mask += [False] * len(TOOL)
            logprobs += [0.0] * len(TOOL)
            context += TOOL
        asked = request(
            str(seed), list(context), temperature=temperature, max_tokens=6, stop_token_ids=()
        )
        add(engine, asked)
        (sample,) = drain(engine).values()
        tokens += sample.tokens
        mask += [True] * len(sample.tokens)
        logprobs += sample.logprobs
        context += sample.tokens
        spans.append(at(temperature, len(sample.tokens)))
        versions += sample.versions
    segment = Segment(
        prompt=PROMPT,
        tokens=tuple(tokens),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        sampling=tuple(spans),
    )
    return Trajectory(
        id=f"g.{seed}",
        task="t",
        group="g",
        segments=(segment,),
        score=Score(reward=1.0),
        status="done",
    )


def learner() -> Learner:
    model = sharp(config(), 1, factor=2.0).compute_with(INVARIANT)
    return Learner(model.requires_grad_())


def batch(learner: Learner, *temperatures: float) -> Batch:
    engine = Engine(learner.model, max_num_seqs=2)
    rows = [
        row
        for seed in range(4)
        for row in to_rows(session(engine, *temperatures, seed=seed), advantage=1.0)
    ]
    return Batch(step=1, rows=tuple(rows), oldest=0)


def without_sampling(batch: Batch) -> Batch:
    return replace(batch, rows=tuple(replace(row, sampling=()) for row in batch.rows))


@pytest.mark.parametrize("temperatures", [(0.5,), (1.0,), (0.5, 1.0, 1.7)])
@pytest.mark.parametrize("microbatch_tokens", [0, 64])
def test_a_harness_with_a_temperature_of_its_own_has_ratio_1_at_lag_0(
    temperatures: tuple[float, ...], microbatch_tokens: int
) -> None:
    """Exact to the bit, in batch-invariant arithmetic; the stage's own temperature differs."""
    one = learner()
    lesson = batch(one, *temperatures)
    stats = one.rl_step(lesson, lr=1e-4, temperature=0.8, microbatch_tokens=microbatch_tokens)
    assert stats.mismatch.k3_max == 0.0 and stats.mismatch.ratio_max == 1.0
    for row, found in zip(lesson.rows, stats.recomputed, strict=True):
        said = [p for p, sampled in zip(row.logprobs, row.mask, strict=True) if sampled]
        assert found.logprobs == tuple(said)


def test_the_ratio_is_wrong_where_nobody_says_how_it_was_sampled() -> None:
    one = learner()
    stats = one.rl_step(without_sampling(batch(one, 0.5)), lr=1e-4, temperature=1.0)
    assert stats.mismatch.k3 > 0.01


def test_rows_that_do_not_say_take_the_stages_temperature_with_the_same_bits() -> None:
    """Holds next to rows of other temperatures, and if the head takes its tokens in chunks."""

    def step(lesson: Batch) -> tuple[RlStats, dict[str, torch.Tensor]]:
        one = learner()
        stats = one.rl_step(lesson, lr=1e-2, temperature=0.7, objective=RlObjective())
        return stats, one.weights()

    lesson = batch(learner(), 0.7, 0.7)
    (told, ours), (silent, theirs) = step(lesson), step(without_sampling(lesson))
    assert told == silent
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_bits_are_those_of_one_division_for_all() -> None:
    model = learner().model
    hidden_NE = torch.randn(5, config().hidden_size, generator=torch.Generator().manual_seed(0))
    tokens_N = torch.arange(5)
    logits_NV = model.logits(hidden_NE)
    expected_NV = torch.log_softmax(logits_NV / torch.full_like(logits_NV[:1, :1], 0.7), -1)
    _, logp_NV = model.logprobs(hidden_NE, tokens_N, torch.full((5,), 0.7))
    assert torch.equal(logp_NV, expected_NV)
    _, plain_NV = model.logprobs(hidden_NE, tokens_N)
    _, ones_NV = model.logprobs(hidden_NE, tokens_N, torch.ones(5))
    assert torch.equal(plain_NV, ones_NV)


def mixed_rows() -> list[Row]:
    """Two rows of two turns each, with different numbers at every position."""
    rows = []
    for number, temperatures in enumerate([(0.5, 2.0), (1.0, 0.7)]):
        tokens = tuple((7 * place + number) % 61 for place in range(9))
        mask = (False, False, True, True, False, True, True, True, False)
        rows.append(
            Row(
                sample=f"g.{number}",
                tokens=tokens,
                mask=mask,
                logprobs=tuple(-1.0 if sampled else 0.0 for sampled in mask),
                advantages=tuple(1.0 if sampled else 0.0 for sampled in mask),
                versions=(),
                sampling=(at(temperatures[0], 2), at(temperatures[1], 3)),
            )
        )
    return rows


def expected_logprobs(row: Row, model: torch.nn.Module) -> list[float]:
    """Log-probs token by token, each at its own temperature."""
    temperatures = [span.params.temperature for span in row.sampling for _ in range(span.count)]
    places = [place for place, sampled in enumerate(row.mask) if sampled]
    return [
        plain_logprobs(model, row.tokens[:place], row.tokens[place : place + 1], t).item()  # type: ignore[arg-type]
        for place, t in zip(places, temperatures, strict=True)
    ]


@pytest.mark.parametrize("max_logits", [2**25, 3 * 61])
def test_every_token_of_a_row_has_its_own_temperature(
    max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_LOGITS, "cpu", max_logits)
    model, rows = sharp(config(), 2, factor=2.0), mixed_rows()
    packed = pack_rollouts([RolloutSequence.from_row(row, n) for n, row in enumerate(rows)])
    logp_N, _ = token_logprobs(model, packed, with_stats=True)
    expected = [logp for row in rows for logp in expected_logprobs(row, model)]
    assert logp_N.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_teacher_judges_each_token_at_the_temperature_that_it_was_drawn_at() -> None:
    teacher, rows = sharp(config(), 2, factor=2.0), mixed_rows()
    lesson = Batch(step=1, rows=tuple(rows), oldest=0)
    judged, _ = Teacher(teacher).compute_advantages(lesson, temperature=9.0, microbatch_tokens=1000)
    for row, seen in zip(rows, judged.rows, strict=True):
        gains = [a for a, sampled in zip(seen.advantages, row.mask, strict=True) if sampled]
        expected = [logp + 1.0 for logp in expected_logprobs(row, teacher)]
        assert gains == pytest.approx(expected, abs=1e-5)


def test_the_reference_is_computed_at_the_temperature_of_each_token() -> None:
    """Its weights are still those of the policy: where both agree, the KL costs nothing."""
    lesson = Batch(step=1, rows=tuple(mixed_rows()), oldest=0)
    free, held = learner(), learner()
    held.snapshot()
    stats = [
        one.rl_step(lesson, lr=1e-3, temperature=0.9, objective=RlObjective(kl_coef=kl_coef))
        for one, kl_coef in ((free, 0.0), (held, 10.0))
    ]
    assert stats[1].loss == pytest.approx(stats[0].loss, abs=1e-4)
    assert stats[1].grad_norm == pytest.approx(stats[0].grad_norm, rel=1e-4)
