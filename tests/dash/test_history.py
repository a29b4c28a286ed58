"""The curves of a run, from events written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etude.core.events import (
    FitStep,
    FleetStatus,
    GroupDone,
    MismatchMeasured,
    MismatchStats,
    PublishStarted,
    RegionStatus,
    StageDone,
    StageStarted,
    StepDone,
    WeightsLive,
)
from etude.dash.history import MOST_INTERVALS, History, Timeline

STEP = StepDone(
    step=1, loss=0.1, lag=0, k1=0.0, k3_mean=1e-4, k3_p99=0.0, entropy=1.0, grad_norm=1.0, tokens=9,
    seconds=3.0, wait_s=1.0,
)  # fmt: skip
GROUP = GroupDone(
    group="g", task="t", admitted=0, rewards=(1.0, 0.5, 0.0, 1.0), failed=0, kept=True, seconds=1.0
)
WORKER = RegionStatus(version=0, busy=0.5, running=2, waiting=1)


def fleet(**regions: RegionStatus) -> FleetStatus:
    return FleetStatus(regions=regions, active=0, capacity=1)


def test_a_step_tells_of_the_attempts_since_the_one_before() -> None:
    history = History()
    for t, event in enumerate(
        [
            GROUP,
            replace(GROUP, rewards=(0.0,)),
            STEP,
            replace(STEP, step=2, seconds=0.0, wait_s=0.0),
            replace(GROUP, rewards=(1.0,)),
            replace(STEP, step=3),
        ]
    ):
        history.apply(float(t), event, [])
    assert history.steps["step"] == [1, 2, 3] and history.steps["t"] == [2.0, 3.0, 5.0]
    assert history.steps["solve_rate"] == [2 / 5, None, 1.0]
    assert history.steps["trainer_busy"] == [0.75, None, 0.75]


def test_curves_of_regions_that_come_and_go_have_gaps() -> None:
    history = History()
    for event in (
        STEP,
        fleet(east=WORKER, west=replace(WORKER, busy=1.0)),
        fleet(east=replace(WORKER, busy=0.0)),
        replace(STEP, step=2),
        replace(STEP, step=3),
    ):
        history.apply(1.0, event, [])
    assert history.steps["busy east"] == [None, 0.25, None]
    assert history.steps["busy west"] == [None, 1.0, None]
    assert {len(curve) for curve in history.steps.values()} == {3}


def test_how_a_version_goes_around_the_world() -> None:
    history = History()
    history.apply(1.0, STEP, [])
    history.apply(2.0, PublishStarted(version=1, stall_s=0.25), [])
    history.apply(3.0, fleet(east=WORKER, west=WORKER), [])
    history.apply(4.0, fleet(east=replace(WORKER, version=1)), [])
    history.apply(5.0, fleet(east=replace(WORKER, version=1), west=replace(WORKER, version=2)), [])
    history.apply(6.0, WeightsLive(version=1), [])
    first = history.versions[1]
    assert (first.step_done, first.publish_started, first.stall_s, first.live) == (1, 2, 0.25, 6)
    assert first.regions == {"east": 4.0, "west": 5.0}, "also who went past it"
    assert history.versions[2].regions == {"west": 5.0}
    history.apply(7.0, fleet(west=WORKER), [])  # started again
    history.apply(8.0, fleet(west=replace(WORKER, version=2)), [])
    assert history.versions[2].regions == {"west": 5.0}


def test_a_stage_that_learns_from_text_has_curves_of_its_own() -> None:
    history = History()
    for stage, step in (("sft", 1), ("more", 1), ("sft", 2)):
        event = FitStep(stage=stage, step=step, steps=2, loss=1.0 / step, tokens_per_s=9.0)
        history.apply(0.0, event, [])
    assert history.fits["sft"] == {"step": [1, 2], "loss": [1.0, 0.5], "tokens_per_s": [9.0, 9.0]}
    assert history.fits["more"]["step"] == [1]


def test_effective_sample_sizes_stand_beside_their_steps() -> None:
    names = ("k1", "k3", "k3_p99", "k3_max", "ratio_p1", "ratio_p99", "ratio_max", "ess")
    stats = MismatchStats(
        num_tokens=1, argmax_flip_frac=None, router_mismatch_frac=None, **dict.fromkeys(names, 0.5)
    )
    history = History()
    for step in (1, 2):
        history.apply(0.0, replace(STEP, step=step), [])
    told = MismatchMeasured(step=2, all=stats, by_lag={}, by_region={}, worst=())
    history.apply(0.0, told, [])
    assert history.ess == [None, 0.5]


def test_a_long_run_has_fewer_and_wider_intervals_with_the_same_means() -> None:
    line, count = Timeline(), 4 * MOST_INTERVALS
    for second in range(count):
        status = replace(WORKER, busy=float(second % 2), running=second % 4, version=second)
        line.add(float(second), status)
    found = line.intervals
    assert MOST_INTERVALS / 2 <= len(found) <= MOST_INTERVALS and line.width_s == 4.0
    assert sum(each.count for each in found) == count
    assert [(each.t, each.busy, each.running) for each in found[:2]] == [
        (0.0, pytest.approx(0.5), pytest.approx(1.5)),
        (4.0, pytest.approx(0.5), pytest.approx(1.5)),
    ]
    assert [each.version for each in found] == list(range(3, count, 4)), "the newest of each"


def test_an_interval_is_of_a_second_at_first() -> None:
    line = Timeline()
    for t in (10.0, 10.5, 10.99, 11.0, 12.5, 13.5):
        line.add(t, WORKER)
    assert [(each.t, each.count) for each in line.intervals] == [
        (10.0, 3),
        (11.0, 1),
        (12.5, 1),
        (13.5, 1),
    ]


def test_when_stages_began_and_ended() -> None:
    history = History()
    history.apply(3.0, StageStarted(stage="sft", steps=9), [])
    history.apply(8.0, StageDone(stage="sft", version=2, seconds=4.5), [])
    assert history.stages == [
        {"stage": "sft", "began": 3.0, "steps": 9},
        {"stage": "sft", "ended": 8.0, "version": 2, "seconds": 4.5},
    ]
