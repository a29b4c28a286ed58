"""A background process of a sandbox in namespaces: the host's side.

Its output and input are pipes, or a terminal, with the other ends at the host. Its keeper
(`keeper`) reports over a socket of its own whether it lives and how it ended, so it can be reached
at any time, whatever else the sandbox is doing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from etude.core.errors import RolloutFailure
from etude.sandbox.streams import Streams

T = TypeVar("T")


class Keeper(asyncio.Protocol):
    """Connection to a keeper."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._buffer = b""
        self._asked: float | None = None
        self._heard = asyncio.Event()
        self.code: asyncio.Future[int] = self._loop.create_future()
        """The exit status of the process, or the reason why it will never be known."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._asked = None
            self._heard.set()
            if line.startswith(b"!"):
                self._end(RolloutFailure(f"sandbox: {line[1:].decode(errors='replace')}"))
            elif line != b"?":
                self._end(int(line))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(RolloutFailure("sandbox: it ended while one of its processes was running"))

    def _end(self, outcome: int | RolloutFailure) -> None:
        if self.code.done():
            return
        if isinstance(outcome, int):
            self.code.set_result(outcome)
        else:
            self.code.set_exception(outcome)
            self.code.exception()  # marks it as retrieved, since perhaps nobody waits for it
        self._asked = None
        self._heard.set()
        self._ended()
        self._transport.close()

    def ask(self) -> None:
        """Ask for a sign of life, unless the keeper still owes one."""
        if self._asked is None and not self.code.done():
            self._heard.clear()
            self._asked = self._loop.time()
            self._transport.write(b"?")

    def owed_s(self) -> float:
        return 0.0 if self._asked is None else self._loop.time() - self._asked

    async def sign(self) -> None:
        """Wait for a sign of life. Raises if there will be none."""
        self.ask()
        await self._heard.wait()
        if self.code.done():
            self.code.result()

    def kill(self) -> None:
        if not self.code.done():
            self._transport.write(b"k")

    def close(self) -> None:
        self._end(RolloutFailure("sandbox: it is closed"))
        self._transport.abort()


class KeptProcess:
    """A `core.sandbox.Process`. Calls that wait for it fail if its keeper is dead or silent."""

    def __init__(
        self,
        keeper: Keeper,
        streams: Streams,
        reply_timeout_s: float,
        late: Callable[[float], None],
    ) -> None:
        """`late`: called with the seconds that the keeper owed a sign of life, if they were too
        many."""
        self.keeper = keeper
        self._streams = streams
        self._reply_timeout_s = reply_timeout_s
        self._late = late

    async def read(self) -> bytes:
        while (data := self._streams.take()) is None:
            await self._while_kept(self._streams.readable())
        if not data:  # the end of the process, unless the whole sandbox ended
            await self._while_kept(self.keeper.sign())
        return data

    async def write(self, data: bytes) -> None:
        if self.keeper.code.done():
            self.keeper.code.result()
        await self._while_kept(self._streams.write(data))

    async def wait(self) -> int:
        return await self._while_kept(_result(self.keeper.code))

    async def kill(self) -> None:
        self.keeper.kill()
        try:
            await self.wait()
        except RolloutFailure:
            if not self.keeper.code.done():
                raise  # a silent keeper; if it is dead, so is the process

    async def _while_kept(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            while True:
                await asyncio.wait({task}, timeout=self._reply_timeout_s / 4)
                if task.done():
                    return task.result()
                if (owed_s := self.keeper.owed_s()) >= self._reply_timeout_s:
                    self._late(owed_s)
                    raise RolloutFailure(f"sandbox: no sign of life in {owed_s:.0f} s")
                self.keeper.ask()
        finally:
            task.cancel()


async def _result(code: asyncio.Future[int]) -> int:
    return await asyncio.shield(code)
