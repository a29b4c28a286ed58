"""Sessions assembled from their turns: whole in any order, or dropped; and the effect of
redaction."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from etude.core.exports import dpo_lines, sft_lines, trajectories
from etude.core.feedback import FeedbackEvent
from etude.core.recorded import RecordedTurn, Redaction, put_together, stripped
from etude.core.sampling import RegionSpan, SamplingParams, VersionSpan
from etude.core.types import turns

STAND_IN = 0


def turn(number: int, start: int, segment: int = 0, **more: Any) -> RecordedTurn:
    given = {
        "completion": f"{segment}{number}".zfill(24),
        "choice": 0,
        "user": "alice",
        "organisation": "",
        "session": f"{1000:013d}-" + "c" * 32,
        "started": 1.0,
        "time": 2.0 + number,
        "number": number,
        "propensity": 0.5,
        "policy": "mine",
        "vocabulary": "v",
        "segment": segment,
        "start": start,
        "kind": "turns",
        "parent": None,
        "read": (1, 2, 3),
        "sampled": (4, 5, 6, 7),
        "logprobs": (-0.1, -0.2, -0.3, -0.4),
        "versions": (VersionSpan(3, 2), VersionSpan(4, 2)),
        "regions": (RegionSpan("east", 3), RegionSpan("west", 1)),
        "params": SamplingParams(),
        "redacted": (),
        "first_message": start // 7 * 2,
        "messages": (
            {"role": "user", "content": f"ask {number if start else 0}"},
            {"role": "assistant", "content": f"say {segment}.{number}"},
        ),
        "tools": (),
    }
    return RecordedTurn(**given | more)


def liked(turn: RecordedTurn, strength: float) -> dict[Any, Any]:
    event = FeedbackEvent(
        event=turn.completion,
        user=turn.user,
        completion=turn.completion,
        kind="accepted",
        strength=strength,
        time=1.0,
        received=1.0,
    )
    return {turn.answer: (event,)}


@given(st.randoms(use_true_random=False), st.integers(1, 6), st.integers(0, 5))
def test_turns_make_the_same_session_in_any_order(
    shuffled: random.Random, count: int, lost: int
) -> None:
    recorded = [turn(number, 7 * number) for number in range(count)]
    again = [*recorded, recorded[0]]
    shuffled.shuffle(again)
    (session,) = put_together(again).sessions
    assert session.turns == recorded
    exact = session.segments[0].exact()
    assert exact is not None and exact.prompt == (1, 2, 3)
    assert exact.tokens == ((4, 5, 6, 7) + (1, 2, 3)) * (count - 1) + (4, 5, 6, 7)
    assert [len(place) for place in turns(exact)] == [4] * count
    assert sum(span.count for span in exact.versions) == 4 * count == sum(exact.mask)
    assert sum(span.count for span in exact.regions) == 4 * count
    if 0 < lost + 1 < count:  # one in the middle is missing
        made = put_together([one for one in recorded if one.number != lost])
        assert not made.sessions and made.dropped == {"hole": 1}


@given(st.sets(st.integers(0, 6)), st.booleans())
def test_redaction_leaves_every_token_in_its_place(places: set[int], exact_before: bool) -> None:
    whole = turn(0, 0)
    spans = [Redaction(place, place + 1, "email") for place in sorted(places)]
    left = stripped(whole, spans, STAND_IN, exact_before=exact_before)
    tokens = (*whole.read, *whole.sampled)
    assert (*left.read, *left.sampled) == tuple(
        STAND_IN if place in places else token for place, token in enumerate(tokens)
    )
    exact = max(0, min(places, default=7) - 3) if exact_before else 0
    assert left.logprobs == whole.logprobs[:exact]
    assert left.answer_redacted == any(place >= 3 for place in places)


def test_rl_learns_only_from_what_can_be_recomputed() -> None:
    first = turn(0, 0)
    second = stripped(turn(1, 7), [Redaction(4, 5, "email")], STAND_IN, exact_before=True)
    third = stripped(turn(2, 14), [], STAND_IN, exact_before=False)
    (session,) = put_together([first, second, third]).sessions
    feedback = liked(first, 1.0) | liked(third, -0.5)
    (made,) = trajectories([session], feedback).made
    (segment,) = made.segments
    assert [len(place) for place in turns(segment)] == [4, 1]
    assert [p for p, on in zip(segment.logprobs, segment.mask, strict=True) if on] == [
        *(-0.1, -0.2, -0.3, -0.4),
        -0.1,
    ]
    assert segment.versions == (
        VersionSpan(3, 2),
        VersionSpan(4, 2),
        VersionSpan(3, 1),
    )
    assert (made.cost.prompt_tokens, made.cost.sampled_tokens, made.cost.calls) == (
        3 + 10 + 17,
        12,
        3,
    )
    assert made.reward == 0.25 and made.source == "production" and made.policy == "mine"
    assert {part.name: part.value for part in made.score.parts} == {
        "propensity": 0.5,
        "accepted@0.0": 1.0,
        "accepted@0.2": -0.5,
    }
    # no feedback is not a zero
    assert trajectories([session], {}).dropped == {"no_feedback": 1}
    redacted = stripped(first, [Redaction(0, 1, "email")], STAND_IN, exact_before=True)
    (session,) = put_together([redacted]).sessions
    assert trajectories([session], feedback).dropped == {"redacted": 1}


def test_sft_learns_what_was_liked_and_said_here() -> None:
    foreign = (
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "of another model"},
    )
    first = turn(0, 0)
    first = replace(first, messages=(*foreign, *first.messages))
    second = replace(
        stripped(turn(1, 7), [Redaction(5, 6, "email")], STAND_IN, exact_before=True),
        first_message=4,
    )
    third, fourth = (replace(turn(n, 7 * n), first_message=2 + 2 * n) for n in (2, 3))
    (session,) = put_together([first, second, third, fourth]).sessions
    feedback = liked(first, 1.0) | liked(third, -0.5) | liked(fourth, 1.0)
    (line,) = sft_lines([session], feedback, min_score=0.5).made
    origin = {name: line[name] for name in ("user", "session", "policy", "propensity", "source")}
    assert origin == {
        "user": session.user, "session": session.session, "policy": "mine", "propensity": 0.5,
        "source": "production",
    } and line["recorded"] == session.started  # fmt: skip
    weights = [m.get("weight", 1) for m in line["messages"] if m["role"] == "assistant"]
    assert weights == [0, 1, 0, 0, 1]
    learnt = [t for t, on in zip(line["tokens"], line["mask"], strict=True) if on]
    assert learnt == [4, 5, 6, 7] * 2
    assert sft_lines([session], feedback, min_score=0.9).dropped == {"low_score": 1}


def test_sft_counts_what_has_nothing_to_learn_from() -> None:
    """Users liked the session, but in one of its segments the only answer is redacted."""
    good = turn(0, 0)
    hidden = stripped(turn(1, 0, 1), [Redaction(4, 5, "email")], STAND_IN, exact_before=True)
    (session,) = put_together([good, hidden]).sessions
    export = sft_lines([session], liked(good, 1.0), min_score=0.5)
    assert len(export.made) == 1 and export.dropped == {"nothing_to_learn": 1}


def test_sft_counts_segments_whose_calls_cannot_be_shown() -> None:
    good, broken = turn(0, 0), turn(1, 0, 1)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}
    broken = replace(broken, messages=(broken.messages[0], call))
    (session,) = put_together([good, broken]).sessions
    export = sft_lines([session], liked(good, 1.0) | liked(broken, 1.0), min_score=1.0)
    assert [line["messages"] for line in export.made] == [list(good.messages)]
    assert export.dropped == {"malformed_call": 1}


def test_dpo_compares_answers_to_the_same_prompt() -> None:
    good, bad = turn(0, 0, 0), turn(1, 0, 1)
    other = replace(turn(2, 0, 2), messages=({"role": "user", "content": "else"}, good.messages[1]))
    (session,) = put_together([good, bad, other]).sessions
    feedback = liked(good, 0.5) | liked(bad, -1.0) | liked(other, -1.0)
    export = dpo_lines([session], feedback)
    (line,) = export.made
    turned = tuple(dict(reversed(message.items())) for message in bad.messages)
    (alike,) = put_together([good, replace(bad, messages=turned), other]).sessions
    assert dpo_lines([alike], feedback).made == export.made, "whatever the order of keys"
    assert line["prompt"] == [{"role": "user", "content": "ask 0"}]
    assert (line["chosen"], line["rejected"]) == (
        [{"role": "assistant", "content": "say 0.0"}],
        [{"role": "assistant", "content": "say 1.1"}],
    )
    assert export.dropped == {"no_pair": 1}
    hidden = stripped(bad, [Redaction(4, 5, "email")], STAND_IN, exact_before=True)
    (session,) = put_together([good, hidden]).sessions
    assert dpo_lines([session], feedback).dropped == {"redacted_answer": 1}


def test_pairs_of_answers_that_were_liked_alike_do_not_depend_on_their_order() -> None:
    first, second, worse, worst = (turn(n, 0, n) for n in range(4))
    feedback = liked(first, 0.5) | liked(second, 0.5) | liked(worse, -1.0) | liked(worst, -1.0)
    told = [
        dpo_lines(put_together(order).sessions, feedback).made
        for order in ([first, second, worse, worst], [worst, worse, second, first])
    ]
    assert told[0] == told[1] and len(told[0]) == 2
    assert {line["completions"][0] for line in told[0]} == {second.completion}


def test_pairs_that_say_nothing_are_dropped_by_reason() -> None:
    good, bad = turn(0, 0, 0), turn(1, 0, 1)
    feedback = liked(good, 0.5) | liked(bad, -1.0)
    same = replace(bad, messages=(bad.messages[0], good.messages[1]))
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    broken = replace(bad, messages=(bad.messages[0], call))
    for other, reason in ((same, "same_answer"), (broken, "malformed_call")):
        export = dpo_lines(put_together([good, other]).sessions, feedback)
        assert export.made == [] and export.dropped == {reason: 1}


def test_a_segment_keeps_its_kind_and_its_parent() -> None:
    first, summary = turn(0, 0, 0), turn(1, 0, 1, kind="summary", parent=0)
    (session,) = put_together([first, summary]).sessions
    exact = [segment.exact() for segment in session.segments]
    assert [(each.kind, each.parent) for each in exact if each] == [("turns", None), ("summary", 0)]
