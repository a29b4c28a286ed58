"""Detection of hanging workers, which close no connection, by their silence. The tests control the
clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import msgspec
import pytest
from aiohttp import web

from etude.core.clock import AwakeClock, ManualClock
from etude.core.fleet import WorkerState
from etude.core.sampling import Request, Sample, VersionSpan
from etude.serve.gateway import Gateway
from etude.serve.http import Unavailable, create_app
from etude.serve.router import Router
from etude.serve.worker import Worker, keep_joined
from etude.serve.worker_answer import MAX_RETRIES, MAX_SILENCES
from etude.serve.worker_protocol import JoinRequest
from tests.serve.client import converse, post, segments, status, until_up
from tests.serve.conftest import Store, served
from tests.serve.test_gateway import worker

SILENCE_S = 10.0
ASK = Request(prompt=(1, 2), max_tokens=3, seed=1)


class Stopped:
    """A stopped worker: it accepts connections but answers nothing until it continues."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.goes_on = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        await self.goes_on.wait()
        if request.path == "/generate":
            return web.Response(body=msgspec.msgpack.encode(SAMPLED))
        return web.json_response({"version": 0})

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            self.goes_on.set()
            await runner.cleanup()

    async def until_asked(self, *paths: str) -> None:
        while sorted(self.asked) != sorted(paths):
            await asyncio.sleep(0.001)


SAMPLED = Sample(tokens=(7,), logprobs=(-1.0,), versions=(VersionSpan(0, 1),), finish_reason="stop")


class Watch:
    """A router whose clock the test controls."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.clock = ManualClock()
        self.router = Router(http, heartbeat_timeout_s=SILENCE_S, clock=AwakeClock(self.clock))

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.move(1.0)
            self.router.expire_silent()


async def sample(router: Router, session: str, ask: Request = ASK) -> Sample:
    with router.under_way(session):
        return await router.sample(ask, session)


async def join(router: Router, url: str, version: int = 0) -> None:
    await router.join(JoinRequest(url, "east", version))


async def test_what_a_silent_worker_was_asked_is_asked_of_another(
    http: aiohttp.ClientSession,
) -> None:
    watch, silent, other = Watch(http), Stopped(), Stopped()
    other.goes_on.set()
    async with silent.listening() as url, other.listening() as its:
        await join(watch.router, url)
        asked = [asyncio.create_task(sample(watch.router, "s")) for _ in range(MAX_RETRIES + 2)]
        await silent.until_asked(*["/generate"] * (MAX_RETRIES + 2))
        watch.wait(int(SILENCE_S) - 1)
        await join(watch.router, its)
        assert not watch.router.fleet.suspects
        watch.wait(1)
        assert [worker.url for worker in watch.router.fleet.suspects] == [url]
        assert [(await each).tokens for each in asked] == [(7,)] * (MAX_RETRIES + 2)
        assert watch.router.disturbed("s")
        assert (await sample(watch.router, "t")).tokens == (7,) and not watch.router.disturbed("t")
        # Nobody listens to its late answer; after its next heartbeat it gets requests again.
        silent.goes_on.set()
        await join(watch.router, url)
        assert len(watch.router.fleet.up) == 2 and not watch.router.fleet.suspects


@pytest.mark.parametrize("heard_again", [True, False], ids=["heard again", "not yet"])
async def test_a_session_whose_worker_stalls_within_its_lease_has_lost_time(
    http: aiohttp.ClientSession, heard_again: bool
) -> None:
    """Its answer may arrive before or after its next heartbeat."""
    watch, stalls = Watch(http), Stopped()
    async with stalls.listening() as url:
        await join(watch.router, url)
        asked = asyncio.create_task(sample(watch.router, "s"))
        await stalls.until_asked("/generate")
        watch.wait(int(SILENCE_S / 2))
        if heard_again:
            await join(watch.router, url)
        stalls.goes_on.set()
        assert (await asked).tokens == (7,) and watch.router.disturbed("s")
        await join(watch.router, url)
        await sample(watch.router, "t")
        assert not watch.router.disturbed("t"), "it asked afterwards"
        watch.wait(int(SILENCE_S / 2) - 1)
        await sample(watch.router, "t")
        assert not watch.router.disturbed("t"), "a heartbeat may be late"


@pytest.mark.parametrize("gone", ["restarted", "failed"])
async def test_nobody_waits_for_a_worker_whose_connections_outlive_it(
    http: aiohttp.ClientSession, gone: str
) -> None:
    """Its host lost power, so no connection was closed. It was restarted at the same address within
    its lease, or another request found it missing."""
    watch, silent, other = Watch(http), Stopped(), Stopped()
    other.goes_on.set()
    async with silent.listening() as url, other.listening() as its:
        await join(watch.router, url)
        asked = asyncio.create_task(sample(watch.router, "s"))
        await silent.until_asked("/generate")
        await join(watch.router, its)
        if gone == "restarted":
            await join(watch.router, url, version=-1)
        else:
            (worker,) = (each for each in watch.router.fleet.workers if each.url == url)
            watch.router.fleet.leave(worker)
        watch.wait(1)
        assert (await asked).tokens == (7,) and watch.router.disturbed("s")


async def test_silence_is_not_counted_as_a_failure_of_what_was_asked(
    http: aiohttp.ClientSession,
) -> None:
    """The only worker falls silent more often than a worker may fail, and answers in the end."""
    watch, only = Watch(http), Stopped()
    assert MAX_SILENCES - 1 > MAX_RETRIES
    async with only.listening() as url:
        asked = asyncio.create_task(watch.router.sample(ASK, "s"))
        await fall_silent(watch, only, url, MAX_SILENCES - 1)
        only.goes_on.set()
        await join(watch.router, url)
        assert (await asked).tokens == (7,)


@pytest.mark.parametrize("way", ["sample", "stream"])
async def test_a_request_that_silences_every_worker_fails(
    http: aiohttp.ClientSession, way: str
) -> None:
    """The request may be what takes workers down, so no more workers are sacrificed to it."""
    watch, only = Watch(http), Stopped()

    async def stream() -> None:
        with watch.router.under_way("s"):
            async for _ in watch.router.stream(ASK, "s"):
                pass

    async with only.listening() as url:
        asking = sample(watch.router, "s") if way == "sample" else stream()
        asked = asyncio.create_task(asking)
        await fall_silent(watch, only, url, MAX_SILENCES)
        await join(watch.router, url)
        while not asked.done():
            assert len(only.asked) == MAX_SILENCES, "it is sent again"
            await asyncio.sleep(0.001)
        said = f"{MAX_SILENCES} workers in a row failed, .*{url}/generate: it stopped responding"
        with pytest.raises(Unavailable, match=said):
            await asked
        assert watch.router.disturbed("s"), "what it lost is not held against it"


async def fall_silent(watch: Watch, only: Stopped, url: str, times: int) -> None:
    """Let a worker join, get a request and fall silent, the given number of times."""
    for number in range(1, times + 1):
        await join(watch.router, url)
        await only.until_asked(*["/generate"] * number)
        watch.wait(int(SILENCE_S))
        assert watch.router.fleet.up == []


async def test_requests_wait_for_a_worker_that_is_silent(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.serve.router.WORKER_WAIT_S", 0.01)
    watch, only = Watch(http), Stopped()
    async with only.listening() as url:
        await join(watch.router, url)
        watch.wait(int(SILENCE_S))
        up = asyncio.create_task(watch.router.up())
        asked = asyncio.create_task(watch.router.sample(ASK))
        await asyncio.sleep(0.1)
        assert not asked.done() and not up.done()
        only.goes_on.set()
        await join(watch.router, url)
        await up
        assert (await asked).tokens == (7,)


async def test_new_weights_and_looks_do_not_wait_for_a_silent_worker(
    http: aiohttp.ClientSession,
) -> None:
    watch, silent = Watch(http), Stopped()
    async with silent.listening() as url:
        await join(watch.router, url)
        loading = asyncio.create_task(watch.router.load(1))
        looking = asyncio.create_task(watch.router.regions())
        await silent.until_asked("/load", "/status")
        watch.wait(int(SILENCE_S))
        await loading
        assert await looking == {} and watch.router.fleet.floor == 1
        # It returns with its old weights, and has to load new ones before it gets requests.
        silent.asked.clear()
        coming = asyncio.create_task(join(watch.router, url))
        await silent.until_asked("/load")
        assert watch.router.fleet.up == []
        # it takes long, but keeps sending heartbeats
        for _ in range(3 * int(SILENCE_S)):
            watch.wait(1)
            await join(watch.router, url)
        silent.goes_on.set()
        await coming
        assert [worker.version for worker in watch.router.fleet.up] == [1] and silent.asked == [
            "/load"
        ]


async def test_a_gateway_that_was_stopped_itself_takes_nobody_out(
    http: aiohttp.ClientSession,
) -> None:
    watch, slow = Watch(http), Stopped()
    async with slow.listening() as url:
        await join(watch.router, url)
        watch.wait(5)
        watch.clock.move(90.0)
        assert watch.router.disturbed("s", age_s=1.0), (
            "it may have asked, and we have not read it yet"
        )
        watch.router.expire_silent()
        assert len(watch.router.fleet.up) == 1
        watch.wait(4)
        assert watch.router.disturbed("s", age_s=5.0) and not watch.router.disturbed("s", age_s=3.0)


async def test_a_session_knows_of_a_request_that_is_under_way_or_was_broken_off(
    store: Store, http: aiohttp.ClientSession
) -> None:
    router, slow = Router(http), Stopped()
    made = Gateway(
        router, store.objects, store.files, max_context=store.config.max_position_embeddings
    )

    async def disturbed(session: str) -> bool:
        async with http.get(f"{gateway}/s/{session}/disturbed") as response:
            return bool(await response.json())

    async with served(create_app(made.routes(), None)) as gateway, slow.listening() as url:
        up = asyncio.create_task(http.get(f"{gateway}/up"))
        while not router._changed._waiters:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
        await join(router, url)
        assert (await up).status == 204
        assert not await disturbed("s")
        async with http.get(f"{gateway}/s/s/disturbed?age_s=soon") as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "age_s"
        asked = asyncio.create_task(converse(http, gateway, "s", turns=1))
        await slow.until_asked("/generate")
        assert await disturbed("s")
        asked.cancel()
        while router._requests["s"].pending:
            await asyncio.sleep(0.001)
        assert await disturbed("s") and not await disturbed("t")
        router.forget("s")  # another session may have the same name later
        assert not await disturbed("s") and not router._requests


async def test_what_cannot_be_answered_disturbs_nobody(
    store: Store, http: aiohttp.ClientSession
) -> None:
    router = Router(http)
    async with worker(store, "east") as (made, url):
        await made.engine_thread.load(0)
        await join(router, url)
        with pytest.raises(ValueError, match="no room for an answer"):
            await sample(router, "s", replace(ASK, prompt=(1,) * 5000))
        assert not router.disturbed("s")


async def test_an_engine_that_hangs_is_not_well_although_its_port_answers(
    store: Store, http: aiohttp.ClientSession
) -> None:
    watch, free = Watch(http), threading.Event()
    made = Gateway(
        watch.router, store.objects, store.files, max_context=store.config.max_position_embeddings
    )
    async with (
        served(create_app(made.routes(), None)) as gateway,
        worker(store, "east") as (east, url),
    ):
        slow_machine = Worker(east.engine_thread, store.files, "east", heartbeat_timeout_s=0.01)
        joining = asyncio.create_task(keep_joined(slow_machine, url, gateway, None))
        await post(http, f"{gateway}/load", {"version": 0})
        await until_up(http, gateway, 1)
        east.engine_thread._between_steps.put(lambda: (free.wait(), None)[1])
        while slow_machine.well():
            await asyncio.sleep(0.01)
        asked = asyncio.create_task(converse(http, gateway, "s", turns=1))
        while "s" not in watch.router._requests:
            await asyncio.sleep(0.01)
        watch.wait(int(SILENCE_S))
        told = await status(http, gateway)
        assert (told["up"], told["silent"], told["regions"]) == (0, ["east"], {})
        free.set()
        await asked
        joining.cancel()
        assert len(await segments(http, gateway, "s")) == 1


async def test_new_weights_do_not_wait_for_a_slow_worker(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats go on, but its download does not end."""
    monkeypatch.setattr("etude.serve.router.LIVENESS_CHECK_S", 0.01)
    watch, slow, quick = Watch(http), Stopped(), Stopped()
    quick.goes_on.set()
    async with slow.listening() as url, quick.listening() as its:
        await join(watch.router, url)
        await join(watch.router, its)
        loading = asyncio.create_task(watch.router.load(1))
        await slow.until_asked("/load")
        fleet = watch.router.fleet
        while not [worker for worker in fleet.workers if worker.version == 1]:
            await asyncio.sleep(0.001)
        while not loading.done():
            watch.wait(1)
            for worker in fleet.workers:
                fleet.join(worker.url, "east", worker.version, watch.router._clock.now())
            await asyncio.sleep(0.01)
        assert fleet.floor == 1 and len(fleet.workers) == 2, "it is not taken out"
        assert (fleet.state(url), fleet.state(its)) == (WorkerState.SYNCING, WorkerState.LIVE)
        assert (await watch.router.sample(ASK)).tokens == (7,)
        assert "/generate" not in slow.asked
        slow.goes_on.set()
        await join(watch.router, url)
        assert fleet.state(url) is WorkerState.LIVE, "its next heartbeat has it caught up"
