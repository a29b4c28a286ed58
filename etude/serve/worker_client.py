"""HTTP/1.1 from the gateway to its workers, over persistent connections.

Every token of every session passes through here, so only the parser is between the socket and the
reader. A worker's data is held until it is read, which is at most one answer per connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools

CONNECT_S = 5.0
IDLE_S = 15.0
"""Shorter than workers keep an idle connection: if the worker closed it first, the gateway could be
sending a request at that moment."""


class WorkerClient:
    """Connections to workers, with a list of the idle ones."""

    def __init__(self) -> None:
        self._idle: dict[str, list[WorkerConnection]] = {}

    def idle(self, url: str) -> WorkerConnection | None:
        """An idle connection to the worker, if there is one."""
        idle, now = self._idle.get(urlsplit(url).netloc), asyncio.get_running_loop().time()
        while idle:
            connection = idle.pop()
            if now - connection.idle_since < IDLE_S:
                return connection
            connection.abort()
        return None

    async def connect(self, url: str) -> WorkerConnection:
        """Open a new connection. Raises OSError."""
        where = urlsplit(url)
        idle = self._idle.setdefault(where.netloc, [])
        async with asyncio.timeout(CONNECT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: WorkerConnection(idle),
                where.hostname or "",
                where.port or (443 if where.scheme == "https" else 80),
                ssl=True if where.scheme == "https" else None,
            )
        return connection

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()


class WorkerConnection(asyncio.Protocol):
    """A connection that carries one request at a time: `post`, `read` until it returns nothing,
    `close`."""

    def __init__(self, idle: list[WorkerConnection]) -> None:
        """`idle`: the list that the connection returns to when it is free."""
        self.idle_since = 0.0
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._stays_open = False
        self._parts: list[bytes] = []
        self._is_whole = False
        self._is_over = False
        self._is_closed = False
        self._broken: Exception | None = None
        self._more: asyncio.Future[None] | None = None

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> int:
        """Send a request; returns the status of the answer. Raises ConnectionError if there is
        none."""
        self._status, self._parts = 0, []
        self._is_whole = self._is_over = self._is_closed = False
        self._transport.write(_head(urlsplit(url), len(body), headers) + body)
        while not self._status:
            await self._wait()
        return self._status

    async def read(self) -> bytes:
        """The bytes that have arrived since the last call; empty at the end. Raises ConnectionError
        if the answer breaks off."""
        while not self._parts:
            if self._is_whole:
                return b""
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        return data

    async def read_all(self) -> bytes:
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    def finish(self) -> None:
        """Note that the rest of the answer contains no more data, only its end."""
        self._is_over = True

    def close(self) -> None:
        """Free the connection for the next request once the answer is complete. If the answer is no
        longer wanted, abort the connection, so that the worker stops. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_whole:
            self._keep()
        elif not self._is_over:
            self.abort()

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._break(exc or ConnectionResetError("it closed the connection"))
        if self in self._idle:
            self._idle.remove(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._break(ConnectionError(f"it does not speak HTTP: {e}"))
            self.abort()
        self._wake()

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._stays_open = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._is_whole = True
        if self._is_closed:
            self._keep()

    def _keep(self) -> None:
        if self._broken is not None or not self._stays_open:
            self.abort()
            return
        self.idle_since = self._loop.time()
        self._idle.append(self)

    def _break(self, error: Exception) -> None:
        if self._broken is None:
            self._broken = error
        self._wake()

    async def _wait(self) -> None:
        """Wait for data, or for the end of the connection."""
        if self._broken is not None:
            raise ConnectionError(str(self._broken)) from self._broken
        self._more = self._loop.create_future()
        await self._more

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)


def _head(url: SplitResult, length: int, headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return (
        f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {length}\r\n{lines}\r\n"
    ).encode("latin-1")


def error_message(body: bytes) -> str:
    """The message of an error response."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body.decode(errors="replace")[:200]
