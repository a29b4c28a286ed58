"""The host's end of a machine that contains a sandbox in namespaces (`nested`)."""

from __future__ import annotations

import contextlib
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Protocol

from etude.core.sandbox import Limits, SandboxSpec
from etude.sandbox.called import CalledProcess, CalledSandbox
from etude.sandbox.limits import COPY_BYTES, MIB, PROCESS_BYTES, files_in, memory_for
from etude.sandbox.lines import Lines
from etude.sandbox.machines import Machines
from etude.sandbox.spec import to_message

_START = (
    "import sys; sys.path.append(sys.argv[1]); from etude.sandbox.nested import main; "
    "main(sys.argv[2])"
)
_RECEIVE = """
import os, sys
left = int(sys.argv[3])
with open(sys.argv[1], "wb") as file:
    while left and (data := os.read(0, left)):
        left -= file.write(data)
"""
_OWN_BYTES = 128 * MIB
"""Memory for the first processes, in addition to the sandbox's own."""


def python_arguments(program: str, *, sent_bytes: int = 0, **told: Any) -> list[str]:
    """Arguments of a Python that becomes the first process of a machine. `program`: path of this
    package in the machine; `sent_bytes`: length of the package if it comes first in the input and
    is to be written there; `told`: as `nested.main` takes it."""
    start = [_RECEIVE + _START] if sent_bytes else [_START]
    size = [str(sent_bytes)] if sent_bytes else []
    return ["-B", "-s", "-S", "-P", "-X", "utf8", "-c", *start, program, json.dumps(told), *size]


def machine_name() -> str:
    """A name for a machine that no other user of the same service has."""
    return f"etude-{secrets.token_hex(8)}"


def machine_bytes(limits: Limits) -> int:
    """The memory of a machine for a sandbox with these limits."""
    asked = limits.memory_bytes or memory_for(limits.disk_bytes or COPY_BYTES)
    return asked + _OWN_BYTES


def limits_within(limits: Limits) -> Limits:
    """The limits for a sandbox in a machine that itself limits processors and memory: a process in
    there may map more than that."""
    if limits.memory_bytes is not None:
        limits = replace(limits, memory_bytes=max(limits.memory_bytes, PROCESS_BYTES))
    return replace(limits, cpus=None)


class NestedPool(Protocol):
    """The pool of such a machine, as far as the machine needs it."""

    reply_timeout_s: float
    machines: Machines[NestedCaller, None]

    def machine(self, spec: SandboxSpec) -> NestedCaller:
        """A machine that is not started yet."""

    def inner(self, spec: SandboxSpec) -> SandboxSpec:
        """The part of a spec that is left to the sandbox in the machine."""


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
        """Remove everything of the machine, however far its start came."""

    async def start(self) -> None:
        self._lines = await self.connect()
        await self.call("hello")

    async def call(self, operation: str, working_s: float = 0.0, **told: Any) -> Any:
        assert self._lines is not None
        return await self._lines.call(operation, told, working_s + self._pool.reply_timeout_s)

    async def tell_spec(self, operation: str) -> Any:
        """Call an operation that takes the spec, with additional time for services to start."""
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
            await source.wait()  # raises the reason if it stopped early
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
            self._lines.close()  # the machine ends when its input does
        await self.end()


@contextlib.asynccontextmanager
async def open_nested(pool: NestedPool, spec: SandboxSpec) -> AsyncIterator[CalledSandbox]:
    """Open a sandbox in a machine of its own; both are closed in any case."""
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
