"""Regions that drift from the others, with invented measurements."""

from __future__ import annotations

import math

import pytest

from etude.core.events import MismatchMeasured, MismatchStats
from etude.core.quarantine import MIN_TOKENS, STEPS, RegionDrift


def stats(k3: float, tokens: int) -> MismatchStats:
    return MismatchStats(
        num_tokens=tokens, k1=0.0, k1_p99=0.0, k3=k3, k3_p99=k3, k3_max=k3,
        ratio_p1=1.0, ratio_p99=1.0, ratio_max=1.0, ess=1.0,
        argmax_flip_frac=None, router_mismatch_frac=None,
    )  # fmt: skip


def measured(step: int, tokens: int = MIN_TOKENS, **k3: float) -> MismatchMeasured:
    return MismatchMeasured(
        step=step,
        all=stats(0.0, 1),
        by_lag={},
        by_region={region: stats(value, tokens) for region, value in k3.items()},
        worst=(),
    )


def found(*steps: MismatchMeasured, factor: float = 10.0) -> tuple[list[str | None], RegionDrift]:
    drift = RegionDrift(factor)
    return [drift.add(step) for step in steps], drift


def test_the_one_that_differs_is_found() -> None:
    step = measured(1, east=1e-4, west=2e-4, south=5e-3)
    told, drift = found(*[step] * 5)
    assert told == [None, None, "south", None, None]
    assert drift.quarantined == {"south": pytest.approx(5e-3 / 1.5e-4)}


@pytest.mark.parametrize(
    "k3",
    [
        {"east": 5e-3, "west": 4e-3, "south": 3e-2},  # all learn fast
        {"east": 1e-9, "west": 9e-4},  # small, however near the other is
        {"east": 5e-1},  # no other region to compare with
        {},
    ],
)
def test_those_that_are_as_others_stay(k3: dict[str, float]) -> None:
    assert found(*[measured(1, **k3)] * 9)[1].quarantined == {}


def test_few_tokens_and_single_steps_prove_nothing() -> None:
    few = measured(1, MIN_TOKENS - 1, east=1e-5, west=1.0)
    assert found(*[few] * 9)[1].quarantined == {}
    one, usual = measured(1, east=1e-5, west=100.0), measured(2, east=1e-5, west=1e-5)
    assert found(one, *[usual] * 9)[1].quarantined == {}
    assert found(usual, one, usual, one, usual)[1].quarantined == {}


def test_what_was_long_ago_does_not_count() -> None:
    far, near = measured(0, west=1.0), measured(1, east=1e-4)
    told, _ = found(*[far] * 5, *[near] * STEPS, *[measured(2, east=1e-4, west=1e-4)] * 3)
    assert set(told[STEPS + 2 :]) == {None}


def test_the_last_one_is_kept() -> None:
    drift = RegionDrift(10.0)
    told = [drift.add(measured(step, east=0.0, west=1.0)) for step in range(3)]
    assert told == [None, None, "west"] and math.isfinite(drift.quarantined["west"])
    for step in range(30):
        assert drift.add(measured(step, east=10.0, west=1e-9)) is None


@pytest.mark.parametrize("k3", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize("sick", ["east", "south", "west"])
def test_numbers_that_are_none_are_held_against_who_made_them(k3: float, sick: str) -> None:
    step = measured(1, **{"east": 2e-3, "south": 2e-3, "west": 2e-3} | {sick: k3})
    _, drift = found(*[step] * 9)
    assert list(drift.quarantined) == [sick] and math.isfinite(drift.quarantined[sick])
    both = measured(1, **{"east": 2e-3, "west": 2e-3} | {sick: k3})
    assert list(found(*[both] * 9)[1].quarantined) == [sick]


def test_none_is_taken_out_if_nobody_wants_it() -> None:
    assert found(*[measured(1, east=1e-9, west=1.0)] * 9, factor=0.0)[1].quarantined == {}


def test_however_far_one_is_its_factor_is_a_number() -> None:
    for far in (1e11, 1e300, math.inf):
        _, drift = found(*[measured(1, east=0.0, west=far)] * STEPS)
        assert math.isfinite(drift.quarantined["west"])
    _, drift = found(*[measured(1, east=1e300, west=math.inf)] * STEPS)
    assert drift.quarantined == {}, "both are as far as can be"
