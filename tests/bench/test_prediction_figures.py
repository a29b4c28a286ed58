"""The measured parts of a prediction, and the simulator's result from them."""

from __future__ import annotations

import pytest

from etude.bench.prediction import Parts, parts_of, predict, scenario_of
from etude.core.config import parse
from etude.core.events import AttemptDone, Event, GroupDone, StepDone, WeightsLive
from etude.core.stages import RlConfig
from etude.store.codec import Stamped

CONFIG = parse('name = "a"\n[[stage]]\nkind = "rl"\nsteps = 40\nmax_lag = 0\ngroups_per_step = 4')


def attempt(seconds: float, split: str = "train", group: str = "g1") -> AttemptDone:
    return AttemptDone(
        id=f"{group}.0", task="t", split=split, status="finished", reward=1.0, error=None,
        seconds=seconds,
    )  # fmt: skip


def step(number: int, seconds: float) -> StepDone:
    return StepDone(
        step=number, loss=0.0, lag=0, k1=0.0, k3_mean=0.0, k3_p99=0.0, entropy=0.0, grad_norm=0.0,
        tokens=1, seconds=seconds, wait_s=0.0,
    )  # fmt: skip


def group(kept: bool) -> GroupDone:
    return GroupDone(group="g", task="t", admitted=0, rewards=(), failed=0, kept=kept, seconds=1.0)


def test_parts_are_what_was_told() -> None:
    """The first of three sessions runs alone, and the other two share the cores."""
    told: list[tuple[float, Event]] = [
        (2.0, attempt(2.0)),
        (14.0, attempt(4.0, group="g2")),
        (14.0, attempt(4.0, group="g2")),
        (99.0, attempt(99.0, "heldout")),
        (1.0, group(True)),
        (1.0, group(False)),
        (5.0, step(1, 3.0)),
        (5.5, WeightsLive(version=1)),
        (9.0, step(2, 1.0)),
        (10.5, WeightsLive(version=2)),
    ]
    parts = parts_of([Stamped(t, event) for t, event in told])
    assert (parts.train_s, parts.live_s, parts.with_signal) == (2.0, 1.0, 0.5)
    assert parts.session_s == pytest.approx(10 / 3)
    assert parts.at_once == pytest.approx(5 / 3)
    assert parts.session_spread == parts.task_spread == pytest.approx(0.0), "each took 2 s alone"


def test_sessions_of_a_group_vary_less_than_those_of_two() -> None:
    told = [
        Stamped(10.0 * number, attempt(seconds, group=name))
        for number, (name, seconds) in enumerate([("a", 1.0), ("a", 2.0), ("b", 4.0), ("b", 5.0)])
    ]
    more = [
        Stamped(5.0, step(1, 1.0)),
        Stamped(6.0, WeightsLive(version=1)),
        Stamped(6.0, group(True)),
    ]
    parts = parts_of([*told, *more])
    assert parts.at_once == 1.0
    assert parts.session_spread == pytest.approx(3**0.5 * 0.5 / 3)
    assert parts.task_spread == pytest.approx(3**0.5 * 1.5 / 3)


def parts_at(at_once: float) -> Parts:
    return Parts(
        session_s=60.0, at_once=at_once, session_spread=0.0, task_spread=0.0, train_s=30.0,
        live_s=10.0, with_signal=1.0,
    )  # fmt: skip


def test_a_synchronous_run_takes_the_sum_of_its_parts() -> None:
    """With max_lag = 0 nothing overlaps; the gateway's polling adds up to half a second."""
    (stage,) = CONFIG.stage
    assert isinstance(stage, RlConfig)
    sessions = stage.groups_per_step * stage.group_size
    told = predict(scenario_of(CONFIG, stage, parts_at(sessions)), 5)
    assert told == pytest.approx(3600 / 100, rel=0.05)


def test_sessions_share_the_cores() -> None:
    """With a quarter of the concurrent sessions of the measurement, each takes a quarter of the
    time."""
    (stage,) = CONFIG.stage
    assert isinstance(stage, RlConfig)
    sessions = stage.groups_per_step * stage.group_size
    told = predict(scenario_of(CONFIG, stage, parts_at(4 * sessions)), 5)
    assert told == pytest.approx(3600 / 55, rel=0.05)
