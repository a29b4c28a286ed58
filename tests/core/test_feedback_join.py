"""Feedback finds its answer in any order. Consent, sampling and retention depend on the statements,
not on when they arrived."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.consent import (
    Consent,
    Identity,
    Tombstone,
    consents,
    is_gone,
    is_sampled,
    may_record,
    pseudonym,
)
from etude.core.feedback import (
    STRENGTHS,
    FeedbackEvent,
    RateLimit,
    completion_key,
    counted,
    join,
    score,
)

KEY = bytes(range(32))
USERS = ("alice", "bob")
OWNERS = {("a" * 24, 0): "alice", ("a" * 24, 1): "alice", ("b" * 24, 0): "bob"}
times = st.integers(0, 100).map(float)
events = st.builds(
    FeedbackEvent,
    event=st.sampled_from([f"e{n}" for n in range(12)]),
    user=st.sampled_from(USERS),
    completion=st.sampled_from(["a" * 24, "b" * 24, "c" * 24]),
    choice=st.sampled_from([0, 1]),
    kind=st.sampled_from(sorted(STRENGTHS)),
    strength=st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]),
    time=times,
    received=times,
)


@given(st.lists(events, max_size=30), st.randoms(use_true_random=False), times)
def test_order_and_repetition_change_nothing(
    said: list[FeedbackEvent], shuffled: random.Random, now: float
) -> None:
    first = join(OWNERS, said, now=now, horizon_s=20)
    again = [*said, *shuffled.sample(said, len(said) // 2)]
    shuffled.shuffle(again)
    assert join(OWNERS, again, now=now, horizon_s=20) == first
    # each event is in exactly one place
    places = [
        *(event for found in first.by_answer.values() for event in found),
        *first.pending,
        *(event for found in first.dropped.values() for event in found),
    ]
    assert sorted(event.event for event in places) == sorted({event.event for event in said})
    for answer, found in first.by_answer.items():
        assert {event.user for event in found} == {OWNERS[answer]}
        assert score(found) == score(list(reversed(found)))


def event(kind: str, time: float, strength: float | None = None, **more: object) -> FeedbackEvent:
    given = {"event": f"{kind}{time}", "user": "alice", "completion": "a" * 24, "received": time}
    strength = STRENGTHS[kind] if strength is None else strength
    return FeedbackEvent(kind=kind, time=time, strength=strength, **given | more)  # type: ignore[arg-type]


def test_the_newest_word_on_a_question_counts() -> None:
    said = [event("thumbs_up", 1), event("thumbs_down", 2), event("kept_10s", 3)]
    assert [e.kind for e in counted(said)] == ["thumbs_down", "kept_10s"]
    assert score(said) == -0.75
    assert score([*said, event("kept_commit", 4), event("tip", 5)]) == 0.75
    assert score([event("undone", 1), event("rejected", 1)]) == -1.0
    assert score([]) is None


def test_what_waits_is_dropped_behind_the_horizon() -> None:
    early = event("tip", 5, completion="c" * 24)
    assert join({}, [early], now=25, horizon_s=20).pending == (early,)
    late = join({}, [early], now=26, horizon_s=20)
    assert not late.pending and late.dropped == {"unknown_completion": (early,)}
    # the answer was stored in the end
    found = join({("c" * 24, 0): "alice"}, [early], now=99, horizon_s=20)
    assert found.by_answer == {("c" * 24, 0): (early,)}


def test_events_are_checked() -> None:
    event("tip", 1).check()
    replace(event("tip", 1), kind="custom:shown_again").check()
    for wrong in (
        {"kind": "nice"},
        {"kind": "custom:"},
        {"strength": 2.0},
        {"strength": float("nan")},
        {"time": float("inf")},
    ):
        with pytest.raises(ValueError):
            replace(event("tip", 1), **wrong).check()  # type: ignore[arg-type]
    for id in ("chatcmpl-" + "a" * 24, "resp_" + "a" * 24, "msg_" + "a" * 24, "a" * 24):
        assert completion_key(id) == "a" * 24
    for id in ("", "chatcmpl-../x", "a" * 25, "msg_" + "g" * 24):
        with pytest.raises(ValueError):
            completion_key(id)


@given(st.lists(st.floats(0, 600), min_size=1, max_size=200), st.sampled_from([1.0, 30.0, 600.0]))
def test_no_user_says_more_than_the_limit(gaps: list[float], per_minute: float) -> None:
    limit, now, admitted = RateLimit(per_minute, 5), 0.0, 0
    for number, gap in enumerate(gaps):
        now += gap if number % 3 else 0.0
        wait = limit.admit("alice", now)
        admitted += wait == 0
        assert admitted <= 5 + now * per_minute / 60 + 1e-6
        assert limit.admit(f"user {number}", now) == 0  # no user waits for others
        if wait:
            assert limit.admit("alice", now + wait + 1e-6) == 0
            admitted, now = admitted + 1, now + wait + 1e-6


def test_a_rate_limit_forgets_quiet_users() -> None:
    limit = RateLimit(1.0, 1, max_users=10)
    for number in range(1000):
        limit.admit(str(number), 0.0)
    assert len(limit._left) == 10


words = st.lists(
    st.builds(Consent, subject=st.sampled_from(USERS), granted=st.booleans(), time=times)
)


@given(words, st.randoms(use_true_random=False))
def test_the_newest_consent_counts_in_any_order(
    said: list[Consent], shuffled: random.Random
) -> None:
    again = [*said, *said]
    shuffled.shuffle(again)
    found = consents(said)
    assert consents(again) == found
    for subject, word in found.items():
        newest = [one for one in said if one.subject == subject and one.time == word.time]
        assert word.time == max(one.time for one in said if one.subject == subject)
        assert word.granted == all(one.granted for one in newest)


@given(st.lists(st.sampled_from([True, False, None]), max_size=6))
def test_one_yes_is_needed_and_no_is_no(said: list[bool | None]) -> None:
    alice = Identity(user="alice")
    assert may_record(alice, said) == (True in said and False not in said)
    assert not may_record(Identity(organisation="acme"), said)


def test_the_sample_is_the_share_and_always_the_same() -> None:
    alice = Identity(user="alice")
    names = [f"s{n}" for n in range(2000)]
    chosen = [name for name in names if is_sampled(alice, name, 0.3, KEY)]
    assert chosen == [name for name in names if is_sampled(alice, name, 0.3, KEY)]
    assert 450 < len(chosen) < 750
    # a larger share contains all of the smaller one
    assert set(chosen) <= {name for name in names if is_sampled(alice, name, 0.5, KEY)}
    assert all(is_sampled(alice, name, 1.0, KEY) for name in names)
    assert not any(is_sampled(alice, name, 0.0, KEY) for name in names)


def test_pseudonyms_need_the_key() -> None:
    assert pseudonym("alice", KEY) == pseudonym("alice", KEY) != pseudonym("alice", KEY[::-1])


@given(times, times, st.none() | times)
def test_nothing_outlives_its_time_or_its_user(
    time: float, now: float, deleted: float | None
) -> None:
    tombstone = None if deleted is None else Tombstone(user="alice", time=deleted)
    why = is_gone(time, now=now, retention_s=30, tombstone=tombstone)
    if deleted is not None and time <= deleted:
        assert why == "deleted"
    else:
        assert why == ("expired" if now - time > 30 else None)


QUESTIONS = (
    ("thumbs_up", "thumbs_down"),
    ("accepted", "rejected", "regenerated"),
    ("kept_10s", "kept_5min", "kept_commit", "kept_7d"),
    *((kind,) for kind in ("edited", "undone", "follow_up", "dissatisfied", "stopped")),
    *((kind,) for kind in ("model_switched", "tip")),
)


def test_of_kinds_that_answer_one_question_the_newest_counts() -> None:
    assert {kind for kinds in QUESTIONS for kind in kinds} == STRENGTHS.keys()
    for kinds in QUESTIONS:
        for first in STRENGTHS:
            for second in kinds:
                said = [
                    FeedbackEvent(
                        event=f"e{time}", user="alice", completion="a" * 24, kind=kind,
                        strength=STRENGTHS[kind], time=time, received=time,
                    )
                    for time, kind in enumerate((first, second))
                ]  # fmt: skip
                kept = [event.kind for event in counted(reversed(said))]
                assert kept == ([second] if first in kinds else [first, second])
