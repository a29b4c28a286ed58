"""The gateway's connections to its workers, and what goes out on those to its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from etude.serve.connections import MAX_GATHERED_BYTES, GatheringTransport
from etude.serve.worker_client import IDLE_S, WorkerClient, WorkerConnection

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
PART = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n"
END = b"0\r\n\r\n"
Answer = Callable[[asyncio.StreamWriter, int], Awaitable[None]]


class Worker:
    """Answers the requests of a connection, each by its number."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.asked: list[bytes] = []
        self.num_connections = 0
        self.left = asyncio.Event()
        """Set when a client has disconnected."""

    @asynccontextmanager
    async def at(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/generate"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                self.asked.append(await reader.readuntil(b"\r\n\r\nask"))
                await self._answer(writer, len(self.asked))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


async def ask(client: WorkerClient, url: str) -> WorkerConnection:
    connection = client.idle(url) or await client.connect(url)
    assert await connection.post(url, b"ask", {"Authorization": "Bearer k"}) == 200
    return connection


async def say_all(writer: asyncio.StreamWriter, number: int) -> None:
    writer.write(WHOLE)


async def test_a_connection_that_is_closed_twice_is_free_once() -> None:
    worker, client = Worker(say_all), WorkerClient()
    async with worker.at() as url:
        connection = await ask(client, url)
        await connection.read_all()
        connection.close()
        connection.close()
        assert client.idle(url) is connection and client.idle(url) is None
        connection.abort()


async def test_a_connection_is_used_again() -> None:
    worker, client = Worker(say_all), WorkerClient()
    async with worker.at() as url:
        for _ in range(3):
            connection = await ask(client, url)
            assert await connection.read_all() == b"hi"
            connection.close()
        assert worker.num_connections == 1
        assert worker.asked[0].startswith(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nAuthorization: Bearer k\r\n" in worker.asked[0]
        connection.idle_since -= IDLE_S
        assert client.idle(url) is None, "its worker may be about to close it"
        client.close()


async def test_one_whose_end_is_still_to_come_is_free_when_it_has() -> None:
    go_on = asyncio.Event()

    async def say(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(PART)
        await go_on.wait()
        writer.write(END)

    worker, client = Worker(say), WorkerClient()
    async with worker.at() as url:
        connection = await ask(client, url)
        assert await connection.read() == b"hi"
        connection.finish()
        connection.close()
        assert client.idle(url) is None
        go_on.set()
        while (again := client.idle(url)) is None:
            await asyncio.sleep(0)
        assert again is connection
        connection.abort()


async def test_an_answer_that_nobody_wants_is_broken_off() -> None:
    async def say(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(PART)

    worker, client = Worker(say), WorkerClient()
    async with worker.at() as url:
        connection = await ask(client, url)
        connection.close()
        await worker.left.wait()
        assert client.idle(url) is None


@pytest.mark.parametrize(("said", "why"), [(PART, "closed"), (PART + b"zz\r\n", "speak HTTP")])
async def test_what_breaks_off_is_an_error(said: bytes, why: str) -> None:
    async def say(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(said)
        await writer.drain()
        writer.close()

    client = WorkerClient()
    async with Worker(say).at() as url:
        connection = await client.connect(url)
        with pytest.raises(ConnectionError, match=why):
            await connection.post(url, b"ask", {})
            await connection.read_all()
        connection.close()
        assert client.idle(url) is None


class Wire(asyncio.Transport):
    """A transport that collects what was sent, piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data))

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True


async def test_what_is_written_together_is_sent_together() -> None:
    wire = Wire()
    transport = GatheringTransport(wire, asyncio.get_running_loop())
    transport.write(b"head ")
    transport.write(b"token")
    assert wire.sent == []
    await asyncio.sleep(0)
    assert wire.sent == [b"head token"]
    transport.write(b"x" * (MAX_GATHERED_BYTES + 1))
    assert len(wire.sent) == 2, "much is sent at once, so that a slow reader is noticed"
    transport.write(b"end")
    transport.close()
    assert wire.sent[2:] == [b"end"] and wire.is_closing()
    transport.write(b"late")
    await asyncio.sleep(0)
    assert wire.sent[2:] == [b"end"]
