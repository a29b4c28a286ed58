"""The canary: exact false-alarm rates under peeking, and its decisions on users of both arms."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from etude.realtime.canary import (
    CanaryDecision,
    CanaryPlan,
    Metric,
    MetricFigures,
    UserOutcomes,
    decide,
    mixture_radius,
)

KEPT = Metric(name="kept", margin=0.05)
PLAN = CanaryPlan(metrics=(KEPT,))


def crossing_chance(radius: list[float]) -> float:
    """The exact probability that the mean of fair coin flips, looked at after each flip, is ever
    further from one half than the radius for that number of flips."""
    steps = len(radius)
    chance = np.zeros(steps + 1)
    chance[0] = 1.0
    heads = np.arange(steps + 1)
    for step in range(1, steps + 1):
        chance = 0.5 * chance + 0.5 * np.concatenate([[0.0], chance[:-1]])
        chance[np.abs(heads / step - 0.5) > radius[step - 1]] = 0.0
    return 1.0 - float(chance.sum())


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("tuned_at", [10, 100, 1000])
def test_the_sequence_holds_at_all_looks(alpha: float, tuned_at: int) -> None:
    radius = [mixture_radius(0.25 / n, alpha, 0.25 / tuned_at) for n in range(1, 801)]
    assert crossing_chance(radius) <= alpha


def test_a_plain_interval_does_not() -> None:
    radius = [1.96 * math.sqrt(0.25 / n) for n in range(1, 801)]
    assert crossing_chance(radius) > 0.3


def test_the_radius_is_smallest_for_its_size_where_it_is_tuned() -> None:
    def excess(tuned_at: int, n: int) -> float:
        return mixture_radius(0.25 / n, 0.05, 0.25 / tuned_at)

    assert excess(100, 100) < min(excess(1, 100), excess(10_000, 100))
    assert excess(100, 1000) < excess(100, 100) < excess(100, 10)


def users(
    candidate: float,
    live: float,
    *,
    number: int = 400,
    sessions: int = 20,
    seed: int = 0,
    past: bool = False,
) -> list[UserOutcomes]:
    """Users of both arms, who keep this share of edits on average but differ individually."""
    draw = np.random.default_rng(seed)
    found = []
    for place in range(2 * number):
        is_candidate = place < number
        own = 0.15 * draw.standard_normal()
        chance = np.clip((candidate if is_candidate else live) + own, 0, 1)
        before = draw.binomial(60, np.clip(live + own, 0, 1)) / 60
        found.append(
            UserOutcomes(
                user=str(place),
                is_candidate=is_candidate,
                sessions=sessions,
                totals={"kept": float(draw.binomial(sessions, chance))},
                before={"kept": float(before)} if past else {},
            )
        )
    return found


def test_it_promotes_rolls_back_and_waits() -> None:
    same = decide(PLAN, 1, users(0.6, 0.6, past=True))
    assert (same.action, same.share) == ("promote", 0.25)
    worse = decide(PLAN, 1, users(0.5, 0.6))
    assert (worse.action, worse.share) == ("roll_back", 0.0)
    assert worse.reasons[0].startswith("worse: kept: 0.5803 live, 0.48")
    unsure = decide(PLAN, 1, users(0.6, 0.6, number=40, sessions=3))
    assert (unsure.action, unsure.share) == ("continue", 0.05)


def test_fewer_is_better_for_some_metrics() -> None:
    complaints = CanaryPlan(metrics=(replace(KEPT, higher_is_better=False),))
    assert decide(complaints, 1, users(0.5, 0.6)).action == "promote"
    assert decide(complaints, 1, users(0.7, 0.6)).action == "roll_back"


def test_all_metrics_must_be_safe_and_one_is_enough_to_roll_back() -> None:
    plan = CanaryPlan(metrics=(KEPT, Metric(name="latency", margin=0.05, higher_is_better=False)))
    good = users(0.6, 0.6, past=True)

    def with_latency(candidate: float) -> list[UserOutcomes]:
        each = {True: candidate, False: 0.3}
        draw = np.random.default_rng(1)
        return [
            replace(
                user,
                totals={
                    **user.totals,
                    "latency": user.sessions * (each[user.is_candidate] + 0.05 * draw.random()),
                },
            )
            for user in good
        ]

    assert decide(plan, 1, with_latency(0.3)).action == "promote"
    assert decide(plan, 1, with_latency(0.4)).action == "roll_back"


def test_the_first_stage_is_for_what_is_plainly_broken() -> None:
    few = users(0.6, 0.6, number=60, past=True)
    assert decide(PLAN, 0, few).action == "promote"
    assert decide(PLAN, 1, few).action == "continue"
    assert decide(PLAN, 0, users(0.2, 0.6, number=60, past=True)).action == "roll_back"


def test_a_stage_that_cannot_be_decided_ends() -> None:
    unsure = users(0.6, 0.6, number=40, sessions=40)
    ended = decide(PLAN, 1, unsure)
    assert ended.action == "roll_back"
    assert ended.reasons[0].startswith("undecided: kept")


def test_too_few_users_say_nothing() -> None:
    found = decide(PLAN, 0, users(0.0, 1.0, number=29))
    assert (found.action, found.figures) == ("continue", ())
    assert found.reasons[0].startswith(
        "29 users of the candidate and 29 of the live version so far"
    )


def test_a_stage_without_enough_users_does_not_wait_forever() -> None:
    ended = decide(PLAN, 0, users(0.6, 0.6, number=29, sessions=30))
    assert ended.action == "roll_back"
    assert ended.reasons[0].endswith("at least 30 of each are needed")


def test_a_flood_of_sessions_counts_as_its_cap() -> None:
    found = users(0.6, 0.6)
    flood = [
        replace(user, sessions=1_000_000, totals={"kept": 0.0}) if user.user == "0" else user
        for user in found
    ]
    capped = [
        replace(user, sessions=PLAN.max_sessions, totals={"kept": 0.0})
        if user.user == "0"
        else user
        for user in found
    ]
    assert decide(PLAN, 1, flood) == decide(PLAN, 1, capped)


def test_the_past_of_users_narrows_the_interval() -> None:
    without = decide(PLAN, 1, users(0.6, 0.6)).figures[0]
    known = decide(PLAN, 1, users(0.6, 0.6, past=True)).figures[0]
    assert known.high - known.low < 0.85 * (without.high - without.low)


def test_the_order_of_users_changes_nothing() -> None:
    found = users(0.58, 0.6)
    one, other = decide(PLAN, 1, found), decide(PLAN, 1, found[::-1])
    assert one.action == other.action
    assert one.figures[0].low == pytest.approx(other.figures[0].low)


def test_false_alarms_are_rare_however_often_it_is_looked_at() -> None:
    """Sessions come in one by one, users differ, and every canary is looked at 15 times. Of 40
    canaries without a difference at most 0.8 are expected to be called worse."""
    draw = np.random.default_rng(3)
    alarms = naive = 0
    for _ in range(40):
        chance = np.clip(0.6 + 0.15 * draw.standard_normal(120), 0, 1)
        totals = np.zeros(120)
        worse = wrong = False
        for look in range(1, 16):
            totals += draw.random(120) < chance
            found = [
                UserOutcomes(
                    user=str(place),
                    is_candidate=place < 60,
                    sessions=look,
                    totals={"kept": float(total)},
                )
                for place, total in enumerate(totals)
            ]
            worse |= decide(PLAN, 1, found).figures[0].is_worse
            means = totals / look
            gap = means[:60].mean() - means[60:].mean()
            error = math.sqrt((means[:60].var(ddof=1) + means[60:].var(ddof=1)) / 60)
            wrong |= gap < -1.645 * error
        alarms += worse
        naive += wrong
    assert alarms <= 3 < naive


def test_all_false_alarms_together_are_as_rare_as_stated() -> None:
    """With two metrics and two stages (the only one of the ramp, and the watch), each pair gets a
    quarter of the false alarms."""
    other = replace(KEPT, name="other")
    plan = CanaryPlan(
        metrics=(KEPT, other), ramp=(0.5, 1.0), confidence=0.95, false_alarms=4 * 0.05
    )
    found = [replace(u, totals={**u.totals, "other": 0.0}) for u in users(0.6, 0.6)]
    figures = decide(plan, 0, found).figures[0]
    assert figures.high - figures.gain == pytest.approx(figures.gain - figures.low)


@pytest.mark.parametrize(
    "wrong",
    [{"metrics": ()}, {"ramp": (0.05, 0.01, 1.0)}, {"ramp": (0.1, 0.5)}, {"ramp": (0.0, 1.0)}],
)
def test_what_cannot_be_a_plan_is_refused(wrong: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match=r"ramp|metric"):
        CanaryPlan(**{"metrics": (KEPT,), **wrong})  # type: ignore[arg-type]


def test_the_last_stage_has_nothing_to_decide() -> None:
    with pytest.raises(ValueError, match="stage 3"):
        decide(PLAN, 3, users(0.6, 0.6, number=30))


def test_a_decision_tells_its_figures_by_metric() -> None:
    kept, asked = Metric(name="kept", margin=0.1), Metric(name="asked", margin=0.2)
    figures = tuple(
        MetricFigures(metric=metric, live=0.5, candidate=0.6, gain=0.1, low=-0.05, high=high)
        for metric, high in ((kept, 0.2), (asked, 0.3))
    )
    told = CanaryDecision(action="continue", share=0.1, figures=figures, reasons=()).evidence
    expected = {"live": 0.5, "candidate": 0.6, "gain": 0.1, "low": -0.05}
    assert told == {
        f"{metric} {name}": value
        for metric, high in (("kept", 0.2), ("asked", 0.3))
        for name, value in (expected | {"high": high}).items()
    }
