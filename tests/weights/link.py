"""A bad link in front of a server: a TCP proxy with a rate, a delay, losses, and connections that
break in mid-transfer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

PIECE = 16 << 10
IN_FLIGHT = 64
"""Pieces that may be in flight at once."""
RESEND_S = 0.3
"""The time in which TCP detects and resends a lost packet."""


@dataclass(slots=True)
class Link:
    """A link; all its traffic from the server to clients shares one rate. Fields may be set while
    it is in use."""

    target: int
    """The server's port."""
    target_host: str = "127.0.0.1"
    bytes_per_s: float = float("inf")
    delay_s: float = 0.0
    """Delay of each direction."""
    loss: float = 0.0
    """Share of the pieces that arrive late, together with all pieces after them: TCP loses
    nothing."""
    break_after: int = 0
    """A connection breaks after about this many bytes; 0: never."""
    port: int = 0
    carried: int = 0
    broken: int = 0
    _free_at: float = 0.0
    _random: Random = field(default_factory=lambda: Random(0))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(self.target_host, self.target)
            up = asyncio.create_task(self._pass_on(reader, far_writer, shared=False))
            try:
                await self._pass_on(far_reader, writer, shared=True)
            finally:
                up.cancel()
                far_writer.close()
        writer.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, shared: bool
    ) -> None:
        """`shared`: this direction has the rate, is counted, and breaks."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT)
        arriving = asyncio.create_task(self._arrive(under_way, writer, shared=shared))
        loop = asyncio.get_running_loop()
        try:
            with contextlib.suppress(OSError):
                data = b"."
                while data:
                    data = await reader.read(PIECE)
                    due = loop.time() + self.delay_s
                    due += RESEND_S * (self._random.random() < self.loss)
                    if shared:
                        sent = max(loop.time(), self._free_at) + len(data) / self.bytes_per_s
                        due += sent - loop.time()
                        self._free_at = sent
                    await under_way.put((due, data))
            await arriving
        finally:
            arriving.cancel()

    async def _arrive(
        self,
        under_way: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        *,
        shared: bool,
    ) -> None:
        """Deliver pieces; an empty piece is the end."""
        loop = asyncio.get_running_loop()
        left = self._random.uniform(0.5, 1.5) * self.break_after
        with contextlib.suppress(OSError):
            while True:
                due, data = await under_way.get()
                await asyncio.sleep(due - loop.time())
                if not data:
                    writer.write_eof()
                    return
                if shared:
                    left -= len(data)
                    if self.break_after and left < 0:
                        self.broken += 1
                        writer.transport.abort()  # type: ignore[attr-defined]
                        return
                    self.carried += len(data)
                writer.write(data)
                await writer.drain()


@contextlib.contextmanager
def linked(target: int, target_host: str = "127.0.0.1", host: str = "127.0.0.1") -> Iterator[Link]:
    """`host`: the address for its clients."""
    link, loop = Link(target, target_host), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(link.serve, host, 0))
    link.port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield link
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
