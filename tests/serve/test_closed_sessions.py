"""A closed session stays closed: its tokens are invalid after the gateway restarts, too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import msgspec
import pytest
from obstore.store import MemoryStore

from etude.core.errors import EtudeError
from etude.serve.closed_sessions import FOLDER, ClosedSessions
from etude.serve.http import Unavailable
from etude.serve.process import authorization
from etude.serve.tokens import MAX_SESSION_S, Scope, TokenAuthority
from etude.store.objects import Objects
from tests.run.test_pull import offer
from tests.serve.test_processes import SECRET, Processes, processes, url

__all__ = ["processes"]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["directory", "bucket"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "bucket":
        return Objects(MemoryStore(), "s3://fake")
    return Objects.open(f"file:{tmp_path}/store")


def restored(objects: Objects, clock: Clock, shard: str = "0-of-1") -> list[str]:
    return [mark.session for mark in ClosedSessions(objects, shard, clock).restore()]


async def test_a_mark_is_there_in_every_later_life(objects: Objects) -> None:
    clock = Clock()
    names = [f"s{n}" for n in range(10)]
    for life in range(3):
        closed = ClosedSessions(objects, now=clock, max_marks=3)
        assert [mark.session for mark in closed.restore()] == names[: 3 * life]
        for name in names[3 * life : 3 * life + 3]:
            clock.now += 1
            await closed.add(name)
    assert restored(objects, clock) == names[:9]
    assert restored(objects, clock, "1-of-2") == names[:9], "also if there are other shards now"


async def test_those_that_end_at_once_are_stored_together(objects: Objects) -> None:
    closed = ClosedSessions(objects, now=Clock(), max_marks=8)
    await asyncio.gather(*(closed.add(f"s{n}") for n in range(50)))
    assert sorted(restored(objects, Clock())) == sorted(f"s{n}" for n in range(50))
    assert len(objects.list(FOLDER)) <= 8


async def test_what_no_token_can_ask_for_is_not_kept(objects: Objects) -> None:
    clock = Clock()
    closed = ClosedSessions(objects, now=clock, max_marks=2)
    for n in range(100):
        clock.now += MAX_SESSION_S / 10
        await closed.add(f"s{n}")
        assert len(objects.list(FOLDER)) <= 7
    assert restored(objects, clock) == [f"s{n}" for n in range(89, 100)]
    clock.now += MAX_SESSION_S + 1
    assert restored(objects, clock) == [] and objects.list(FOLDER) == []


async def test_no_shard_deletes_what_another_still_writes(objects: Objects) -> None:
    clock = Clock()
    other = ClosedSessions(objects, "1-of-2", clock)
    await other.add("first")
    ours = ClosedSessions(objects, "0-of-2", clock, max_marks=1)
    ours.restore()
    clock.now += MAX_SESSION_S - 1
    await other.add("second")
    clock.now += 2
    await ours.add("ours")
    assert restored(objects, clock) == ["second", "ours"]


async def test_the_marks_of_shards_that_are_gone_are_deleted(objects: Objects) -> None:
    clock = Clock()
    await ClosedSessions(objects, "2-of-3", clock).add("old")
    clock.now += MAX_SESSION_S + 1
    assert restored(objects, clock, "0-of-2") == [] and objects.list(FOLDER) == []


async def test_shards_start_together(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them deletes an object that the other is about to read."""
    clock = Clock()
    await ClosedSessions(objects, "0-of-1", clock).add("old")
    clock.now += MAX_SESSION_S + 1
    listed = objects.list(FOLDER)
    assert restored(objects, clock, "0-of-2") == []
    monkeypatch.setattr(objects, "list", lambda folder: listed)
    assert restored(objects, clock, "1-of-2") == []


async def test_an_end_that_is_not_stored_is_not_acknowledged(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark is not lost: it is stored with the next one."""
    closed = ClosedSessions(objects, now=Clock())

    def full(key: str, data: bytes) -> None:
        raise EtudeError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(objects, "put_sealed", full)
        with pytest.raises(Unavailable, match="end of a session cannot be stored.*disk is full"):
            await closed.add("a")
    await closed.add("b")
    assert restored(objects, Clock()) == ["a", "b"]


async def test_a_killed_gateway_knows_which_sessions_are_over_and_settled(
    processes: Processes, http: aiohttp.ClientSession
) -> None:
    tokens = TokenAuthority(SECRET)
    admin = authorization(tokens.mint(Scope.ADMIN, "", 3600.0))
    keys = {name: tokens.mint(Scope.SESSION, name, MAX_SESSION_S) for name in ("over", "open")}

    async def enters(gateway: str, session: str) -> bool:
        """True if the session's token is still valid. The status is 404 then, since the response
        does not exist."""
        asked = f"{gateway}/s/{session}/v1/responses/none"
        async with http.get(asked, headers=authorization(keys[session])) as response:
            assert response.status in (401, 404)
            return response.status == 404

    first = processes.start("etude.serve.gateway", ETUDE_SECRET=SECRET)
    gateway = url(first)
    assert await enters(gateway, "over")
    async with http.delete(f"{gateway}/s/over", headers=admin) as response:
        assert response.status == 204
    assert not await enters(gateway, "over")
    settled = offer("settled")
    async with http.put(
        f"{gateway}/v1/sessions/settled", data=msgspec.json.encode(settled), headers=admin
    ) as response:
        assert response.status == 204
    result = {"status": "failed", "error": "no browser"}
    score = f"{gateway}/v1/sessions/settled/score"
    async with http.post(score, json=result, headers=admin) as response:
        assert response.status == 204
    first.kill()
    first.wait()

    gateway = url(processes.start("etude.serve.gateway", ETUDE_SECRET=SECRET))
    assert not await enters(gateway, "over")
    assert await enters(gateway, "open")
    async with http.get(f"{gateway}/v1/sessions/settled", headers=admin) as response:
        assert (await response.json())["result"]["error"] == "no browser"
    async with http.get(f"{gateway}/v1/sessions/settled?wait_s=soon", headers=admin) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "wait_s"
