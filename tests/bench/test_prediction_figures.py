"""The parts that a prediction is made of, and what the simulator makes of them."""

from __future__ import annotations

import pytest

from etude.bench.prediction import Parts, parts_of, predict, scenario_of
from etude.core.config import parse
from etude.core.events import AttemptDone, Event, GroupDone, StepDone, WeightsLive
from etude.core.stages import RlConfig
from etude.store.codec import Stamped

CONFIG = parse('name = "a"\n[[stage]]\nkind = "rl"\nsteps = 40\nmax_lag = 0\ngroups_per_step = 4')


def attempt(seconds: float, split: str = "train") -> AttemptDone:
    return AttemptDone(
        id="a", task="t", split=split, status="finished", reward=1.0, error=None, seconds=seconds
    )


def step(number: int, seconds: float) -> StepDone:
    return StepDone(
        step=number, loss=0.0, lag=0, k1=0.0, k3_mean=0.0, k3_p99=0.0, entropy=0.0, grad_norm=0.0,
        tokens=1, seconds=seconds, wait_s=0.0,
    )  # fmt: skip


def group(kept: bool) -> GroupDone:
    return GroupDone(group="g", task="t", admitted=0, rewards=(), failed=0, kept=kept, seconds=1.0)


def test_parts_are_what_was_told() -> None:
    told: list[tuple[float, Event]] = [
        *((1.0, attempt(seconds)) for seconds in (2.0, 4.0)),
        (1.0, attempt(99.0, "heldout")),
        (1.0, group(True)),
        (1.0, group(False)),
        (5.0, step(1, 3.0)),
        (5.5, WeightsLive(version=1)),
        (9.0, step(2, 1.0)),
        (10.5, WeightsLive(version=2)),
    ]
    parts = parts_of([Stamped(t, event) for t, event in told])
    assert (parts.session_s, parts.train_s, parts.live_s, parts.with_signal) == (3.0, 2.0, 1.0, 0.5)
    assert parts.session_spread == pytest.approx(0.816, abs=1e-3)


def test_a_synchronous_run_takes_the_sum_of_its_parts() -> None:
    """Nothing overlaps with max_lag = 0; the gateway's look adds up to half a second."""
    (stage,) = CONFIG.stage
    assert isinstance(stage, RlConfig)
    parts = Parts(session_s=60.0, session_spread=0.0, train_s=30.0, live_s=10.0, with_signal=1.0)
    told = predict(scenario_of(CONFIG, stage, parts), 5)
    assert told == pytest.approx(3600 / 100, rel=0.02)
