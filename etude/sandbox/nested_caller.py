"""The host's end of a machine that has a sandbox in namespaces in it (`nested`)."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, Protocol

from etude.core.sandbox import SandboxSpec
from etude.sandbox.called import CalledProcess, CalledSandbox
from etude.sandbox.limits import COPY_BYTES, files_in
from etude.sandbox.lines import Lines
from etude.sandbox.machines import Machines
from etude.sandbox.spec import to_message


class NestedPool(Protocol):
    """What such a machine needs of its pool."""

    reply_timeout_s: float
    machines: Machines[NestedCaller, None]

    def machine(self, spec: SandboxSpec) -> NestedCaller:
        """One that is not started yet."""

    def inner(self, spec: SandboxSpec) -> SandboxSpec:
        """What is left for the sandbox in there, of what the machine itself does not hold."""


class NestedCaller(ABC):
    """A `called.Caller`. A fork is another machine with a copy of the files."""

    def __init__(self, pool: NestedPool, spec: SandboxSpec) -> None:
        self._pool = pool
        self._spec = spec
        self._lines: Lines | None = None
        self._closed = False

    @abstractmethod
    async def connect(self) -> Lines:
        """Start the machine."""

    @abstractmethod
    async def end(self) -> None:
        """Leave nothing of it, however far it came."""

    async def start(self) -> None:
        self._lines = await self.connect()
        await self.call("hello")

    async def call(self, operation: str, working_s: float = 0.0, **told: Any) -> Any:
        assert self._lines is not None
        return await self._lines.call(operation, told, working_s + self._pool.reply_timeout_s)

    async def tell_spec(self, operation: str) -> Any:
        """Ask for what takes the spec, and for services the time that they may take."""
        size = self._spec.limits.disk_bytes or COPY_BYTES
        inner = self._pool.inner(self._spec)
        told = await to_message(inner, max_bytes=size, max_entries=files_in(size))
        ready_s = sum(service.ready_s for service in self._spec.services)
        return await self.call(operation, ready_s, **told)

    async def fork(self) -> CalledSandbox:
        machine = await _started(self._pool, self._spec)
        try:
            source = CalledProcess(self, await self.call("send"))
            into = CalledProcess(machine, await machine.tell_spec("receive"))
            while data := await source.read():
                await into.write(data)
            await source.wait()  # it says why it broke off
            await into.write(b"")
            await into.wait()
        except BaseException:
            await machine.close()
            raise
        return CalledSandbox(machine)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._pool.machines.forget(self)
        if self._lines is not None:
            self._lines.close()  # the end of its input is its end
        await self.end()


@contextlib.asynccontextmanager
async def open_nested(pool: NestedPool, spec: SandboxSpec) -> AsyncIterator[CalledSandbox]:
    """A sandbox in a machine of its own; both are closed on every way out."""
    machine = await _started(pool, spec)
    sandbox = CalledSandbox(machine)
    try:
        await machine.tell_spec("open")
        yield sandbox
    finally:
        await sandbox.close()


async def _started(pool: NestedPool, spec: SandboxSpec) -> NestedCaller:
    async with pool.machines.start(lambda: pool.machine(spec)) as machine:
        await machine.start()
    return machine
