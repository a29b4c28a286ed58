"""A lender whose gateway loses answers, refuses its token or goes away: users keep their worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from etude.core.lend_config import LendConfig
from etude.core.lending import UsersLoad
from etude.launch import lender
from etude.launch.lender import Lender, _users_load

LEND = LendConfig(run="rl", gateway="http://127.0.0.1:1", calm_s=1000.0)


class UsersGateway:
    """A gateway that knows one worker, and can fail."""

    def __init__(self) -> None:
        self.url = ""
        self.state = "live"
        self.active = 0
        self.ttft_s: float | None = None
        self.failures: list[int] = []
        """The codes of its next answers."""
        self.token_is_over = False
        self.refusals = 0
        self.loses_answers = False

    async def answer(self, request: web.Request) -> web.Response:
        if self.failures:
            return web.Response(status=self.failures.pop())
        if self.token_is_over:
            self.refusals += 1
            return web.Response(status=401)
        if request.path == "/workers/drain":
            self.state = "draining" if (await request.json())["draining"] else "live"
            return web.json_response({"active": 0}, status=503 if self.loses_answers else 200)
        workers = {self.url: {"state": self.state, "active": self.active}}
        return web.json_response({"workers": workers, "users_ttft_p99_s": self.ttft_s})


class Idle(Lender):
    """A lender without processes."""

    starts = stops = 0

    async def _start(self) -> None:
        self.starts += 1

    async def _stop(self) -> None:
        self.stops += 1

    async def _keep_running(self) -> None:
        pass


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[UsersGateway]:
    monkeypatch.setattr(lender, "LOOK_S", 0.04)
    made, app = UsersGateway(), web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    async with TestServer(app) as server:
        made.url = str(server.make_url("")).rstrip("/")
        yield made


@pytest.fixture
async def make(gateway: UsersGateway) -> AsyncIterator[Callable[..., Idle]]:
    async with aiohttp.ClientSession() as http:

        def make(port: int, shards: str = "") -> Idle:
            return Idle(
                http, LEND, store="users", gateway=shards or gateway.url, region="here", port=port,
                lent_port=1, host="127.0.0.1", slots=8,
            )  # fmt: skip

        yield make


def own_port(gateway: UsersGateway) -> int:
    """The gateway's port as the worker's own, so that the worker answers."""
    return int(gateway.url.rpartition(":")[2])


async def test_a_drain_whose_answer_was_lost_is_taken_back(
    gateway: UsersGateway, make: Callable[[int], Idle]
) -> None:
    made = make(own_port(gateway))
    gateway.loses_answers = True
    assert await made._drain(draining=True) is None and gateway.state == "draining"
    gateway.loses_answers = False
    await made._look()
    assert (gateway.state, made.stops) == ("live", 0)


async def test_all_shards_of_the_gateway_are_asked(
    gateway: UsersGateway, make: Callable[..., Idle]
) -> None:
    """A worker is empty when no shard has a request at it; if one shard does not answer, that is
    not known."""
    other, app = UsersGateway(), web.Application()
    app.router.add_route("*", "/{path:.*}", other.answer)
    async with TestServer(app) as server:
        other.url, other.active = gateway.url, 3
        gateway.ttft_s, other.ttft_s = 0.1, 0.7
        second = str(server.make_url("")).rstrip("/")
        made = make(own_port(gateway), f"{gateway.url},{second}")
        assert _users_load(await made._status()) == UsersLoad(1, 3, 0.7)
        assert await made._drain(draining=True) == 3
        other.state = "draining"
        assert _users_load(await made._status()) == UsersLoad(0, 3, 0.7)
        other.url = "http://elsewhere"
        status = await made._status()
        assert status is not None and status["workers"][other.url]["state"] == "unknown"
        other.failures = [503]
        assert await made._status() is None


async def test_a_token_that_is_over_takes_no_worker_from_users(
    gateway: UsersGateway, make: Callable[[int], Idle], capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(own_port(gateway))
    running = asyncio.create_task(made.run())
    while not made.starts:
        await asyncio.sleep(0.01)
    gateway.token_is_over = True
    while gateway.refusals < 3 and not running.done():
        await asyncio.sleep(0.01)
    assert not running.done() and (made.starts, made.stops) == (1, 0)
    assert capsys.readouterr().err.count("an admin token") == 1
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_users_are_sent_to_a_port_again_when_it_answers(
    gateway: UsersGateway, make: Callable[[int], Idle]
) -> None:
    """Not earlier, although the gateway still has the lease of the previous worker."""
    asked, loaded = asyncio.Event(), asyncio.Event()

    async def load(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await loaded.wait()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
        writer.write(head + b"Connection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(load, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    made = make(port)
    gateway.state, gateway.url = "draining", f"http://127.0.0.1:{port}"
    serving, asking = asyncio.create_task(made._serve_users()), asyncio.create_task(asked.wait())
    await asyncio.wait({serving, asking}, return_when=asyncio.FIRST_COMPLETED)
    assert not serving.done() and gateway.state == "draining"
    loaded.set()
    await serving
    assert gateway.state == "live"
    server.close()


async def test_the_time_in_which_the_gateway_is_away_is_none_of_the_return(
    gateway: UsersGateway, make: Callable[[int], Idle]
) -> None:
    made, took = make(own_port(gateway)), list[float]()
    policy: Any = SimpleNamespace(recalls=lambda now, users: True, returned=took.append)
    made._policy, made._lent = policy, True
    gateway.failures = [503] * 21
    began = asyncio.get_running_loop().time()
    await made._look()
    elapsed = asyncio.get_running_loop().time() - began
    assert took[0] < elapsed - 0.15, "of twenty times 0.01 s"
    assert await made._serve_users() == 0.0
