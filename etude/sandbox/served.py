"""A sandbox that is used by messages: the side that holds it.

A message is JSON with the name of an operation and its arguments; contents are in base64. `called`
has the other side. A host serves sandboxes this way over HTTP, and the first process of a machine
of its own (`machine`) over its standard streams. Standard library only.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import Process, Sandbox
from etude.sandbox.link import decoded, encoded

T = TypeVar("T")
TOLD = (FileNotFoundError, ValueError, EtudeError, RolloutFailure)
"""Errors that are passed on as an answer; any other one is a bug."""
LOOK_S = 20.0
"""Seconds after which a request about a process is answered with "nothing yet", which tells the
caller that this side is alive."""


def failure(error: BaseException) -> list[str]:
    """An error in the form that messages have for it."""
    kind = next(each for each in TOLD if isinstance(error, each))
    return [kind.__name__, str(error)]


class ServedSandbox:
    """One sandbox and its processes. `fork` and `close` are left to the transport, since they
    create and remove sandboxes."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._processes: dict[int, _ServedProcess] = {}
        self._numbers = itertools.count(1)
        self._operations: dict[str, Callable[..., Awaitable[Any]]] = {
            "run": self._run,
            "start": self._start,
            "process_read": self._process_read,
            "process_write": self._process_write,
            "process_wait": self._process_wait,
            "process_kill": self._process_kill,
            "read": self._read,
            "write": self._write,
            "diff": self._diff,
            "patch": self._patch,
            "apply": self._apply,
        }

    async def answer(self, operation: str, told: dict[str, Any]) -> Any:
        """Raises one of TOLD; ValueError for an unknown operation."""
        if operation not in self._operations:
            raise ValueError(f"there is no operation {operation!r}")
        return await self._operations[operation](**told)

    async def _run(self, stdin: str, **told: Any) -> list[Any]:
        ran = await self.sandbox.run(stdin=base64.b64decode(stdin), **told)
        return [ran.exit_code, ran.output, base64.b64encode(ran.report).decode()]

    async def _start(self, **told: Any) -> int:
        return self.adopt(await self.sandbox.start(**told))

    def adopt(self, process: Process) -> int:
        """Register a process. Return the number that later requests name it by."""
        number = next(self._numbers)
        self._processes[number] = _ServedProcess(process)
        return number

    async def _process_read(self, number: int) -> str | None:
        data = await self._process(number).read()
        return None if data is None else base64.b64encode(data).decode()

    async def _process_write(self, number: int, data: str) -> None:
        await self._process(number).process.write(base64.b64decode(data))

    async def _process_wait(self, number: int) -> int | None:
        return await self._process(number).wait()

    async def _process_kill(self, number: int) -> None:
        await self._process(number).process.kill()

    def _process(self, number: int) -> _ServedProcess:
        if number not in self._processes:
            raise ValueError(f"there is no process {number} in this sandbox")
        return self._processes[number]

    async def _read(self, path: str) -> str:
        return base64.b64encode(await self.sandbox.read_bytes(path)).decode()

    async def _write(self, path: str, content: str) -> None:
        await self.sandbox.write(path, base64.b64decode(content))

    async def _diff(self) -> str:
        return await self.sandbox.diff()

    async def _patch(self, only: list[str], without: list[str]) -> dict[str, Any]:
        return encoded(await self.sandbox.patch(only=only, without=without))

    async def _apply(self, patch: dict[str, Any]) -> None:
        changed = decoded(patch)
        await self.sandbox.apply(
            {path: each and (each[0], each[1] or b"") for path, each in changed.items()}
        )


class _ServedProcess:
    """A process with its pending requests, which outlive their caller: output that arrives too late
    for one caller goes to the next."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._reading: asyncio.Task[bytes] | None = None
        self._waiting: asyncio.Task[int] | None = None

    async def read(self) -> bytes | None:
        """Read output; None if there is none yet."""
        self._reading = self._reading or lasting(self.process.read())
        done, _ = await asyncio.wait({self._reading}, timeout=LOOK_S)
        if not done:
            return None
        reading, self._reading = self._reading, None
        return reading.result()

    async def wait(self) -> int | None:
        self._waiting = self._waiting or lasting(self.process.wait())
        done, _ = await asyncio.wait({self._waiting}, timeout=LOOK_S)
        return self._waiting.result() if done else None


def lasting(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that outlives its caller. If nobody awaits it again, its failure is not logged."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task
