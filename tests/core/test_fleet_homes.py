"""Homes of sessions: spread over the workers, counted, and released."""

from __future__ import annotations

from etude.core.fleet import Fleet


def test_a_worker_with_the_version_is_not_behind() -> None:
    fleet = Fleet()
    east, west = fleet.join("e", "east", 1, 0.0), fleet.join("w", "west", 2, 0.0)
    assert (fleet.behind(2), fleet.behind(1), fleet.behind(3)) == ([east], [], [east, west])


def test_new_sessions_go_where_the_fewest_live() -> None:
    """Between their requests all workers are equally idle."""
    fleet = Fleet()
    east, west = fleet.join("e", "east", 0, 0.0), fleet.join("w", "west", 0, 0.0)
    for session in ("a", "b", "c", "d"):
        worker = fleet.pick(session)
        assert worker is not None
        fleet.done(worker)
    assert (east.sessions, west.sessions, east.active, west.active) == (2, 2, 0, 0)
    for session in ("a", "c"):
        fleet.forget(session)
    fleet.forget("nobody")
    assert (east.sessions, west.sessions) == (0, 2)
    assert fleet.pick("e") is east and fleet.pick("f") is west, (
        "a request counts more than a session"
    )


def test_a_session_that_moves_is_counted_once() -> None:
    fleet = Fleet()
    east = fleet.join("e", "east", 0, 0.0)
    assert fleet.pick("s") is east
    west = fleet.join("w", "west", 1, 0.0)
    fleet.raise_floor(1)
    assert fleet.pick("s") is west and (east.sessions, west.sessions) == (0, 1)
