"""The controller's client of the gateway, against a faulty server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from etude.core import patience
from etude.core.errors import EtudeError
from etude.core.events import RegionStatus
from etude.run import gateway_client
from etude.run.gateway_client import GatewayClient


async def asked(resets: int, status: int = 200) -> None:
    async with answering(resets, status) as gateway:
        await gateway.load(3)


@pytest.fixture(autouse=True)
def admin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_TOKEN", "admin's")


@contextlib.asynccontextmanager
async def answering(resets: int, status: int) -> AsyncIterator[GatewayClient]:
    """A gateway that resets this many connections before it answers."""
    left = resets

    async def answer(request: web.Request) -> web.Response:
        nonlocal left
        assert request.headers["Authorization"] == "Bearer admin's"
        if left:
            left -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(True, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with GatewayClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as gateway:
            yield gateway
    finally:
        await runner.cleanup()


async def test_a_gateway_that_resets_connections_when_it_wakes_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await asked(resets=3)
    monkeypatch.setattr(patience, "AWAY_S", 0.1)
    with pytest.raises(aiohttp.ClientConnectionError):
        await asked(resets=10**9)


async def test_a_gateway_that_was_started_again_is_told_which_weights_are_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has forgotten them, and would let a worker with older weights answer."""
    gateway, version = GatewayClient("http://there"), -1
    loaded: list[object] = []

    async def ask(method: str, path: str, what: str, **more: Any) -> bytes:
        nonlocal version
        if path == "/load":
            version = more["json"]["version"]
            loaded.append(version)
        return msgspec.json.encode({"version": version, "regions": {}, "silent": []})

    monkeypatch.setattr(gateway, "_ask", ask)
    await gateway.regions()
    await gateway.load(7)
    await gateway.regions()
    assert loaded == [7]
    version = -1
    await gateway.regions()
    await gateway.regions()
    assert loaded == [7, 7]


async def test_a_gateway_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_client, "START_S", 0.05)
    async with GatewayClient("http://127.0.0.1:1") as gateway:
        with pytest.raises(EtudeError, match="no answer from the gateway at http://127.0.0.1:1"):
            await gateway.ready()


async def test_what_it_refuses_is_not_asked_again() -> None:
    with pytest.raises(
        EtudeError, match="the workers cannot load version 3: the gateway answered 502: true"
    ):
        await asked(resets=0, status=502)


async def test_each_question_goes_to_its_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, object]] = []
    segments = msgspec.msgpack.encode([])

    async def ask(method: str, path: str, what: str, **more: object) -> bytes:
        asked.append((method, path, more.get("json") or more.get("params")))
        answers = {"/tokens": b'{"token": "the key"}'}
        return segments if path.endswith("/segments") else answers.get(path, b"true")

    gateway = GatewayClient("http://there")
    monkeypatch.setattr(gateway, "_ask", ask)
    await gateway.up()
    await gateway.load(7)
    access = await gateway.open_session("s")
    id = access.base_url.removeprefix("http://there/s/").removesuffix("/v1")
    assert access.api_key == "the key" and len(id) == 32
    assert await gateway.segments("s", experts=True) == ()
    await gateway.segments("s", experts=False)
    assert await gateway.disturbed("s", 2.5)
    await gateway.forget("s")
    assert asked == [
        ("GET", "/up", None),
        ("POST", "/load", {"version": 7, "quarantined": []}),
        ("POST", "/tokens", {"scope": "session", "subject": id, "lifetime_s": 172800.0}),
        ("GET", f"/s/{id}/segments", {"experts": "true"}),
        ("GET", f"/s/{id}/segments", None),
        ("GET", f"/s/{id}/disturbed", {"age_s": "2.5"}),
        ("DELETE", f"/s/{id}", None),
    ]
    await gateway.open_session("s")
    assert asked[-1][2] != asked[2][2], "another attempt is another session"


async def test_a_session_that_was_never_opened_has_nothing() -> None:
    gateway = GatewayClient("http://127.0.0.1:1")
    assert await gateway.segments("s", experts=False) == ()
    await gateway.forget("s")


async def test_a_harness_that_is_given_the_connections_is_not_given_our_token() -> None:
    async with GatewayClient("http://there") as gateway:
        assert gateway.headers == {"Authorization": "Bearer admin's"}
        assert "Authorization" not in gateway.http.headers


async def test_a_session_that_nobody_knows_has_no_segments() -> None:
    async with answering(0, status=404) as gateway:
        gateway._ids["s"] = "id"
        assert await gateway.segments("s", experts=True) == ()
        with pytest.raises(EtudeError, match="the gateway answered 404"):
            await gateway.disturbed("s", age_s=1.0)


async def test_how_busy_a_region_is_counts_from_the_last_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway, time_s, busy_s = GatewayClient("http://there"), 100.0, 7.0

    async def ask(method: str, path: str, what: str) -> bytes:
        assert (method, path) == ("GET", "/status")
        worker = {"version": 3, "busy_s": busy_s, "running": 4, "waiting": 5}
        status = {"version": 3, "regions": {"east": worker}, "silent": ["west"]}
        return msgspec.json.encode(status)

    async def busy() -> float:
        regions, silent = await gateway.regions()
        (region,) = regions.values()
        assert silent == ["west"] and list(regions) == ["east"]
        assert region == RegionStatus(version=3, busy=region.busy, running=4, waiting=5)
        return region.busy

    monkeypatch.setattr(gateway, "_ask", ask)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time_s, raising=False)
    assert await busy() == 0.0, "nothing is known of the time before the first look"
    time_s, busy_s = 110.0, 12.0
    assert await busy() == 0.5
    assert await busy() == 0.0, "two looks at one moment"
    time_s, busy_s = 114.0, 13.0
    assert await busy() == 0.25
    time_s, busy_s = 115.0, 15.0
    assert await busy() == 1.0, "a step that was counted late"
    time_s, busy_s = 116.0, 0.5
    assert await busy() == 0.0, "a worker that was started again counts from 0"


async def test_no_connection_is_left_open() -> None:
    async with GatewayClient("http://there") as gateway:
        assert not gateway.http.closed
    assert gateway.http.closed
