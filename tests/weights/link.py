"""A bad link in front of a server: a TCP proxy with a rate, a delay, and connections that break in
mid-transfer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

PIECE = 16 << 10


@dataclass(slots=True)
class Link:
    """What goes through it, from the server to its clients, shares one rate. Set fields while it is
    in use."""

    target: int
    """The server's port."""
    bytes_per_s: float = float("inf")
    delay_s: float = 0.0
    break_after: int = 0
    """A connection breaks after about so many bytes; 0: never."""
    port: int = 0
    carried: int = 0
    broken: int = 0
    _free_at: float = 0.0
    _random: Random = field(default_factory=lambda: Random(0))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
            up = asyncio.create_task(self._pass_on(reader, far_writer))
            try:
                await self._slowly(far_reader, writer)
            finally:
                up.cancel()
                far_writer.close()
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(PIECE):
                await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    async def _slowly(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        left = self._random.uniform(0.5, 1.5) * self.break_after
        while data := await reader.read(PIECE):
            self._free_at = max(loop.time(), self._free_at) + len(data) / self.bytes_per_s
            await asyncio.sleep(self._free_at - loop.time())
            left -= len(data)
            if self.break_after and left < 0:
                self.broken += 1
                writer.transport.abort()  # type: ignore[attr-defined]
                return
            self.carried += len(data)
            writer.write(data)
            await writer.drain()


@contextlib.contextmanager
def linked(target: int) -> Iterator[Link]:
    link, loop = Link(target), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(link.serve, "127.0.0.1", 0))
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
