"""Network access of a sandbox, from a socket to the user's own server in a host's place."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from etude.core.sandbox import SandboxSpec
from etude.sandbox import egress, process
from etude.sandbox.egress import Egress, Outside, Passage
from etude.sandbox.pool import open_sandbox_pool
from tests.sandbox.test_boundaries import hello

HELLO = hello(b"a.org")
RECORD = b"\x16\x03\x01" + len(HELLO).to_bytes(2) + HELLO


class Way:
    """The way to the host a.org, and the data that the server in its place received."""

    def __init__(self, port: int, log: list[Passage], came: list[bytes]) -> None:
        self.port = port
        self.log = log
        self.came = came

    async def ask(self, said: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(said)
        writer.write_eof()
        found = await reader.read()
        writer.close()
        while not self.log or self.log[-1] is self._last:
            await asyncio.sleep(0.001)
        self._last = self.log[-1]
        return found

    _last: Passage | None = None


@asynccontextmanager
async def opened(name: str = "a.org", there: bool = True) -> AsyncIterator[Way]:
    came: list[bytes] = []
    log: list[Passage] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.read())
        writer.write(b"hello back")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    at = server.sockets[0].getsockname()
    mirrors = {name: at if there else ("127.0.0.1", 1)}
    listener = socket.create_server(("127.0.0.1", 0))
    way = Egress(7, Outside(log=log.append, mirrors=mirrors))
    await way.listen("a.org", 8080, listener)
    async with server:
        yield Way(listener.getsockname()[1], log, came)
    way.close()


async def test_a_request_and_its_answer_are_carried_and_counted() -> None:
    async with opened() as way:
        found = await way.ask(b"GET /x HTTP/1.1\r\nHost: a.org:8080\r\n\r\nbody")
        sent = b"GET /x HTTP/1.1\r\nHost: a.org:8080\r\nConnection: close\r\n\r\nbody"
        assert (found, way.came) == (b"hello back", [sent])
        (passage,) = way.log
        assert (passage.sandbox, passage.host, passage.port) == (7, "a.org", 8080)
        assert (passage.asked, passage.refused) == ("GET /x HTTP/1.1", "")
        assert (passage.sent_bytes, passage.received_bytes) == (len(sent), len(found))
        assert passage.seconds >= 0


async def test_tls_is_carried_as_it_is() -> None:
    async with opened() as way:
        assert await way.ask(RECORD + b"more") == b"hello back"
        assert way.came == [RECORD + b"more"]
        assert (way.log[0].asked, way.log[0].sent_bytes) == ("a.org", len(RECORD) + 4)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (RECORD.replace(b"a.org", b"b.org"), "TLS asks for b.org, not for a.org"),
        (b"\x16\x03\x01\x00\x02\x02\x00", "TLS asks for no name, not for a.org"),
        (b"\x00GET", "neither TLS nor a plain request"),
        (b"7GET / HTTP/1.1\r\n\r\n", "neither TLS nor a plain request"),
        (b"GET / HTTP/1.1\r\nHost: b.org\r\n\r\n", "the request is for b.org, not for a.org"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", "head of the request is too long"),
        (b"GET / HTTP/1.1\r\nHost: a.org\r\n", "no connection: "),
        (b"", "no connection: "),
        (RECORD[:-1], "no connection: "),
    ],
)
async def test_what_is_not_for_the_host_goes_nowhere(said: bytes, why: str) -> None:
    async with opened() as way:
        assert await way.ask(said) == b""
        assert way.came == []
        (passage,) = way.log
        assert why in passage.refused
        assert (passage.sent_bytes, passage.received_bytes) == (0, 0)


async def test_a_host_that_does_not_answer_is_told() -> None:
    async with opened(there=False) as way:
        assert await way.ask(b"GET / HTTP/1.1\r\nHost: a.org\r\n\r\n") == b""
        assert (
            way.log[0].refused.startswith("no connection: ")
            and way.log[0].asked == "GET / HTTP/1.1"
        )


async def test_a_sandbox_has_so_many_connections_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "_CONNECTIONS", 1)
    async with opened() as way:
        reader, writer = await asyncio.open_connection("127.0.0.1", way.port)
        writer.write(b"G")
        await writer.drain()
        while True:  # until the first has its place
            other, out = await asyncio.open_connection("127.0.0.1", way.port)
            if await other.read() == b"":
                break
        out.close()
        assert way.log == [], "who was turned away asked for nothing"
        writer.write(b"ET / HTTP/1.1\r\nHost: a.org\r\n\r\n")
        writer.write_eof()
        assert await reader.read() == b"hello back"
        writer.close()
        while not way.log:
            await asyncio.sleep(0.001)
        assert await way.ask(b"GET / HTTP/1.1\r\nHost: a.org\r\n\r\n") == b"hello back"


async def test_a_connection_that_is_done_with_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[asyncio.StreamWriter] = []
    connect = asyncio.open_connection

    async def connected(*address: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await connect(*address)
        made.append(writer)
        return reader, writer

    async with opened() as way:
        monkeypatch.setattr(asyncio, "open_connection", connected)
        assert await way.ask(b"GET / HTTP/1.1\r\nHost: a.org\r\n\r\n") == b"hello back"
        _, out = made  # ours, and the one to the host
        assert out.is_closing()


async def test_a_copy_that_could_not_be_written_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although all of it was sent."""

    def receive(source: int, root: str) -> None:
        with open(source, "rb") as packed:
            packed.read()
        raise OSError(28, "no space left")

    pool = open_sandbox_pool("process")
    async with pool.open(SandboxSpec(files={"a": "x"})) as sandbox:
        copy = await sandbox.fork()
        assert await copy.read("a") == "x"
        await copy.close()
        monkeypatch.setattr(process, "_receive", receive)
        with pytest.raises(OSError, match="no space left"):
            await sandbox.fork()
    await pool.close()
