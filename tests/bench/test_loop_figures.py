"""The figures of the loop benchmark, worked by hand from a few events."""

from __future__ import annotations

import pytest

from etude.bench.loop import LAGS, LOOP, TEACH, metrics
from etude.core.config import parse
from etude.core.events import Event, FleetStatus, GroupDone, RegionStatus, StepDone
from etude.core.stages import RlConfig
from etude.store.codec import Stamped


def step(number: int, seconds: float) -> StepDone:
    zero = dict.fromkeys(("loss", "k1", "k3_mean", "k3_p99", "entropy", "grad_norm", "wait_s"), 0.0)
    return StepDone(step=number, lag=0, tokens=10, seconds=seconds, **zero)


def group(*rewards: float, failed: int = 0, seconds: float = 1.0) -> GroupDone:
    return GroupDone(
        group="g", task="t", admitted=0, rewards=rewards, failed=failed, kept=True, seconds=seconds
    )


def look(east: float, west: float) -> FleetStatus:
    regions = {
        name: RegionStatus(version=0, busy=busy, running=0, waiting=0)
        for name, busy in {"east": east, "west": west}.items()
    }
    return FleetStatus(regions=regions, active=0, capacity=4)


def test_figures_count_from_the_first_admission_to_the_last_step() -> None:
    noted: list[tuple[float, Event]] = [
        (95.0, look(1.0, 1.0)),
        (104.0, group(1.0, 0.0, seconds=4.0)),
        (105.0, look(0.2, 0.4)),
        (106.0, step(1, 2.0)),
        (108.0, group(0.0, failed=1)),
        (109.0, look(0.6, 0.8)),
        (110.0, step(2, 3.0)),
        (111.0, group(1.0, 1.0)),
    ]
    assert metrics([Stamped(t, event) for t, event in noted]) == pytest.approx(
        {"seconds": 10.0, "trainer_busy": 0.5, "engine_busy": 0.5, "rollouts_per_s": 0.4}
    )


def test_its_runs_are_valid_and_differ_in_the_lag_alone() -> None:
    parse(TEACH.format(name="taught"))
    runs = [parse(LOOP.format(name="x", path="/model", delay=0.2, lag=lag)) for lag in LAGS]
    stages = [run.stage[0] for run in runs]
    assert [stage.max_lag for stage in stages if isinstance(stage, RlConfig)] == list(LAGS)
    assert len({stage.model_copy(update={"max_lag": 0}).model_dump_json() for stage in stages}) == 1
