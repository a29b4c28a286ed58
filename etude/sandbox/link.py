"""The host's end of the socket of one sandbox in namespaces."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol, cast

from etude.core.errors import RolloutFailure

REPLY_TIMEOUT_S = 60.0
"""Seconds that a sandbox may take for an operation of milliseconds; beyond that, the machine is
unusable."""
_ERRORS: dict[str, type[Exception]] = {
    "FileNotFoundError": FileNotFoundError,
    "ValueError": ValueError,
    "RolloutFailure": RolloutFailure,
}


class HasDescriptor(Protocol):
    """A socket or a file."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Link(asyncio.Protocol):
    """JSON lines to and from one sandbox. Answers come in the order of the requests. The answer to
    a cancelled request is read and dropped."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._transport: asyncio.Transport
        self._buffer: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.ready: asyncio.Future[Any] = self._loop.create_future()
        """The first answer, which belongs to no request."""
        self._owed = deque([self.ready])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            whole, self._buffer = b"".join([*self._buffer, line]), []
            future = self._owed.popleft()
            if not future.done():
                _settle(future, json.loads(whole))
        self._buffer.append(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._give_up()
        self._ended.set_result(None)

    def _give_up(self) -> None:
        for future in self._owed:
            if not future.done():
                future.set_exception(RolloutFailure("sandbox: it ended before it answered"))
                future.exception()  # its caller may be gone

    def send(self, request: dict[str, Any]) -> asyncio.Future[Any]:
        if self._ended.done() or self._transport.is_closing():
            raise RolloutFailure("sandbox: it is closed")
        future: asyncio.Future[Any] = self._loop.create_future()
        self._owed.append(future)
        self._transport.write(json.dumps(request).encode() + b"\n")
        return future

    async def send_descriptor(self, descriptor: HasDescriptor) -> None:
        """Send a descriptor ahead of the request that it belongs to, with a blank, which may
        precede JSON."""
        if self._transport.get_write_buffer_size():  # of a request that was cancelled
            await self.answer(self.send({"op": "date", "times": {}}), REPLY_TIMEOUT_S)
        if self._ended.done() or self._transport.is_closing():
            raise RolloutFailure("sandbox: it is closed")
        try:
            socket.send_fds(self._connection, [b" "], [descriptor.fileno()])
        except OSError as e:
            raise RolloutFailure(f"sandbox: it ended: {e.strerror}") from e

    async def answer(self, future: asyncio.Future[Any], patience_s: float) -> Any:
        try:
            async with asyncio.timeout(patience_s):
                return await future
        except TimeoutError as e:
            raise RolloutFailure(f"sandbox: no answer within {patience_s:.0f} s") from e

    def abort(self) -> None:
        self._transport.abort()

    async def close(self) -> None:
        """Close our side, upon which the sandbox ends, and return once it has."""
        self._give_up()  # a command that ends because of this was not out of time
        if not self._ended.done() and not self._transport.is_closing():
            self._transport.write_eof()
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await asyncio.shield(self._ended)
        except TimeoutError as e:
            raise RolloutFailure(f"sandbox: it did not end within {REPLY_TIMEOUT_S:.0f} s") from e
        finally:
            self._transport.abort()


def _settle(future: asyncio.Future[Any], answer: dict[str, Any]) -> None:
    if "error" in answer:
        kind, message = answer["error"]
        future.set_exception(_ERRORS[kind](message))
    else:
        future.set_result(answer["ok"])


Entries = Mapping[str, tuple[int, bytes | None] | None]
"""Path -> mode and content; content None: too large to send; entry None: the file was deleted."""


def encoded(entries: Entries) -> dict[str, list[Any] | None]:
    """Entries in the form that JSON has for them."""
    return {
        path: [entry[0], base64.b64encode(entry[1] or b"").decode()] if entry else None
        for path, entry in entries.items()
    }


def decoded(answer: dict[str, list[Any] | None]) -> Entries:
    return {
        path: (each[0], None if each[1] is None else base64.b64decode(each[1])) if each else None
        for path, each in answer.items()
    }
