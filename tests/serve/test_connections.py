"""Clients that hold on to a connection, over real sockets. The tests control the clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from urllib.parse import urlsplit

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from etude.serve import connections as limits
from etude.serve.connections import Connections, Departure
from etude.serve.http import (
    ClientDisconnected,
    cancel_on_disconnect,
    create_app,
    read,
    respond,
)
from tests.serve.conftest import served

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = b"POST /load HTTP/1.1\r\nHost: localhost\r\n"


class Server(Connections):
    """A server with three routes, whose clock stands still."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.left = asyncio.Event()
        self.answering = 0
        self.clients: list[Client] = []

    async def watch(self) -> None: ...

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for connection in list(self.open):
            connection.look()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    def app(self) -> ASGIApp:
        async def health(http: Request) -> Response:
            return respond({})

        async def load(http: Request) -> Response:
            await read(http, dict[str, int])
            self.answering += 1
            try:
                await cancel_on_disconnect(http, self.go_on.wait())
            except ClientDisconnected:
                self.left.set()
            return respond({"answered": True})

        async def status(http: Request) -> Response:
            async def endless() -> AsyncIterator[bytes]:
                try:
                    while True:
                        await asyncio.sleep(0)
                        yield b"x" * 65536
                finally:
                    self.left.set()

            return StreamingResponse(endless())

        return create_app(
            [
                Route("/health", health),
                Route("/load", load, methods=["POST"]),
                Route("/status", status),
            ],
            None,
        )

    async def connect(self, data: bytes = b"") -> Client:
        """Connect and send data; returns once the server has received it."""
        known = set(self.open)
        place = urlsplit(self.url)
        client = Client(*await asyncio.open_connection(place.hostname, place.port))
        await self.until(lambda: len(self.open - known) == 1 or client.reader.at_eof())
        client.writer.write(data)
        self.clients.append(client)  # kept, since losing it would end the connection
        return client


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ended(self) -> bytes:
        """Everything received up to the end of the connection."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def answer(self) -> bytes:
        head = await self.head()
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head.split(b"\r\n")[0] + b" " + await self.reader.readexactly(size)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    made = Server()
    monkeypatch.setattr("etude.serve.process.Connections", lambda: made)
    # Make uvicorn's own rule, which must not matter, as strict as possible.
    impatient = partial(uvicorn.Config, timeout_keep_alive=0)
    monkeypatch.setattr("etude.serve.process.uvicorn.Config", impatient)
    async with served(made.app()) as made.url:
        yield made
        for connection in list(made.open):
            connection.transport.abort()


async def test_who_says_nothing_is_not_waited_for(server: Server) -> None:
    client = await server.connect()
    server.pass_time(limits.HEAD_S - 1)
    assert server.open
    server.pass_time(1)
    assert await client.ended() == b""


async def test_a_head_that_drips_has_one_deadline(server: Server) -> None:
    client = await server.connect(b"GET /health HTTP/1.1\r\n")
    (connection,) = server.open
    await server.until(lambda: connection._receiving)
    for n in range(int(limits.HEAD_S) - 1):
        client.writer.write(b"X-%d: 1\r\n" % n)
        server.pass_time(1)
        assert connection in server.open
    server.pass_time(1)
    assert await client.ended() == b""


async def test_empty_lines_between_requests_are_no_sign_of_life(server: Server) -> None:
    client = await server.connect(HEALTH)
    assert (await client.answer()).startswith(b"HTTP/1.1 200")
    for _ in range(int(limits.IDLE_S)):
        client.writer.write(b"\r\n")
        await client.writer.drain()
        server.pass_time(1)
    assert await client.ended() == b""


async def test_a_connection_that_is_used_lives(server: Server) -> None:
    client = await server.connect()
    server.pass_time(limits.HEAD_S - 1)
    for _ in range(5):
        client.writer.write(HEALTH)
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
        server.pass_time(limits.IDLE_S - 1)


async def test_an_answer_takes_as_long_as_it_takes(server: Server) -> None:
    client = await server.connect(HEAD + b"Content-Length: 2\r\n\r\n{}")
    await server.until(lambda: server.answering == 1)
    server.pass_time(1e6)
    server.go_on.set()
    assert await client.answer() == b'HTTP/1.1 200 OK {"answered":true}'
    server.pass_time(limits.IDLE_S - 1)
    assert server.open


@pytest.mark.parametrize("path", [b"/load", b"/nothing"])
async def test_a_body_that_drips_is_not_waited_for(server: Server, path: bytes) -> None:
    """With and without a handler that reads the body."""
    client = await server.connect(HEAD.replace(b"/load", path) + b"Content-Length: 100\r\n\r\n")
    (connection,) = server.open
    await server.until(lambda: connection._receiving and not connection._in_head)
    if path == b"/nothing":
        assert (await client.answer()).startswith(b"HTTP/1.1 404")
    for _ in range(int(limits.BODY_S)):
        client.writer.write(b" ")
        server.pass_time(1)
    assert await client.ended() == b""


async def test_who_does_not_read_is_left(server: Server) -> None:
    client = await server.connect(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    (connection,) = server.open
    await server.until(lambda: connection._read_deadline < float("inf"))
    server.pass_time(limits.READ_S - 1)
    assert server.open
    server.pass_time(1)
    await server.left.wait()
    await server.until(lambda: not server.open)
    client.writer.transport.abort()


async def test_who_reads_slowly_is_served(server: Server) -> None:
    client = await server.connect(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
    (connection,) = server.open
    for _ in range(5):
        await server.until(lambda: connection._read_deadline < float("inf"))
        server.pass_time(limits.READ_S - 1)
        await client.reader.readexactly(8 << 20)
    assert not server.left.is_set()


LARGE = {
    "lines": b"".join(b"X-%d: 1\r\n" % n for n in range(60_000)),
    "short lines": b"a:\r\n" * 60_000,
    "a long line": b"X: " + b"x" * 40_000 + b"\r\n",
    "a line without an end": b"X: " + b"x" * 4_000_000,
    "a name without an end": b"x" * 4_000_000,
    "long lines": (b"X: " + b"x" * 9_000 + b"\r\n") * 4,
}


@pytest.mark.parametrize("kind", LARGE)
async def test_a_head_has_a_largest_size(server: Server, kind: str) -> None:
    client = await server.connect(HEAD + LARGE[kind] + b"\r\n")
    said = await client.ended()
    assert said.startswith(b"HTTP/1.1 431") or (said == b"" and len(LARGE[kind]) > 100_000)
    assert not server.answering


async def test_a_url_and_a_trailer_have_one_too(server: Server) -> None:
    client = await server.connect(b"GET /" + b"x" * 60_000 + b" HTTP/1.1\r\n\r\n")
    assert (await client.ended()).startswith(b"HTTP/1.1 431")
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
    client = await server.connect(chunked + b"X: 1\r\n" * 200 + b"\r\n")
    await client.ended()
    assert not server.answering


async def test_a_large_head_and_a_large_body_are_read(server: Server) -> None:
    """Independently of packet boundaries."""
    server.go_on.set()
    body = b" " * (1 << 20) + b"{}"
    head = HEAD + b"".join(b"X-%d: %s\r\n" % (n, b"x" * 200) for n in range(100))
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    for cut in (0, 10, len(HEAD), len(head) - 1, len(head)):
        client = await server.connect((head + body)[:cut])
        await asyncio.sleep(0)
        client.writer.write((head + body)[cut:])
        assert await client.answer() == b'HTTP/1.1 200 OK {"answered":true}'


async def test_requests_at_once_on_one_connection_are_few(server: Server) -> None:
    server.go_on.set()
    client = await server.connect(HEALTH * 5)
    for _ in range(5):
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
    client = await server.connect(HEALTH * 10_000)
    assert (await client.ended()).count(b"HTTP/1.1 200") <= limits.MAX_PIPELINED + 1


async def test_idle_connections_keep_nobody_out(server: Server) -> None:
    server.limit = 3
    first = await server.connect()
    for _ in range(2):
        server.pass_time(1)
        await server.connect()
    server.pass_time(1)
    for _ in range(3):
        client = await server.connect(HEALTH)
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
        client.writer.close()
        await server.until(lambda: len(server.open) < 3)
        await server.connect()
        server.pass_time(1)
    assert await first.ended() == b""


async def test_who_is_being_answered_keeps_the_connection(server: Server) -> None:
    server.limit = 2
    asking = [await server.connect(HEAD + b"Content-Length: 2\r\n\r\n{}") for _ in range(2)]
    await server.until(lambda: server.answering == 2)
    late = await server.connect(HEALTH)
    assert await late.ended() == b""
    server.go_on.set()
    for client in asking:
        assert await client.answer() == b'HTTP/1.1 200 OK {"answered":true}'


async def test_who_leaves_while_it_is_answered_is_noticed(server: Server) -> None:
    client = await server.connect(HEAD + b"Content-Length: 2\r\n\r\n{}")
    await server.until(lambda: server.answering == 1)
    client.writer.close()
    async with asyncio.timeout(30):
        await server.left.wait()


async def test_who_leaves_behind_a_large_body_is_noticed(server: Server) -> None:
    """Reading pauses while the body arrives faster than it is read, which also hides the end of the
    connection."""
    body = b'{"%b": 1}' % (b"x" * 300_000)
    client = await server.connect(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body[:9])
    (connection,) = server.open
    await server.until(lambda: connection.cycle is not None)
    await server.until(lambda: not connection.cycle.body)  # its reader waits for more
    client.writer.write(body[9:])
    await server.until(lambda: server.answering == 1)
    client.writer.close()
    async with asyncio.timeout(30):
        await server.left.wait()


async def test_who_is_gone_already_is_told_from_the_loop() -> None:
    """The callback does not run inside the task that registers it, which could end before it is
    cancelled."""
    told: list[str] = []

    class Flow:
        def resume_reading(self) -> None: ...

    departure = Departure(Flow())  # type: ignore[arg-type]
    departure.watch(first := lambda: told.append("first"))
    departure.watch(second := lambda: told.append("second"))
    departure.unwatch(second)
    departure.tell()
    assert told == ["first"]
    departure.unwatch(first)
    departure.watch(lambda: told.append("late"))
    assert told == ["first"]
    await asyncio.sleep(0)
    assert told == ["first", "late"]
