from __future__ import annotations

import random

import pytest

from etude.core.fleet import Fleet, Worker, WorkerState


def test_a_story() -> None:
    fleet = Fleet()
    assert fleet.pick() is None
    east = fleet.join("e", "east", -1, 0.0)
    assert fleet.pick() is None  # it has no weights
    fleet.join("e", "east", 0, 0.0)
    west = fleet.join("w", "west", 0, 0.0)
    assert [fleet.pick("s1"), fleet.pick("s2"), fleet.pick("s1")] == [east, west, east]
    fleet.raise_floor(1)
    assert fleet.pick("s1") is None
    assert fleet.behind(1) == [east, west]
    fleet.join("w", "west", 1, 0.0)
    assert fleet.pick("s1") is west  # its home is behind, so the session moves
    fleet.join("e", "east", 1, 0.0)
    assert fleet.pick("s1") is west  # and stays there
    again = fleet.join("w", "west", -1, 0.0)  # restarted
    assert again is not west
    assert fleet.pick("s1") is east
    fleet.leave(west)  # a late report about the previous one
    assert fleet.knows(again)


def test_a_promise_that_comes_late_takes_nothing_back() -> None:
    fleet = Fleet()
    fleet.join("e", "east", 2, now=0.0)
    old = fleet.join("w", "west", 1, now=0.0)
    fleet.raise_floor(2)
    fleet.raise_floor(1)
    assert fleet.floor == 2 and old not in fleet.up


def test_one_that_is_silent_is_taken_out_and_comes_back_as_another() -> None:
    fleet = Fleet(heartbeat_timeout_s=10.0)
    east = fleet.join("e", "east", 0, now=0.0)
    west = fleet.join("w", "west", 0, now=0.0)
    assert fleet.pick("s") is east
    fleet.join("w", "west", 0, now=5.0)
    assert fleet.expire(9.9) == [] and fleet.suspects == []
    assert fleet.expire(10.0) == [east] and fleet.suspects == [east]
    assert fleet.expire(11.0) == [], "it is told once"
    assert not fleet.knows(east) and fleet.pick("s") is west
    assert fleet.behind(1) == [west], "new weights do not wait for it"
    west.version = 1
    fleet.raise_floor(1)
    again = fleet.join("e", "east", 0, now=12.0)
    assert again is not east and fleet.suspects == []
    assert fleet.up == [west] and fleet.behind(1) == [again], "it catches up before it serves"
    again.version = 1
    assert fleet.up == [west, again]
    assert fleet.expire(15.0) == [west]


@pytest.mark.parametrize("seed", range(100))
def test_only_those_who_serve_what_was_promised_are_picked(seed: int) -> None:
    rng, fleet = random.Random(seed), Fleet(heartbeat_timeout_s=20.0)
    true_version: dict[str, int] = {}  # the version that each worker really serves
    active: list[Worker] = []
    published = 0
    heard: dict[str, int] = {}
    for now in range(200):
        for worker in fleet.expire(now):
            assert now - heard[worker.url] == 20
        assert all(now - heard[worker.url] < 20 for worker in fleet.workers)
        url = rng.choice("abc")
        session = rng.choice(["", "s", "t", "u"])
        match rng.choice(
            ["pick", "pick", "pick", "done", "join", "restart", "fail", "load", "publish", "forget"]
        ):
            case "join" if url in true_version:
                fleet.join(url, url, true_version[url], now)
                heard[url] = now
            case "restart":
                true_version[url] = -1
                fleet.join(url, url, -1, now)
                heard[url] = now
            case "fail":
                for worker in [worker for worker in fleet.workers if worker.url == url]:
                    fleet.leave(worker)
            case "load":
                for worker in fleet.behind(published):
                    true_version[worker.url] = worker.version = published
                fleet.raise_floor(published)
            case "publish":
                published += 1
            case "done" if active:
                fleet.done(active.pop(rng.randrange(len(active))))
            case "forget":
                fleet.forget(session)
            case "pick":
                home = fleet.pick(session)
                assert (home is None) == (not fleet.up)
                if home is None:
                    continue
                active.append(home)
                assert true_version[home.url] >= max(fleet.floor, 0)
                if session:  # a home is kept while it is up
                    active.append(home)
                    assert fleet.pick(session) is home
                else:
                    assert home.active - 1 == min(w.active - (w is home) for w in fleet.up)
        for worker in fleet.workers:
            assert worker.active == sum(each is worker for each in active)
            assert worker.sessions >= 0


def test_a_region_in_quarantine_is_sent_nothing_and_waited_for_by_nobody() -> None:
    fleet = Fleet(heartbeat_timeout_s=10.0)
    east = fleet.join("e", "east", 1, now=0.0)
    west = fleet.join("w", "west", 1, now=0.0)
    assert fleet.pick("s") is east
    fleet.quarantine(["east"])
    assert fleet.state("e") is WorkerState.QUARANTINED and fleet.up == [west]
    assert fleet.pick("s") is west, "a session of its moves"
    fleet.join("e2", "east", 1, now=0.0)
    assert fleet.state("e2") is WorkerState.QUARANTINED, "it holds for the region"
    assert fleet.behind(2) == [west]
    west.version = 2
    assert fleet.may_raise_floor(2, now=0.0)
    fleet.quarantine([])
    assert fleet.state("e") is WorkerState.LIVE
