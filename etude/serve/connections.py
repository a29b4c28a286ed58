"""Connections that end: uvicorn's, with a deadline for everything that the other side has to do.

A client has so long to send the head of a request, then its body, to begin another one, and to
read what it is sent; how much a head may hold is bounded as well. Whoever keeps to that is never
cut off: an answer may take as long as it does.

Time is counted in looks at the connections, so that a process which was stopped does not hold
against its clients what they sent meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_S = 10.0
"""From its first byte to the last, also of the first one of a connection."""
BODY_S = 65.0
"""A little longer than `http.BODY_S`: whose route reads the body is told."""
IDLE_S = 75.0
"""Between two requests. Longer than clients keep an idle connection: whoever closes it first must
not be the one who may be asked."""
READ_S = 60.0
"""For the client to take some of what waits to be sent to it."""
LOOK_EVERY_S = 1.0
MAX_HEAD_BYTES = 32 << 10
MAX_HEADER_LINES = 128
MAX_PIPELINED = 16
MAX_GATHERED_BYTES = 64 << 10
MAX_OPEN = 1 << 15


DEPARTURE = "etude.departure"
"""Its key in the scope of a request."""


class Departure:
    """Tells that the client of a connection is gone. A task that waits for the last message of a
    request learns the same, at the price of a task for every request."""

    def __init__(self, flow: FlowControl) -> None:
        self._flow = flow
        self._callbacks: set[Callable[[], None]] = set()
        self._is_over = False

    def watch(self, callback: Callable[[], None]) -> None:
        """Call it when the body of the request has been read: nothing is kept back any more."""
        if self._is_over:
            asyncio.get_running_loop().call_soon(callback)  # as all others: from the loop
            return
        self._callbacks.add(callback)
        self._flow.resume_reading()  # or nothing is heard of the client

    def unwatch(self, callback: Callable[[], None]) -> None:
        self._callbacks.discard(callback)

    def tell(self) -> None:
        self._is_over = True
        for callback in list(self._callbacks):
            callback()


class Connections:
    """All connections of a server, which are looked at again and again."""

    def __init__(self) -> None:
        self.now = 0.0
        self.open: set[Connection] = set()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # each may need one more, to a worker, and there are files too
        self.limit = MAX_OPEN if files == resource.RLIM_INFINITY else max(16, files // 2 - 64)

    @property
    def protocol(self) -> Callable[..., Connection]:
        return partial(Connection, connections=self)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.now += LOOK_EVERY_S
            for connection in list(self.open):
                connection.look()

    def make_room(self, newcomer: Connection) -> None:
        """If there are too many, the one that has waited longest for its client goes: connections
        on which nothing happens keep nobody out."""
        if len(self.open) > self.limit:
            waiting = [each for each in self.open - {newcomer} if each.deadline < math.inf]
            longest = min(waiting, key=lambda each: each.since, default=newcomer)
            longest.transport.abort()


class GatheringTransport:
    """A transport that sends what is written in one pass of the event loop together: a head with
    what follows it, and tokens that came while others were served."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self.is_closing = transport.is_closing  # asked for again and again
        self._loop = loop
        self._pending: list[bytes] = []
        self._num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > MAX_GATHERED_BYTES:  # whoever reads too slowly is to be noticed
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._pending and not self.is_closing():
            self._transport.write(b"".join(self._pending))
        self._pending.clear()
        self._num_bytes = 0


class Connection(HttpToolsProtocol):
    def __init__(self, *args: Any, connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._all = connections
        self.since = 0.0
        """When the client's turn began."""
        self.deadline = math.inf
        """When it ends; infinite while it is ours."""
        self._read_deadline = math.inf
        self._in_head = False
        self._receiving = False
        self._num_headers = 0
        self._head_bytes = 0
        """Of what the parser has handed out."""
        self._unfinished_bytes = 0
        """Of what it may be keeping to itself."""
        self._too_large = False

    def look(self) -> None:
        if self.transport.is_closing() and self._read_deadline == math.inf:
            self._read_deadline = self._all.now + READ_S  # something is left to be sent
        if min(self.deadline, self._read_deadline) <= self._all.now:
            self.transport.abort()

    def _wait(self, seconds: float) -> None:
        self.since = self._all.now
        self.deadline = self.since + seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(GatheringTransport(transport, self.loop))  # type: ignore[arg-type]
        self._departure = Departure(self.flow)
        self._wait(HEAD_S)
        self._all.open.add(self)
        self._all.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.open.discard(self)
        super().connection_lost(exc)
        self._departure.tell()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._unfinished_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._unfinished_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[DEPARTURE] = self._departure  # type: ignore[literal-required]
        self._in_head = self._receiving = True
        self._num_headers = self._head_bytes = self._unfinished_bytes = 0
        self._wait(HEAD_S)

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(name + value)
        if self._in_head:  # and not behind the body, where nobody looks for one
            super().on_header(name, value)

    def _count(self, part: bytes) -> None:
        self._head_bytes += len(part)
        if self._num_headers > MAX_HEADER_LINES or self._head_bytes > MAX_HEAD_BYTES:
            self._too_large = True
            raise ValueError("the head of the request is too large")

    def on_headers_complete(self) -> None:
        self._in_head = False
        if len(self.pipeline) == MAX_PIPELINED:
            raise ValueError("too many requests at once on one connection")
        # what comes behind an unanswered request is not read before that is answered
        ahead = self.cycle is not None and not self.cycle.response_complete
        self._wait(math.inf if ahead else BODY_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._receiving = False
        self._wait(IDLE_S if self.cycle.response_complete else math.inf)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._receiving:
            self._wait(HEAD_S if self._in_head else BODY_S)
        elif self.cycle.response_complete:
            self._wait(IDLE_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_deadline = self._all.now + READ_S

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_deadline = math.inf

    def send_400_response(self, msg: str) -> None:
        if self._too_large:
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def _refuse_head(self) -> None:
        if not self.transport.is_closing():
            head = STATUS_LINE[431] + b"content-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head)
            self.transport.close()
