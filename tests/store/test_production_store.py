"""The store of production mode: deleted users, time limits, and concurrent writers."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from etude.core.consent import Consent, Tombstone
from etude.core.feedback import FeedbackEvent
from etude.store.codec import to_json
from etude.store.objects import Objects
from etude.store.production import STALE_S, Conflict, ProductionStore
from tests.core.test_recorded_sessions import turn

ALICE, BOB = "a" * 32, "b" * 32


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> ProductionStore:
    return ProductionStore(Objects.open(f"file:{tmp_path}"), clock)


def event(user: str = ALICE, name: str = "e" * 32, **more: object) -> FeedbackEvent:
    given = {"completion": "0" * 23 + "0", "kind": "tip", "strength": 1.0}
    return FeedbackEvent(  # type: ignore[arg-type]
        event=name, user=user, **{**given, "time": 1000.0, "received": 1000.0, **more}
    )


def name(started: float) -> str:
    return f"{int(started * 1000):013d}-" + "d" * 32


def test_what_is_damaged_holds_up_nothing(store: ProductionStore, clock: Clock) -> None:
    for started in (900.0, 901.0):
        store.put_turn(turn(0, 0, user=ALICE, started=started, session=name(started)))
    store.put_feedback(event())
    said, _, second = store.objects.list("production/users")
    for key in (said, second):
        store.objects.put(key, store.objects.get(key)[:-1] + b"x")
    found = store.sessions()
    assert (len(found.sessions), found.dropped) == (1, {"damaged": 1})
    assert store.feedback() == []
    assert store.sweep(retention_s=500, horizon_s=60) == {"feedback damaged": 1}
    clock.now += 500
    assert store.sweep(retention_s=500, horizon_s=60) == {"turns expired": 2}


def test_an_event_is_stored_once(store: ProductionStore) -> None:
    assert store.put_feedback(event())
    assert not store.put_feedback(event(received=1001.0))
    with pytest.raises(Conflict):
        store.put_feedback(event(kind="undone"))
    assert store.put_feedback(event(BOB))
    assert len(store.feedback()) == 2


def test_a_deleted_user_leaves_a_tombstone_and_a_refusal(
    store: ProductionStore, clock: Clock, tmp_path: Path
) -> None:
    for user in (ALICE, BOB):
        store.put_turn(turn(0, 0, user=user, started=900.0))
        store.put_feedback(event(user))
        store.put_consent(Consent(subject=user, granted=True, time=1.0))
    store.put_consent(Consent(subject=ALICE, granted=False, time=2.0))
    (copied,) = store.objects.list(f"production/users/{ALICE}/turns")
    copy = store.objects.get_sealed(copied)
    half_written = tmp_path / f"production/users/{ALICE}/turns/x#1"
    half_written.write_bytes(b"half")
    assert store.delete_user(ALICE) == 2
    left = [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")]  # folders too
    assert sorted(name for name in left if ALICE in name) == [
        f"production/consent/0000001000000-0000000002000-{ALICE}-refused",
        f"production/tombstones/{ALICE}",
    ]
    assert store.scan([ALICE.encode()])[1] == []
    assert len(store.scan([BOB.encode()])[1]) == 3
    assert not half_written.exists()
    # a gateway that does not know of the deletion finishes a write: the object is deleted
    # afterwards
    store.put_turn(turn(0, 0, user=ALICE, started=clock.now))
    store.put_feedback(event(received=clock.now))
    assert store.users() == [BOB]
    # a restored copy is not read, and the sweep deletes it
    key = f"production/users/{ALICE}/feedback/{'e' * 32}"
    store.objects.put_sealed(key, to_json(event()))
    store.objects.put_sealed(copied, copy)
    assert [found.user for found in store.feedback()] == [BOB]
    found = store.sessions()
    assert [session.user for session in found.sessions] == [BOB] and not found.dropped
    assert store.sweep(retention_s=1e6, horizon_s=1e6) == {
        "feedback deleted": 1,
        "turns deleted": 1,
    }
    clock.now += 1
    store.put_turn(turn(0, 0, user=ALICE, started=clock.now))
    assert store.users() == [ALICE, BOB]


def test_what_was_half_written_long_ago_is_swept(store: ProductionStore, tmp_path: Path) -> None:
    store.put_turn(turn(0, 0, user=ALICE, started=999.0, session=name(999.0)))
    folder = tmp_path / f"production/users/{ALICE}"
    old, new = folder / "x#1", folder / "x#2"
    for path, age_s in ((old, 2 * STALE_S), (new, STALE_S / 2)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    assert store.sweep(retention_s=500, horizon_s=60) == {}
    assert not old.exists() and new.exists() and store.users() == [ALICE]


def test_what_is_past_its_time_is_swept(store: ProductionStore, clock: Clock) -> None:
    old, new = (turn(0, 0, user=ALICE, started=t, session=name(t)) for t in (1.0, 999.0))
    store.put_turn(old)
    store.put_turn(replace(new, completion="1" * 24))
    store.put_feedback(event(name="a" * 32, completion="1" * 24))
    store.put_feedback(event(name="b" * 32, completion="2" * 24))
    assert store.sweep(retention_s=500, horizon_s=60) == {"turns expired": 1}
    assert [session.started for session in store.sessions().sessions] == [999.0]
    clock.now += 61
    assert store.sweep(retention_s=500, horizon_s=60) == {"feedback unknown_completion": 1}
    assert [found.event for found in store.feedback()] == ["a" * 32]
    clock.now += 500
    assert store.sweep(retention_s=500, horizon_s=60) == {
        "turns expired": 1,
        "feedback expired": 1,
    }
    assert not store.users()
    assert store.dropped() == {
        "turns expired": 2,
        "feedback expired": 1,
        "feedback unknown_completion": 1,
    }


def test_who_withdrew_is_not_read_any_more(store: ProductionStore) -> None:
    store.put_turn(turn(0, 0, user=ALICE))
    store.put_turn(turn(0, 0, user=BOB, organisation="c" * 32))
    store.put_consent(Consent(subject="c" * 32, granted=False, time=5.0))
    assert [session.user for session in store.sessions().sessions] == [ALICE]
    found = store.sessions(refused=[ALICE])
    assert not found.sessions and found.dropped == {"consent_withdrawn": 2}
    # the newest consent counts, and both are stored
    store.put_consent(Consent(subject="c" * 32, granted=True, time=4.0))
    assert not store.consents()["c" * 32].granted
    assert store.tombstones() == {} and store.tombstone(ALICE) is None
    store.delete_user(ALICE)
    assert store.tombstone(ALICE) == Tombstone(user=ALICE, time=1000.0)


def test_whoever_follows_users_is_told_whom_to_look_at(tmp_path: Path, clock: Clock) -> None:
    store = ProductionStore(Objects.open(f"file:{tmp_path}"), clock, announces=True)
    reader = ProductionStore(Objects.open(f"file:{tmp_path}"), clock).news
    reader.read()
    store.put_turn(turn(0, 0, user=ALICE, started=900.0, session=name(900.0)))
    assert reader.read() == {ALICE}
    store.put_feedback(event(BOB))
    assert reader.read() == {BOB}
    store.put_feedback(event(BOB))
    assert reader.read() == {BOB}, "whoever stored it may have died before it told"
    store.delete_session(ALICE, name(900.0))
    assert reader.read() == {ALICE} and store.users() == [BOB]


def test_a_deleted_user_is_not_in_the_news(tmp_path: Path, clock: Clock) -> None:
    store = ProductionStore(Objects.open(f"file:{tmp_path}"), clock, announces=True)
    store.put_turn(turn(0, 0, user=ALICE, started=900.0))
    store.put_feedback(event(BOB))
    store.delete_user(ALICE)
    assert store.scan([ALICE.encode()])[1] == []
    # a gateway that does not know of the deletion
    store.put_turn(turn(0, 0, user=ALICE, started=900.0))
    assert store.scan([ALICE.encode()])[1] == []
    assert store.scan([BOB.encode()])[1]


def test_nobody_is_told_unless_somebody_follows(store: ProductionStore) -> None:
    store.put_turn(turn(0, 0, user=ALICE))
    store.put_feedback(event())
    assert store.objects.list("production/news") == []


def test_feedback_is_joined_to_answers_within_its_horizon(
    store: ProductionStore, clock: Clock
) -> None:
    store.put_turn(turn(0, 0, user=ALICE, started=900.0, session=name(900.0)))
    store.put_feedback(event())
    store.put_feedback(event(BOB, name="f" * 32, completion="f" * 24))
    joined = store.joined(store.sessions(), horizon_s=60.0)
    assert [[said.user for said in events] for events in joined.by_answer.values()] == [[ALICE]]
    assert [said.user for said in joined.pending] == [BOB], "the answer to it may still come"
    clock.now += 61.0
    assert store.joined(store.sessions(), horizon_s=62.0).pending == joined.pending
    late = store.joined(store.sessions(), horizon_s=60.0)
    assert late.pending == () and late.dropped == {"unknown_completion": joined.pending}


def test_sessions_with_a_secret_are_dropped_however_it_is_spelled(store: ProductionStore) -> None:
    secret = 'p"w\nß'
    for number, (user, text) in enumerate(
        [
            (ALICE, f"it is {secret}"),
            (ALICE, f"it is {secret[1:]}"),
            (BOB, f"it is {secret}"),
            (ALICE, f"as JSON {json.dumps(secret)}"),
        ]
    ):
        told = ({"role": "user", "content": text}, {"role": "assistant", "content": "ok"})
        session = name(900.0 + number)
        store.put_turn(replace(turn(0, 0, user=user, session=session), messages=told))
    assert store.drop_sessions_with(ALICE, []) == 0
    assert store.drop_sessions_with(ALICE, [secret]) == 2
    assert [(s.user, s.session) for s in store.sessions().sessions] == [
        (ALICE, name(901.0)),
        (BOB, name(902.0)),
    ]
    assert store.dropped() == {"sessions late_secret": 2}


def test_consents_are_read_from_a_time_on(store: ProductionStore, clock: Clock) -> None:
    store.put_consent(Consent(subject=ALICE, granted=False, time=1.0))
    clock.now += 10
    store.put_consent(Consent(subject=BOB, granted=True, time=2.5))
    store.objects.put("production/consent/notes", b"")
    assert store.consents().keys() == {ALICE, BOB}
    assert store.consents(since=1005.0) == {BOB: Consent(subject=BOB, granted=True, time=2.5)}
    assert store.refused() == {ALICE}
