"""Advantages, with numbers worked out by hand."""

from __future__ import annotations

import pytest

from etude.core.credit import CREDIT, advantages, centered, equally, leave_one_out, oldest_version, praise, to_rows
from etude.core.types import Batch, Group, Segment, Span, Trajectory, spans, unspan


def segment(first_version: int = 1) -> Segment:
    """Two prompt tokens; the policy says 12, the harness puts in 13, the policy says 14 and 15."""
    return Segment(
        prompt=(10, 11),
        tokens=(12, 13, 14, 15),
        mask=(True, False, True, True),
        logprobs=(-1.0, 0.0, -2.0, -3.0),
        versions=(Span(first_version, 1), Span(first_version + 1, 2)),
        experts=None,
    )


def group(*rewards: float | None) -> Group:
    attempts = tuple(
        Trajectory(
            id=f"g.{i}",
            task="t",
            group="g",
            segments=(segment(),),
            scores=None if reward is None else {"reward": reward},
            status="failed" if reward is None else "done",
        )
        for i, reward in enumerate(rewards)
    )
    return Group(id="g", task="t", slot=0, admitted=0, trajectories=attempts)


def test_centered() -> None:
    assert centered([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


def test_praise_passes_over_what_is_below_the_mean() -> None:
    assert praise([1.0, 0.0, 0.0, 0.0]) == [0.75, 0.0, 0.0, 0.0]
    assert praise([1.0, 1.0, 1.0, 0.0]) == [0.25, 0.25, 0.25, 0.0]


def test_leave_one_out() -> None:
    assert leave_one_out([1.0, 0.0, 0.5]) == [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5]
    assert leave_one_out([1.0]) == [0.0]


@pytest.mark.parametrize("credit", CREDIT.values(), ids=CREDIT.keys())
def test_what_every_credit_must_do(credit) -> None:  # type: ignore[no-untyped-def]
    rewards = [0.0, 1.0, 0.25, 1.0]
    result = credit(rewards)
    assert result[1] == result[3] == max(result) > 0 and result[0] == min(result)


@pytest.mark.parametrize("credit", [centered, leave_one_out])
def test_a_credit_without_bias_adds_up_to_nothing(credit) -> None:  # type: ignore[no-untyped-def]
    assert sum(credit([0.0, 1.0, 0.25, 1.0])) == pytest.approx(0.0)


def test_a_failed_attempt_is_no_zero() -> None:
    assert advantages(group(1.0, None, 0.0), centered) == {"g.0": 0.5, "g.2": -0.5}


def test_an_attempt_that_said_nothing_is_left_out() -> None:
    full = group(1.0, 0.0)
    silent = Trajectory(id="g.2", task="t", group="g", segments=(), scores={"reward": 0.0}, status="timeout")
    with_silent = Group(id="g", task="t", slot=0, admitted=0, trajectories=(*full.trajectories, silent))
    assert advantages(with_silent, centered) == {"g.0": 0.5, "g.1": -0.5}


@pytest.mark.parametrize("rewards", [(1.0, 1.0, 1.0), (0.0, None, 0.0), (None, None), (1.0,), (1.0, None)])
def test_a_group_without_a_difference_teaches_nothing(rewards: tuple[float | None, ...]) -> None:
    assert advantages(group(*rewards), centered) == {}


def test_where_a_teacher_judges_every_attempt_that_was_graded_counts() -> None:
    assert advantages(group(0.0, None, 0.0), equally) == {"g.0": 1.0, "g.2": 1.0}


def test_rows_credit_the_sampled_tokens_of_every_segment() -> None:
    trajectory = Trajectory(
        id="g.0", task="t", group="g", segments=(segment(4), segment(3)), scores={"reward": 1.0}, status="done"
    )
    first, second = to_rows(trajectory, 0.5)
    assert first.sample == second.sample == "g.0"
    assert first.tokens == (10, 11, 12, 13, 14, 15)
    assert first.mask == (False, False, True, False, True, True)
    assert first.logprobs == (0.0, 0.0, -1.0, 0.0, -2.0, -3.0)
    assert first.advantages == (0.0, 0.0, 0.5, 0.0, 0.5, 0.5)
    assert second.versions == (Span(3, 1), Span(4, 2))
    assert oldest_version([first, second]) == 3
    assert Batch(step=6, rows=(first, second), oldest=3).lag == 2


def test_spans_and_back() -> None:
    versions = [3, 3, 4, 3]
    assert spans(versions) == (Span(3, 2), Span(4, 1), Span(3, 1))
    assert list(unspan(spans(versions))) == versions
    assert spans([]) == ()
