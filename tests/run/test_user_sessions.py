"""Users' sessions as the loop of real-time RL reads them: the result is as if every look read
everything, at the cost of the new data alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.consent import Consent
from etude.core.errors import EtudeError
from etude.core.recorded import RecordedTurn
from etude.core.updates import SessionFigures
from etude.realtime.cycle import session_figures
from etude.realtime.signals import session_outcome
from etude.run import realtime_sessions
from etude.run.realtime_sessions import FOLDER, UserSessions, signal_table
from etude.store.news import KEPT_S, NEWS
from etude.store.objects import Objects
from etude.store.production import ProductionStore, digest
from tests.run.realtime_world import World, config, recorded, said

SETTLED_S = 2000.0
"""Longer than the horizon in the world's config."""


def answer(world: World, user: str, name: str, number: int = 0) -> RecordedTurn:
    session = f"{int(world.now * 1000):013d}-{digest(name)}"
    return recorded(user, session, world.now, 0, number=number)


def read_all(world: World) -> dict[str, SessionFigures]:
    """The figures as read without any memory of earlier looks."""
    sessions = world.store.sessions()
    joined = world.store.joined(sessions, horizon_s=1e9)
    table = signal_table(config())
    found = [
        session_figures(session_outcome(one, joined.by_answer, table)) for one in sessions.sessions
    ]
    return {one.id: one for one in found}


def looked(sessions: UserSessions) -> dict[str, SessionFigures]:
    sessions.look()
    return {one.id: one for one in sessions.figures()}


@pytest.fixture(autouse=True)
def few_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realtime_sessions, "CLOSED_TOGETHER", 3)


ACTION = st.sampled_from(
    ["ask", "ask", "go on", "say", "say", "delete", "withdraw", "drop", "wait", "close", "restart"]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ACTION, st.integers(0, 3), st.booleans()), max_size=40))
def test_it_is_as_if_all_was_read_at_each_look(script: list[tuple[str, int, bool]]) -> None:
    world = World(Objects.open("memory:"))
    sessions = world.sessions()
    turns: list[RecordedTurn] = []
    for number, (action, which, looks) in enumerate(script):
        user, world.now = world.users[which], world.now + 1.0
        own = [turn for turn in turns if turn.user == user]
        match action:
            case "ask":
                turns.append(answer(world, user, f"session {number}"))
                world.store.put_turn(turns[-1])
            case "go on" if own and world.now < own[-1].time + 60:
                turns.append(
                    replace(
                        recorded(
                            user, own[-1].session, own[-1].started, 0, number=own[-1].number + 1
                        ),
                        time=world.now,
                    )
                )
                world.store.put_turn(turns[-1])
            case "say" if own:
                world.store.put_feedback(said(own[which % len(own)], "undone", world.now))
            case "delete":
                world.store.delete_user(user)
                turns = [turn for turn in turns if turn.user != user]
            case "withdraw":
                word = Consent(subject=user, granted=looks, time=world.now)
                world.store.put_consent(word)
            case "drop" if own:
                world.store.delete_session(user, own[-1].session)
                turns = [turn for turn in turns if turn.session != own[-1].session]
            case "wait":
                world.now += SETTLED_S
            case "close":
                sessions.look()
                sessions.close(lambda id: id < "8", world.now)
            case "restart":
                sessions = world.sessions()
        if looks:
            assert looked(sessions) == read_all(world)
    assert looked(sessions) == read_all(world)
    assert looked(world.sessions()) == read_all(world), "another life"


def cost(objects: Objects, sessions: UserSessions) -> tuple[int, int]:
    """The number of objects that a look reads, and of listings."""
    reads, lists = objects.usage.reads, objects.usage.lists
    sessions.look()
    return objects.usage.reads - reads, objects.usage.lists - lists


def closed_world(count: int) -> tuple[World, UserSessions, Objects]:
    """A world with `count` sessions that are settled and have a fate, and two new ones; its reader,
    with a store that counts requests."""
    world = World(Objects.open("memory:"))
    for number in range(count):
        world.record(answer(world, world.users[number % 20], f"old {number}"), "kept_5min")
    world.now += SETTLED_S
    for number in range(2):
        world.record(answer(world, world.users[number], f"new {number}"), "kept_5min")
    old = {id for id, one in read_all(world).items() if one.started < world.now}
    sessions = world.sessions(seen := Objects(world.objects._store, "memory:"))
    sessions.look()
    sessions.close(old.__contains__, world.now)
    assert len(sessions.outcomes()) == 2
    return world, sessions, seen


@pytest.mark.parametrize("count", [30, 120])
def test_a_look_reads_what_is_new_however_much_there_is(count: int) -> None:
    world, sessions, seen = closed_world(count)
    nothing = cost(seen, sessions)
    assert nothing[0] == 0 and nothing[1] <= 6
    world.record(answer(world, world.users[7], "one more"), "undone")
    something = cost(seen, sessions)
    assert something == (2, nothing[1] + 1), "a turn and an event; the keys of one user"
    assert looked(sessions) == read_all(world)


@pytest.mark.parametrize("count", [30, 120])
def test_another_life_reads_no_closed_session(count: int) -> None:
    world, _, _ = closed_world(count)
    stored = len(world.objects.list(FOLDER))
    again = world.sessions(seen := Objects(world.objects._store, "memory:"))
    reads, _ = cost(seen, again)
    assert reads == stored + 4, "two turns and two events are open"
    assert looked(again) == read_all(world)


def test_figures_that_were_deleted_are_made_anew() -> None:
    world, _, _ = closed_world(30)
    for key in world.objects.list(FOLDER):
        world.objects.delete(key)
    assert looked(world.sessions()) == read_all(world)


def test_figures_of_another_table_of_signals_are_made_anew() -> None:
    world, _, _ = closed_world(30)
    store = ProductionStore(world.objects, lambda: world.now)
    table = signal_table(config(signals={"kept_5min": 0.0}))
    changed = UserSessions(store, world.objects, policy="mine", table=table)
    assert all(one.metrics["judged"] == 0.0 for one in looked(changed).values())
    changed.close(lambda id: True, world.now + SETTLED_S)
    assert looked(UserSessions(store, world.objects, policy="mine", table=table)) == looked(changed)


def test_nothing_of_a_deleted_user_stays() -> None:
    world, sessions, _ = closed_world(30)
    gone = world.users[3]
    assert any(gone.encode() in world.objects.get(key) for key in world.objects.list(FOLDER))
    world.delete(gone)
    sessions.look()
    sessions.close(lambda id: True, world.now)
    assert not any(gone.encode() in world.objects.get(key) for key in world.objects.list(FOLDER))
    assert not any(gone in key for key in world.objects.list(NEWS))
    assert looked(sessions) == read_all(world)


def test_figures_that_nobody_is_left_of_are_deleted() -> None:
    world, sessions, _ = closed_world(30)
    (stored,) = world.objects.list(FOLDER)
    for user in list(world.users):
        world.delete(user)
    sessions.look()
    sessions.close(lambda id: True, world.now)
    assert world.objects.list(FOLDER) == [] and looked(sessions) == {}
    for number in range(3):
        turn = answer(world, digest(f"another {number}"), "new")
        world.record(turn, "kept_5min")
    sessions.look()
    sessions.close(lambda id: True, world.now + SETTLED_S)
    assert world.objects.list(FOLDER) == [stored]


def test_figures_that_another_loop_has_written_are_not_overwritten() -> None:
    world, sessions, _ = closed_world(30)
    (first,) = world.objects.list(FOLDER)
    assert first == f"{FOLDER}/000000"
    second = f"{FOLDER}/000001"
    world.objects.put(second, b"of another")
    for number in range(3):
        world.record(answer(world, world.users[number], f"more {number}"), "kept_5min")
    sessions.look()
    with pytest.raises(EtudeError, match=f"another real-time RL loop has written {second}"):
        sessions.close(lambda id: True, world.now + SETTLED_S)
    assert world.objects.get(second) == b"of another"


def test_what_nobody_told_of_is_found_when_all_users_are_listed() -> None:
    """The program that wrote it was killed."""
    world, sessions, _ = closed_world(30)
    silent = ProductionStore(world.objects, lambda: world.now)
    silent.put_turn(turn := answer(world, world.users[9], "untold"))
    id = f"{turn.user}.{turn.session}"
    assert id not in looked(sessions)
    assert id in looked(world.sessions())
    world.now += KEPT_S / 2 + 1
    assert id in looked(sessions)


def test_old_news_is_swept() -> None:
    world, _, _ = closed_world(30)
    told = len(world.objects.list(NEWS))
    world.store.news.sweep()
    assert len(world.objects.list(NEWS)) == told > 30
    world.now += 2 * KEPT_S
    world.store.news.sweep()
    assert not world.objects.list(NEWS)
