"""The gate: its figures, its refusals, and its error rates."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from etude.core.realtime_config import GateConfig
from etude.realtime.gate import SUITES, Outcomes, Suite, judge, worst_loss


def outcomes(
    both: int, lost: int = 0, gained: int = 0, neither: int = 0, attempts: int = 1
) -> Outcomes:
    """Tasks that both versions solve, and those that they do not."""
    pairs = [(1, 1)] * both + [(1, 0)] * lost + [(0, 1)] * gained + [(0, 0)] * neither
    return Outcomes(
        attempts=attempts,
        live={str(task): attempts * live for task, (live, _) in enumerate(pairs)},
        candidate={str(task): attempts * found for task, (_, found) in enumerate(pairs)},
    )


def everywhere(found: Outcomes) -> Mapping[str, Outcomes]:
    return {suite.name: found for suite in SUITES}


def test_the_bound_by_hand() -> None:
    # 98 tasks and two fictitious ones; 10 lost and 4 gained become 11 and 5.
    loss = 6 / 100
    variance = ((11 + 5) - 100 * loss**2) / 99
    by_hand = loss + 1.6449 * math.sqrt(variance / 100)
    assert worst_loss(outcomes(80, lost=10, gained=4, neither=4), 0.95) == pytest.approx(
        by_hand, abs=1e-4
    )


def test_the_same_version_passes_with_enough_tasks_only() -> None:
    assert judge(everywhere(outcomes(500))).deploy
    few = judge(everywhere(outcomes(50)))
    assert not few.deploy
    assert all("too few tasks" in reason for reason in few.reasons)


def test_a_suite_that_was_not_tried_is_a_refusal() -> None:
    found = dict(everywhere(outcomes(1000)))
    del found["safety"]
    verdict = judge(found)
    assert not verdict.deploy
    assert verdict.reasons == ("safety: not evaluated; run its tasks with both versions",)


def test_one_bad_suite_is_enough_and_says_so() -> None:
    found = dict(everywhere(outcomes(1000)))
    found["cheats"] = outcomes(960, lost=40)
    verdict = judge(found)
    assert not verdict.deploy
    (reason,) = verdict.reasons
    assert reason.startswith("cheats: 100.0 % -> 96.0 % of 1000 tasks, worse by at most 5.")
    assert "at 95 % confidence (margin 1.0)" in reason


def test_a_gain_in_one_suite_does_not_pay_for_a_loss_in_another() -> None:
    found = dict(everywhere(outcomes(1000)))
    found["heldout"] = outcomes(500, gained=500)
    found["safety"] = outcomes(900, lost=100)
    assert not judge(found).deploy


@pytest.mark.parametrize(("lost", "gained"), [(0.15, 0.05), (0.1, 0.0), (0.3, 0.2)])
def test_a_candidate_worse_by_the_margin_passes_as_rarely_as_stated(
    lost: float, gained: float
) -> None:
    """Exact, by summing over all numbers of tasks lost and gained. The bound is a normal
    approximation, so it is a little off for few tasks."""
    tasks, passes = 60, 0.0
    for losses in range(tasks + 1):
        for gains in range(tasks + 1 - losses):
            same = tasks - losses - gains
            chance = (
                math.comb(tasks, losses)
                * math.comb(tasks - losses, gains)
                * lost**losses
                * gained**gains
                * (1 - lost - gained) ** same
            )
            if chance > 1e-6 and worst_loss(outcomes(same, losses, gains), 0.95) <= 0.1:
                passes += chance
    assert passes <= 0.06


def test_what_cannot_be_a_gate_is_refused() -> None:
    with pytest.raises(ValueError, match="every candidate would pass"):
        judge({}, ())
    with pytest.raises(ValueError, match="suite x: margin must be between 0 and 1"):
        Suite(name="x", margin=0.0)
    with pytest.raises(ValueError, match="confidence"):
        Suite(name="x", margin=0.1, confidence=1.0)


def test_by_default_one_probe_that_is_lost_by_chance_stops_nobody() -> None:
    config = GateConfig()
    for count, margin in (
        (config.safety, config.safety_margin),
        (config.cheats, config.cheats_margin),
    ):
        suite = Suite(name="probes", margin=margin, confidence=config.confidence)
        passed = [
            judge({"probes": outcomes(count - lost, lost=lost)}, [suite]).deploy
            for lost in (0, 1, 4)
        ]
        assert passed == [True, True, False]
