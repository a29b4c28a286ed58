"""The figures of the benchmark on stale data, worked by hand, and its configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.bench.lag import RUNS, UNDER_WAY, before_rl, loop, metrics
from etude.core.config import parse
from etude.core.events import EvalDone, Event, StepDone
from etude.core.stages import RlConfig
from etude.store.codec import Stamped
from etude.train.correction import CORRECTION


def step(number: int, lags: tuple[int, ...], k3: float, capped: float) -> StepDone:
    zero = dict.fromkeys(("loss", "k1", "k3_p99", "entropy", "grad_norm", "wait_s", "seconds"), 0.0)
    return StepDone(
        step=number, lag=2, lags=lags, tokens=10, k3_mean=k3, corrected_frac=capped, **zero
    )


def test_the_lag_is_that_of_tokens_once_the_run_is_under_way() -> None:
    noted: list[Event] = [
        EvalDone(stage="", split="heldout", version=0, solved=1, total=4, low=0.0, high=1.0),
        step(1, (10,), 0.0, 0.0),
        step(UNDER_WAY + 1, (0, 10), 0.1, 0.2),
        step(UNDER_WAY + 2, (5, 0, 5), 0.2, 0.1),
        EvalDone(stage="rl", split="heldout", version=3, solved=3, total=4, low=0.0, high=1.0),
    ]
    assert metrics([Stamped(0.0, event) for event in noted]) == pytest.approx(
        {"solved": 0.75, "lag": 1.0, "k3": 0.1, "capped": 0.1}
    )


def test_every_correction_is_tried_and_nothing_else_differs() -> None:
    assert [stage.kind for stage in parse(before_rl()).stage] == ["midtrain", "sft"]
    assert {correction for lag, correction in RUNS.values() if lag == 8} == {"none", *CORRECTION}
    stages = [parse(loop(Path("/model"), *each)).stage[0] for each in RUNS.values()]
    assert [(s.max_lag, s.correction) for s in stages if isinstance(s, RlConfig)] == list(
        RUNS.values()
    )
    assert (
        len(
            {
                s.model_copy(update={"max_lag": 0, "correction": None}).model_dump_json()
                for s in stages
            }
        )
        == 1
    )
