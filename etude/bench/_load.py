"""A load of concurrent streaming sessions with a chat API, and its measurements. Written on the
bare protocol: a client must cost less than the server that it measures."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from etude.core.errors import EtudeError

EVENT = re.compile(rb"data: (\{.*?\})\n\n")
END = b"0\r\n\r\n"
RETRY_S = 0.5
"""Pause before a retry: a thousand clients that retry at once would slow down the restart of the
server."""


class BrokenOff(Exception):
    """An incomplete answer."""


@dataclass(slots=True)
class Measured:
    turn_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    """Time to first token of each turn."""
    num_retries: int = 0
    seconds: float = 0.0


class Connection(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self._received: list[bytes] = []
        self._done: asyncio.Future[bytes] | None = None
        self.first_at = 0.0
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        if not self.first_at and b'"content":"' in data and b'"content":""' not in data:
            self.first_at = time.perf_counter()
        self._received.append(data)
        if data.endswith(END) or b"\r\nContent-Length: " in self._received[0].title():
            self._end(None)

    def connection_lost(self, e: Exception | None) -> None:
        self.is_closed = True
        self._end(BrokenOff("the connection was closed"))

    def _end(self, e: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if e is None:
            self._done.set_result(b"".join(self._received))
        else:
            self._done.set_exception(e)

    async def ask(self, request: bytes) -> bytes:
        """Send a request and return the response, headers included."""
        self._received, self.first_at = [], 0.0
        self._done = asyncio.get_running_loop().create_future()
        if self.is_closed:
            raise BrokenOff("the connection was closed")
        self.transport.write(request)
        return await self._done


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Sessions with one server."""

    path: Callable[[int], str]
    """Path of the chat route of a session."""
    url: Callable[[int], str]
    turns: int
    spread_s: float
    """Time over which the starts of the sessions are spread."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of a request."""
    limit_s: float = math.inf
    """Time after which the load ends; unfinished turns do not count."""
    told: Callable[[int, list[dict[str, Any]]], None] = lambda session, choices: None
    """Callback for every complete answer."""

    async def run(self, sessions: Sequence[int]) -> Measured:
        measured = Measured()
        began = time.perf_counter()

        async def one(place: int, session: int) -> None:
            await asyncio.sleep(self.spread_s * place / len(sessions))
            await self._session(session, measured)

        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(self.limit_s if math.isfinite(self.limit_s) else None),
                asyncio.TaskGroup() as group,
            ):
                for place, session in enumerate(sessions):
                    group.create_task(one(place, session))
        measured.seconds = time.perf_counter() - began
        return measured

    async def _session(self, session: int, measured: Measured) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"task {session}"}]
        connection: Connection | None = None
        try:
            for turn in range(self.turns):
                asked = {"model": "fake", "stream": True, "messages": messages, **self.extra}
                request = self._request(session, asked | {"seed": session * 1000 + turn})
                while True:
                    try:
                        if connection is None or connection.is_closed:
                            connection = await self._connect(session)
                        began = time.perf_counter()
                        choices = _choices(await connection.ask(request))
                        break
                    except (BrokenOff, OSError):
                        measured.num_retries += 1
                        if connection is not None:
                            connection.transport.close()
                        connection = None
                        await asyncio.sleep(RETRY_S)
                measured.turn_s.append(time.perf_counter() - began)
                measured.first_s.append(connection.first_at - began)
                self.told(session, choices)
                text = "".join(choice["delta"].get("content") or "" for choice in choices)
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": f"turn {turn}"},
                ]
        finally:
            if connection is not None:
                connection.transport.close()

    async def _connect(self, session: int) -> Connection:
        host, _, port = self.url(session).removeprefix("http://").partition(":")
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, host, int(port)))[1]

    def _request(self, session: int, asked: dict[str, Any]) -> bytes:
        body = msgspec.json.encode(asked)
        head = (
            f"POST {self.path(session)} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def _choices(response: bytes) -> list[dict[str, Any]]:
    """The choices in a response. Raise `BrokenOff` if it is incomplete, and EtudeError if it is a
    refusal that a retry would also get."""
    if response.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401", b"HTTP/1.1 403", b"HTTP/1.1 404")):
        raise EtudeError(response[:500].decode(errors="replace"))
    if not response.startswith(b"HTTP/1.1 200") or b"[DONE]" not in response:
        raise BrokenOff(response[:500].decode(errors="replace"))
    found = [msgspec.json.decode(event) for event in EVENT.findall(response)]
    if any("error" in event for event in found):
        raise BrokenOff(str(found[-1]))
    return [choice for event in found for choice in event["choices"]]
