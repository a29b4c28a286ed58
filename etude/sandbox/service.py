"""Machines of a remote service, each for one sandbox in namespaces (`nested`): the part that all
such services have in common, whatever their API.

A machine is requested, waits for room, and lives as long as its lease is renewed, so nothing of a
killed owner remains. One process of ours is started in it, and the service forwards its input and
output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp

from etude.core.errors import RolloutFailure
from etude.core.sandbox import SandboxSpec, Tier
from etude.sandbox.bundle import copy_program
from etude.sandbox.called import CalledSandbox
from etude.sandbox.host import LEASE_S
from etude.sandbox.lines import Lines
from etude.sandbox.machines import Machines
from etude.sandbox.nested_caller import NestedCaller, open_nested

PROGRAM = "/run/etude/program.zip"
"""Path of this package in a machine, under /run, which commands do not see."""
FULL_S = 600.0
"""Seconds to wait for a machine at a service that has no room."""
_RENEW_S = LEASE_S / 6
_ROOM_S = 1.0
_IDLE_S = 1.0
"""Seconds for which an idle connection is kept. They must be fewer than the service's (most: 5 s or
more): a request on a connection that is just being closed is lost, and must not be repeated."""
_INPUT_BYTES = 1 << 18
"""Largest size of one message to the process."""
_WORDS_CHARS = 500
_STARTING = 16
"""Machines that are created at the same time: the service creates them, not this machine."""

Send = Callable[[bytes], Awaitable[None]]


class NoRoom(RolloutFailure):
    """The service has no room for another machine now."""


class ServicePool(ABC):
    """A sandbox pool (`core.sandbox.SandboxPool`) on machines of a service, one per sandbox."""

    tier: Tier = "namespaces"
    """The isolation within a machine; that of the machine itself is up to the service."""

    def __init__(self, kind: str, reply_timeout_s: float) -> None:
        self.reply_timeout_s = reply_timeout_s
        self.machines: Machines[NestedCaller, None] = Machines(kind, _STARTING)
        source = self.machines.home / "program"
        copy_program(source)
        self.program = Path(shutil.make_archive(str(source), "zip", source)).read_bytes()
        self._session: aiohttp.ClientSession | None = None

    @abstractmethod
    def check(self, spec: SandboxSpec) -> None: ...

    @abstractmethod
    def machine(self, spec: SandboxSpec) -> NestedCaller: ...

    @abstractmethod
    def inner(self, spec: SandboxSpec) -> SandboxSpec: ...

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[CalledSandbox]:
        self.check(spec)
        return open_nested(self, spec)

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    async def ask(self, method: str, url: str, headers: Mapping[str, str], **more: Any) -> Any:
        """Send a request and return the JSON of the answer. RolloutFailure, with the service's
        message, if it refuses."""
        timeout = aiohttp.ClientTimeout(total=self.reply_timeout_s)
        try:
            async with self.session.request(
                method, url, headers=headers, timeout=timeout, **more
            ) as response:
                content = await response.text()
        except (TimeoutError, aiohttp.ClientError) as e:
            raise RolloutFailure(f"sandbox: {url} does not answer: {e}") from e
        said = content[:_WORDS_CHARS]
        if response.status == 429 or (response.status == 403 and "exceeded quota" in said):
            raise NoRoom(f"sandbox: {url} has no room: {said}")
        if response.status >= 400:
            raise RolloutFailure(f"sandbox: {url} returned {response.status}: {said}")
        return json.loads(content) if content else None

    def owing(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        await self.machines.close()
        if self._session is not None:
            await self._session.close()


class ServiceMachine(NestedCaller):
    """One machine of a service, and the process in it."""

    def __init__(self, pool: ServicePool, spec: SandboxSpec) -> None:
        super().__init__(pool, spec)
        self._tasks: list[asyncio.Task[None]] = []
        self._answers = asyncio.StreamReader(limit=1 << 30)
        self._words = ""

    @abstractmethod
    async def create(self) -> None:
        """Request the machine. NoRoom if the request is to be repeated."""

    @abstractmethod
    async def renew(self) -> None:
        """Extend the lease to LEASE_S from now."""

    @abstractmethod
    async def prepare(self) -> None:
        """Return when the process can be started."""

    @abstractmethod
    async def converse(self, started: asyncio.Future[Send]) -> None:
        """Start the process, set `started` to a function that sends it input, and `hear` its output
        until it has ended."""

    @abstractmethod
    async def delete(self) -> None:
        """End the machine at once, as far as it was created."""

    def hear(self, output: bytes = b"", errors: bytes = b"") -> None:
        """Take output of the process. Only the end of its errors is kept."""
        self._answers.feed_data(output)
        self._words = (self._words + errors.decode(errors="replace"))[-_WORDS_CHARS:]

    async def connect(self) -> Lines:
        await self._create_when_there_is_room()
        self._tasks.append(asyncio.create_task(self._renew()))
        await self.prepare()
        started: asyncio.Future[Send] = asyncio.get_running_loop().create_future()
        self._tasks.append(asyncio.create_task(self._converse(started)))
        try:
            async with asyncio.timeout(self._pool.reply_timeout_s):
                send = await started
        except TimeoutError as e:
            raise RolloutFailure("sandbox: its first process did not start in time") from e
        return Lines(self._answers, _Messages(send))

    async def start(self) -> None:
        try:
            await super().start()
        except RolloutFailure as e:
            raise RolloutFailure(f"{e}; it said: {self._words or 'nothing'}") from e

    async def _create_when_there_is_room(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FULL_S
        while True:
            try:
                return await self.create()
            except NoRoom:
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(_ROOM_S)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            with contextlib.suppress(RolloutFailure):  # retried while the lease lasts
                await self.renew()

    async def _converse(self, started: asyncio.Future[Send]) -> None:
        try:
            await self.converse(started)
        except (RolloutFailure, aiohttp.ClientError, asyncio.IncompleteReadError, OSError) as e:
            self.hear(errors=str(e).encode())
        finally:
            if not started.done():
                started.set_exception(
                    RolloutFailure("sandbox: its first process was never started")
                )
            self._answers.feed_eof()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(RolloutFailure):  # its lease ends it then
            await self.delete()


class _Messages:
    """`lines.Requests` that sends its data as messages, one after the other. A caller that gives up
    waiting does not cut a message off, nor lose the data of others."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting = bytearray()
        self._sending: asyncio.Task[None] | None = None

    def write(self, data: bytes) -> None:
        self._waiting += data
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())
            # marks a failure as retrieved, since perhaps nobody waits for it
            self._sending.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _send_all(self) -> None:
        while self._waiting:
            data = bytes(self._waiting[:_INPUT_BYTES])
            del self._waiting[:_INPUT_BYTES]
            await self._send(data)

    async def drain(self) -> None:
        if (sending := self._sending) is not None:
            await asyncio.wait({sending})
            if not sending.cancelled():
                sending.result()

    def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
