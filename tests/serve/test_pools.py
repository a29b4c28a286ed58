"""The choice of the worker pool for a session, by the store and by the workers that are up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from etude.core import traffic
from etude.core.errors import EtudeError
from etude.core.fleet import Fleet
from etude.core.traffic import BLUE, GREEN, HELDOUT, Change
from etude.serve import pools
from etude.serve.http import ApiError
from etude.serve.pools import Pools
from etude.store.objects import Objects
from etude.store.realtime import TrafficLog

USERS = [f"user {n}" for n in range(200)]


class FakeRouter:
    """A router whose workers load what they are told to, unless they refuse."""

    def __init__(self) -> None:
        self.fleet = Fleet(awaits_floor=True)
        self.refuses = False
        self.looks = 0

    def expire_silent(self) -> None:
        self.looks += 1

    def join(self) -> None:
        self.fleet.join("http://w", "here", max(0, self.fleet.floor), 0.0)

    async def load(self, version: int) -> None:
        if self.refuses:
            raise ApiError("no worker can serve it", status=502, code="load_failed")
        for worker in self.fleet.workers:
            worker.version = version
        self.fleet.raise_floor(version)


class Served:
    def __init__(self) -> None:
        objects = Objects.open("memory:")
        self.log = TrafficLog(objects)
        self.pools = Pools(FakeRouter, TrafficLog(objects))  # type: ignore[arg-type]

    def up(self, *pools: str) -> None:
        for pool in pools:
            self.router(pool).join()

    def router(self, pool: str) -> FakeRouter:
        return self.pools.router(pool)  # type: ignore[return-value]

    async def hear(self, change: Change) -> Change:
        assert self.log.append(change)
        await self.pools.refresh()
        await asyncio.sleep(0)  # let background loads run
        return change

    def versions(self, session: str = "") -> dict[str, int]:
        homes = {user: self.pools.home(user, session) for user in USERS}
        return {user: home[1].version for user, home in homes.items() if home is not None}


async def test_without_a_word_in_the_store_there_are_no_pools() -> None:
    served = Served()
    await served.pools.refresh()
    assert served.pools.home("alice", "one") is None


async def test_users_are_answered_by_what_the_store_says_and_go_back_at_once() -> None:
    served = Served()
    served.up(BLUE, GREEN, HELDOUT)
    first = await served.hear(traffic.start(3, 0.0, 0.1))
    assert set(served.versions().values()) == {3}
    trying = await served.hear(traffic.canary(first, 4, 1.0, 0.3))
    seen = served.versions("s")
    assert {user for user, version in seen.items() if version == 4} == {
        user for user in USERS if trying.traffic.arm(user).pool == GREEN
    }
    live = await served.hear(traffic.promote(trying, 2.0, "", 0.3))
    assert served.versions("s") == seen, "a session stays with the version that it began with"
    assert served.versions("another") == {u: live.traffic.arm(u).version for u in USERS}
    await served.hear(traffic.roll_back(live, 3.0, "worse"))
    assert set(served.versions("s").values()) == {3}, "but not with one that was taken back"


async def test_a_session_from_before_does_not_bring_its_user_to_a_later_candidate() -> None:
    served = Served()
    served.up(BLUE, GREEN)
    last = await served.hear(traffic.start(3, 0.0, 0.0))
    served.versions("s")  # all in blue
    last = await served.hear(traffic.canary(last, 4, 1.0, 0.3))
    last = await served.hear(traffic.promote(last, 2.0, "", 0.3))
    last = await served.hear(traffic.settle(last, 3.0, ""))
    last = await served.hear(traffic.canary(last, 5, 4.0, 0.1))
    assert last.traffic.beside == BLUE
    assert served.versions("s") == {user: last.traffic.arm(user).version for user in USERS}


async def test_an_update_that_cannot_be_loaded_costs_nobody_an_answer() -> None:
    served = Served()
    served.up(BLUE, GREEN, HELDOUT)
    first = await served.hear(traffic.start(3, 0.0, 0.0))
    served.router(GREEN).refuses = True
    await served.hear(traffic.canary(first, 4, 1.0, 0.3))
    assert set(served.versions().values()) == {3}
    served.router(GREEN).refuses = False
    await served.pools.refresh()
    await asyncio.sleep(0)
    assert set(served.versions().values()) == {3, 4}, "it is tried again"


async def test_a_pool_without_workers_is_not_waited_for() -> None:
    served = Served()
    served.up(BLUE)
    first = await served.hear(traffic.start(3, 0.0, 0.2))
    await served.hear(traffic.canary(first, 4, 1.0, 0.3))
    homes = [served.pools.home(user, "") for user in USERS]
    assert {home[1].pool for home in homes if home} == {BLUE}


async def test_the_newest_sessions_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_SESSIONS", 2)
    served = Served()
    served.up(BLUE, GREEN)
    last = await served.hear(traffic.start(3, 0.0, 0.0))
    for session in ("old", "newer", "old", "new"):
        served.pools.home("u", session)
    for time, share in ((1.0, 0.3), (2.0, 1.0)):
        last = await served.hear(traffic.canary(last, 4, time, share))
    found = {s: served.pools.home("u", s) for s in ("old", "new", "newer")}
    assert {s: home[1].version for s, home in found.items() if home} == {
        "old": 3,
        "new": 3,
        "newer": 4,
    }


async def test_the_store_is_followed_every_second_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Served()
    served.up(BLUE, GREEN)
    assert served.log.append(traffic.start(3, 0.0, 0.0))
    newest, slept = served.pools._log.newest, list[float]()

    def fails_once() -> Change | None:
        if len(slept) == 1:
            raise EtudeError("it is away")
        return newest()

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0)
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(served.pools._log, "newest", fails_once)
    calls = SimpleNamespace(
        sleep=sleep, to_thread=asyncio.to_thread, create_task=asyncio.create_task
    )
    monkeypatch.setattr(pools, "asyncio", calls)
    with pytest.raises(asyncio.CancelledError):
        await served.pools.watch()
    assert slept == [1.0] * 3 and served.router(BLUE).looks == served.router(GREEN).looks == 3
    assert served.pools.status() == {
        BLUE: {"version": 3, "up": 1},
        GREEN: {"version": -1, "up": 0},  # it has nothing to serve yet
    }
    said = capsys.readouterr().err
    assert (
        "the versions that users get cannot be refreshed, and stay as they are: it is away" in said
    )
