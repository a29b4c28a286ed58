"""Connections of uvicorn with a deadline for everything that the client has to do.

A client has a limited time to send the head of a request, to send its body, to begin the next
request, and to read what it is sent. The size of a head is limited as well. A client that keeps to
these limits is never cut off: an answer may take as long as it needs.

Time is counted in ticks of the loop that checks the connections. A process that was stopped for a
while therefore does not hold that time against its clients.
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
"""From the first byte of a head to its last; for the first head, from the opening of the
connection."""
BODY_S = 65.0
"""A little longer than `http.BODY_S`, so that the route that reads the body can report the
timeout."""
IDLE_S = 75.0
"""Between two requests. Longer than clients keep an idle connection: if the server closed it first,
a client could be sending a request at that moment."""
READ_S = 60.0
"""For the client to read some of the data that waits to be sent to it."""
LOOK_EVERY_S = 1.0
MAX_HEAD_BYTES = 32 << 10
MAX_HEADER_LINES = 128
MAX_PIPELINED = 16
MAX_GATHERED_BYTES = 64 << 10
MAX_OPEN = 1 << 15


DEPARTURE = "etude.departure"
"""Key of the `Departure` in the ASGI scope of a request."""


class Departure:
    """Notification that the client of a connection is gone. Waiting for the last ASGI message of a
    request would show the same, but needs a task for every request."""

    def __init__(self, flow: FlowControl) -> None:
        self._flow = flow
        self._callbacks: set[Callable[[], None]] = set()
        self._is_over = False

    def watch(self, callback: Callable[[], None]) -> None:
        """Register a callback. Call this only once the body of the request has been read, since it
        resumes reading, so nothing is held back any more."""
        if self._is_over:
            # like all callbacks: from the event loop
            asyncio.get_running_loop().call_soon(callback)
            return
        self._callbacks.add(callback)
        self._flow.resume_reading()  # otherwise a disconnect goes unnoticed

    def unwatch(self, callback: Callable[[], None]) -> None:
        self._callbacks.discard(callback)

    def tell(self) -> None:
        self._is_over = True
        for callback in list(self._callbacks):
            callback()


class Connections:
    """All connections of a server, checked at regular intervals."""

    def __init__(self) -> None:
        self.now = 0.0
        self.open: set[Connection] = set()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # A connection may need a second descriptor for a worker, and files need some too.
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
        """If there are too many connections, close the one that has waited longest for its client,
        so that idle connections keep nobody out."""
        if len(self.open) > self.limit:
            waiting = [each for each in self.open - {newcomer} if each.deadline < math.inf]
            longest = min(waiting, key=lambda each: each.since, default=newcomer)
            longest.transport.abort()


class GatheringTransport:
    """A transport that sends everything written in one pass of the event loop together: a head with
    what follows it, and tokens that arrived while other clients were served."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self.is_closing = transport.is_closing  # bound once, since it is called often
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
        # let flow control notice a client that reads too slowly
        if self._num_bytes > MAX_GATHERED_BYTES:
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
        """When it last became the client's turn."""
        self.deadline = math.inf
        """When the client's turn ends; infinite while it is the server's turn."""
        self._read_deadline = math.inf
        self._in_head = False
        self._receiving = False
        self._num_headers = 0
        self._head_bytes = 0
        """Bytes that the parser has handed out."""
        self._unfinished_bytes = 0
        """Bytes that the parser may be holding back."""
        self._too_large = False

    def look(self) -> None:
        if self.transport.is_closing() and self._read_deadline == math.inf:
            self._read_deadline = self._all.now + READ_S  # some data is still to be sent
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
        if self._in_head:  # not trailers after the body, which nobody looks for
            super().on_header(name, value)

    def _count(self, part: bytes) -> None:
        self._head_bytes += len(part)
        if self._num_headers > MAX_HEADER_LINES or self._head_bytes > MAX_HEAD_BYTES:
            self._too_large = True
            raise ValueError("the request's headers are too large")

    def on_headers_complete(self) -> None:
        self._in_head = False
        if len(self.pipeline) == MAX_PIPELINED:
            raise ValueError("too many requests at once on one connection")
        # The body of a pipelined request is not read before the previous request is answered.
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
