"""The code around an RL step: a batch that is refused, an objective from a config, an event with
all metrics."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.events import Event, StepProgress
from etude.core.sampling import VersionSpan
from etude.core.stages import RlConfig
from etude.core.types import Batch, Row
from etude.model.transformer import init_from_scratch
from etude.store.objects import Objects
from etude.store.runs import Run
from etude.train.learner import Learner
from etude.train.loss import LOSS, Clip
from etude.trainer import step
from etude.trainer.step import StepReporter, objective_of
from tests.small_model import config


def rl(*keys: str) -> RlConfig:
    (stage,) = parse(
        "\n".join(['name = "a"', "[[stage]]", 'kind = "rl"', "steps = 1", *keys])
    ).stage
    assert isinstance(stage, RlConfig)
    return stage


ROW = Row(
    sample="g.0",
    tokens=(5, 6, 7),
    mask=(False, True, True),
    logprobs=(0.0, -1.0, -14.0),
    advantages=(0.0, 0.5, 0.5),
    versions=(VersionSpan(1, 1), VersionSpan(2, 1)),
)
BATCH = Batch(step=3, rows=(ROW, ROW), oldest=1, reward=0.5)


def test_a_loss_brings_what_it_goes_with_and_the_config_has_the_last_word() -> None:
    default = objective_of(rl())
    assert (default.loss, default.correction, default.aggregate) == (
        LOSS["reinforce"],
        "truncated",
        "token",
    )
    dapo = objective_of(rl('loss = "dapo"'))
    assert (dapo.correction, dapo.aggregate, dapo.clip) == ("none", "token", Clip(0.2, 0.28))
    mine = objective_of(
        rl(
            'loss = "dapo"',
            'loss_aggregation = "constant"',
            'correction = "masked"',
        )
    )
    assert (mine.correction, mine.aggregate, mine.clip) == ("masked", "constant", Clip(0.2, 0.28))
    wide = objective_of(rl('loss = "dapo"', "clip_high = 0.4", 'correction = "none"'))
    assert (wide.correction, wide.clip) == ("none", Clip(0.2, 0.4))


def of(losses: str, *parts: str) -> str:
    """The source of a file with a loss."""
    given = ", ".join(
        [f"function=lambda tokens, clip: (lambda logp: {losses})(tokens.logp_N)", *parts]
    )
    return f"from etude.train.loss import PolicyLoss\nmine = PolicyLoss({given})"


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        (None, "mine", "my_loss.py does not exist; relative paths start at the folder"),
        ("def mine(:", "mine", "my_loss.py, line 1: invalid syntax"),
        (
            "import nowhere_to_be_found",
            "mine",
            "cannot be loaded (No module named 'nowhere_to_be_found')",
        ),
        ("other = 1", "mine", "does not define 'mine'"),
        (
            "def mine(tokens, clip): ...",
            "mine",
            "is a function: it must be an etude.train.loss.PolicyLoss",
        ),
        (of("logp.sum()"), "mine", "returned a tensor of shape () for 3 tokens: it must return"),
        (of("logp[:, None]"), "mine", "returned a tensor of shape (3, 1) for 3 tokens"),
        (of("logp[:-1]"), "mine", "returned a tensor of shape (2,) for 3 tokens"),
        (of("None"), "mine", "returned a NoneType"),
        (of("logp.detach()"), "mine", "do not depend on tokens.logp_N"),
        (of("logp * float('nan')"), "mine", "returned [nan, nan, nan]; all values must be finite"),
        (of("logp / {}['x']"), "mine", "my_loss.py, line 2: 'x'"),
        (
            of("logp", "correction='trunc'"),
            "mine",
            "has correction = 'trunc': it must be one of none, truncated",
        ),
        (
            of("logp", "aggregate='tokens'"),
            "mine",
            "has aggregate = 'tokens': it must be one of token, sequence",
        ),
        (of("logp", "clip=0.2"), "mine", "has clip = 0.2: it must be a Clip(low, high)"),
    ],
)
def test_a_loss_that_cannot_be_had_is_one_sentence(
    text: str | None, name: str, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "my_loss.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(EtudeError) as caught:
        objective_of(rl(f'loss = "{file}:{name}"'))
    assert told in str(caught.value) and "\n" not in str(caught.value)


def cut_short(data: bytes) -> bytes:
    return data[: len(data) // 2]


def changed(data: bytes) -> bytes:
    return data.replace(b"\x05\x06\x07", b"\x05\x06\xff")


def nearly_the_same(data: bytes) -> bytes:
    """A log-prob of -1.0 that has become another number, which could well be one."""
    return data.replace(struct.pack(">d", -1.0), struct.pack(">d", -1.5))


@pytest.mark.parametrize(
    "damage",
    [cut_short, changed, nearly_the_same, lambda data: b"", lambda data: b"\x00" * len(data)],
)
def test_a_batch_that_was_damaged_on_its_way_is_named(damage: Callable[[bytes], bytes]) -> None:
    run = Run(Objects.open("memory:"))
    run.put_batch(BATCH)
    run.objects.put("batches/000003", damage(run.objects.get("batches/000003")))
    with pytest.raises(EtudeError, match="memory:.*batches/000003"):
        StepReporter(Learner(init_from_scratch(config(), 0))).check(
            run.batch(3), "memory: batches/000003"
        )


def test_a_batch_of_another_run_is_refused_before_the_step() -> None:
    run = Run(Objects.open("memory:"))
    run.put_batch(replace(BATCH, rows=(replace(ROW, tokens=(5, 6, 99_999)),)))
    with pytest.raises(EtudeError, match="row of g.0: a token is outside the vocabulary"):
        StepReporter(Learner(init_from_scratch(config(), 0))).check(
            run.batch(3), "memory: batches/000003"
        )


def test_the_event_says_what_the_step_did() -> None:
    run, learner = Run(Objects.open("memory:")), Learner(init_from_scratch(config(), 0))
    run.put_batch(BATCH)
    run.put_batch(replace(BATCH, step=4))
    reporter = StepReporter(learner)
    first = reporter.report(
        batch := reporter.check(run.batch(3), "memory: batches/000003"),
        learner.rl_step(batch, lr=1e-3),
    )
    assert (first.step, first.reward, first.lag, first.lags, first.tokens, first.repeated_rows) == (
        3,
        0.5,
        1,
        (2, 2),
        4,
        0,
    )
    assert (
        first.tokens_per_s == pytest.approx(4 / first.seconds)
        and first.mfu is not None
        and 0 < first.mfu < 1
    )
    batch = reporter.check(run.batch(4), "here")
    stats = replace(
        learner.rl_step(batch, lr=1e-3), router_mismatch_frac=0.25, experts_replaced_frac=0.125
    )
    again = reporter.report(batch, stats, teacher_kl=0.5)
    assert again.repeated_rows == 2 and again.lags == (0, 2, 2)
    # of models with experts, and of those with a teacher
    assert first.router_mismatch_frac is first.experts_replaced_frac is first.teacher_kl is None
    assert (again.router_mismatch_frac, again.experts_replaced_frac) == (0.25, 0.125)
    assert again.teacher_kl == 0.5


def test_a_long_step_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, told = Learner(init_from_scratch(config(), 0)), list[Event]()
    reporter = StepReporter(learner, told.append)
    learner.rl_step(reporter.check(BATCH, "here"), lr=1e-3, microbatch_tokens=1)
    assert told == [], "it was quick"
    monkeypatch.setattr(step, "PROGRESS_S", -1.0)
    learner.rl_step(reporter.check(BATCH, "here"), lr=1e-3, microbatch_tokens=1)
    assert told == [StepProgress(step=3, done=done, total=2) for done in (1, 2)]


def test_ranks_that_compute_rows_together_are_not_counted_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner, told = Learner(init_from_scratch(config(), 0)), list[Event]()
    learner.num_shares = 2
    monkeypatch.setattr(step, "PROGRESS_S", -1.0)
    StepReporter(learner, told.append).check(replace(BATCH, rows=(ROW,) * 6), "here")
    learner.on_rows(1)
    assert told == [StepProgress(step=3, done=2, total=6)]
