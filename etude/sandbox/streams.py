"""Output and input of a background process: the host's side.

There is no buffer here: output that nobody reads stays in the pipe or the terminal, and when that
is full, the process blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

_CHUNK = 1 << 16
_REST_BYTES = 1 << 20
"""The largest pipe that an ordinary user may make."""
_END_OF_INPUT = b"\x04"  # as typed at a terminal


class Streams:
    """The descriptors of one process, which this object owns from now on."""

    def __init__(self, output: int, source: int, *, terminal: bool) -> None:
        self._output = output
        self._source = source
        self._terminal = terminal
        self._open = {output, source}
        self._rest = b""  # output that was unread when the process ended
        self._reading = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._waiting: set[asyncio.Future[None]] = set()
        for descriptor in self._open:
            os.set_blocking(descriptor, False)

    def take(self) -> bytes | None:
        """The output that came since the last call; empty at its end, None if there is none yet."""
        if self._output not in self._open:
            rest, self._rest = self._rest, b""
            return rest
        try:
            return os.read(self._output, _CHUNK)
        except BlockingIOError:
            return None
        except OSError:  # a terminal that no process holds any more
            return b""

    async def readable(self) -> None:
        """Wait for output. It is not consumed, so a cancelled reader loses nothing."""
        async with self._reading:
            if self._output in self._open:
                loop = asyncio.get_running_loop()
                await self._ready(self._output, loop.add_reader, loop.remove_reader)

    async def write(self, data: bytes) -> None:
        """Write input; data that no process will read any more is dropped."""
        async with self._writing:
            if not data and not self._terminal:
                self._shut(self._source)
            left = memoryview(data or _END_OF_INPUT)
            while left and self._source in self._open:
                try:
                    left = left[os.write(self._source, left) :]
                except BlockingIOError:
                    loop = asyncio.get_running_loop()
                    await self._ready(self._source, loop.add_writer, loop.remove_writer)
                except OSError:
                    return

    async def _ready(
        self,
        descriptor: int,
        add: Callable[..., None],
        remove: Callable[[int], bool],
    ) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        add(descriptor, _wake, future)
        try:
            await future
        finally:
            self._waiting.discard(future)
            if descriptor in self._open:  # otherwise its number may be reused by now
                remove(descriptor)

    def finish(self) -> None:
        """Close the descriptors of a process that has ended, and keep its unread output."""
        with contextlib.suppress(OSError):
            while self._output in self._open and len(self._rest) <= _REST_BYTES:
                if not (data := os.read(self._output, _CHUNK)):
                    break
                self._rest += data
        self.close()

    def close(self) -> None:
        for descriptor in (self._output, self._source):
            self._shut(descriptor)
        for future in self._waiting:
            _wake(future)

    def _shut(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.discard(descriptor)
            loop = asyncio.get_running_loop()
            loop.remove_reader(descriptor)
            loop.remove_writer(descriptor)
            os.close(descriptor)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
