"""Reward hacks that models learnt from users elsewhere, and attacks of users on models: none of
them pays."""

from __future__ import annotations

import pytest

from etude.core.feedback import STRENGTHS, FeedbackEvent, RateLimit, join, score
from etude.realtime.conduct import RULES, WORST, Conduct, judged

LIKED = 1.0


@pytest.mark.parametrize("said", [None, -0.5, LIKED])
def test_broken_tool_calls_do_not_escape_judgement(said: float | None) -> None:
    """Composer broke its tool calls on hard requests, since such sessions were excluded."""
    assert judged(said, Conduct(broken_tool_calls=1)) == WORST


@pytest.mark.parametrize("said", [None, LIKED])
def test_questions_do_not_avoid_the_edit(said: float | None) -> None:
    """Composer asked for clarification to avoid edits that might be undone."""
    asked = Conduct(edit_requested=True, edited=False, questions=2)
    found = judged(said, asked)
    assert found is not None and found < 0


def test_a_question_before_a_good_edit_costs_little() -> None:
    honest = judged(LIKED, Conduct(edit_requested=True, edited=True, questions=1))
    assert honest == pytest.approx(LIKED - RULES.question_cost)


def test_an_answer_to_a_question_needs_no_edit() -> None:
    assert judged(LIKED, Conduct()) == LIKED
    assert judged(None, Conduct()) is None


def test_short_obvious_suggestions_do_not_pay() -> None:
    """Even if they are accepted nine times out of ten, and whole lines only every other time."""
    rejected = STRENGTHS["rejected"]

    def worth(chance: float, chars: int) -> float:
        paid = judged(0.75, Conduct(kept_chars=chars))
        assert paid is not None
        return chance * paid + (1 - chance) * rejected

    assert worth(0.9, 1) < worth(0.5, 40)
    assert judged(0.75, Conduct(kept_chars=40)) == judged(0.75, Conduct(kept_chars=4000)) == 0.75
    assert judged(LIKED, Conduct(kept_chars=0)) == 0.0
    assert judged(-0.5, Conduct(kept_chars=1)) == -0.5


def test_suppressed_lints_are_not_paid() -> None:
    found = judged(LIKED, Conduct(suppressed_lints=1))
    assert found is not None and found < 0
    assert judged(LIKED, Conduct(suppressed_lints=-3)) == LIKED
    more = judged(LIKED, Conduct(suppressed_lints=100))
    assert more == WORST


def test_the_users_own_edit_is_not_undone() -> None:
    """Suggestions that restore text which was just deleted are sometimes accepted by mistake."""
    assert judged(LIKED, Conduct(reverted_chars=12)) == WORST


@pytest.mark.parametrize("said", [None, -1.0, -0.3, 0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    "trick",
    [
        {"broken_tool_calls": 2},
        {"questions": 1},
        {"suppressed_lints": 2},
        {"reverted_chars": 5},
        {"edit_requested": True, "edited": False},
    ],
)
def test_no_trick_ever_raises_a_reward(said: float | None, trick: dict[str, int]) -> None:
    honest = judged(said, Conduct())
    found = judged(said, Conduct(**trick))
    assert found is None or found <= (0.0 if honest is None else honest)
    assert found is None or found >= WORST


def event(number: int, user: str = "alice", kind: str = "thumbs_up") -> FeedbackEvent:
    return FeedbackEvent(
        event=f"{user} {number}",
        user=user,
        completion="a" * 24,
        kind=kind,
        strength=STRENGTHS[kind],
        time=float(number),
        received=float(number),
    )


def test_poisoned_feedback_about_an_answer_to_somebody_else_joins_nothing() -> None:
    joined = join(
        {("a" * 24, 0): "alice"},
        [event(1), *(event(n, "mallory", "thumbs_down") for n in range(1000))],
        now=2000.0,
        horizon_s=10.0,
    )
    assert score(joined.by_answer["a" * 24, 0]) == 1.0
    assert len(joined.dropped["other_user"]) == 1000


def test_a_flood_of_events_says_it_once_and_is_slowed_down() -> None:
    assert score(event(n) for n in range(1000)) == score([event(0)])
    limit = RateLimit(per_minute=60, burst=20)
    assert sum(limit.admit("mallory", 0.0) == 0.0 for _ in range(1000)) == 20
    assert limit.admit("alice", 0.0) == 0.0


def test_an_edit_that_nobody_saw_was_not_made() -> None:
    assert judged(LIKED, Conduct(edit_requested=True)) == RULES.no_edit
    assert judged(None, Conduct(edit_requested=True)) == RULES.no_edit
    assert not any(getattr(Conduct(), name) for name in Conduct.__slots__)
