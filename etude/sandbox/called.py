"""A sandbox that is used by messages: the caller's side (`served` has the other)."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from etude.core.errors import RolloutFailure
from etude.core.sandbox import CommandResult, Patch, Sandbox
from etude.sandbox.files import inside, inside_directory, to_bytes
from etude.sandbox.link import decoded, encoded
from etude.sandbox.served import TOLD, lasting
from etude.sandbox.spec import check_env

T = TypeVar("T")
_ERRORS = {each.__name__: each for each in TOLD}


def failed(error: Sequence[str]) -> Exception:
    """The exception that the other side raised, rebuilt from its message."""
    kind, message = error
    return _ERRORS[kind](message)


class Caller(Protocol):
    """Connection to one sandbox."""

    async def call(self, operation: str, working_s: float = 0.0, **told: Any) -> Any:
        """Return the answer, or raise the error that it contains. RolloutFailure if no answer comes
        within an ample time plus the `working_s` that the operation itself may take."""

    async def fork(self) -> Sandbox: ...

    async def close(self) -> None: ...


class CalledSandbox:
    """A `core.sandbox.Sandbox`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._processes: set[CalledProcess] = set()
        self._closed = False

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: str | bytes = "",
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        report: bool = False,
    ) -> CommandResult:
        check_env(env or {})
        code, output, reported = await self._call(
            "run",
            timeout_s,
            argv=list(argv),
            timeout_s=timeout_s,
            stdin=_encode(stdin),
            cwd=inside_directory(cwd),
            env=dict(env or {}),
            report=report,
        )
        return CommandResult(code, output, base64.b64decode(reported))

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        pty: bool = False,
    ) -> CalledProcess:
        check_env(env or {})
        number = await self._call(
            "start", argv=list(argv), cwd=inside_directory(cwd), env=dict(env or {}), pty=pty
        )
        process = CalledProcess(self._caller, number)
        self._processes.add(process)
        return process

    async def read(self, path: str) -> str:
        return (await self.read_bytes(path)).decode()

    async def read_bytes(self, path: str) -> bytes:
        return base64.b64decode(await self._call("read", path=inside(path)))

    async def write(self, path: str, content: str | bytes) -> None:
        await self._call("write", path=inside(path), content=_encode(content))

    async def diff(self) -> str:
        return str(await self._call("diff"))

    async def patch(
        self, *, only: Collection[str] = ("*",), without: Collection[str] = ()
    ) -> Patch:
        self._close_processes()
        found = decoded(await self._call("patch", only=[*only], without=[*without]))
        return {path: each and (each[0], each[1] or b"") for path, each in found.items()}

    async def apply(self, patch: Patch) -> None:
        plain = {inside(path): entry for path, entry in patch.items()}
        await self._call("apply", patch=encoded(plain))

    async def fork(self) -> Sandbox:
        self._check()
        return await self._caller.fork()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._close_processes()
            await self._caller.close()

    def _close_processes(self) -> None:
        for process in self._processes:
            process.close()

    async def _call(self, operation: str, working_s: float = 0.0, **told: Any) -> Any:
        self._check()
        return await self._caller.call(operation, working_s, **told)

    def _check(self) -> None:
        if self._closed:
            raise RolloutFailure("sandbox: it is closed")


class CalledProcess:
    """A `core.sandbox.Process`."""

    def __init__(self, caller: Caller, number: int) -> None:
        self._caller = caller
        self._number = number
        self._reading: asyncio.Task[bytes] | None = None
        self._turn = asyncio.Lock()
        self._ended = False  # the process has ended, and its output has been read
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def read(self) -> bytes:
        async with self._turn:
            if self._ended:
                return b""
            # a cancelled reader has consumed nothing: the next one waits for the same answer
            self._reading = self._reading or lasting(self._read())
            data = await self._unless_closed(self._reading)
            self._reading = None
            self._ended = not data
            return data

    async def _read(self) -> bytes:
        while (data := await self._call("read")) is None:
            pass
        return base64.b64decode(data)

    async def write(self, data: bytes) -> None:
        await self._unless_closed(self._call("write", data=_encode(data)))

    async def wait(self) -> int:
        while (code := await self._unless_closed(self._call("wait"))) is None:
            pass
        return int(code)

    async def kill(self) -> None:
        if not self._closed.done():
            await self._unless_closed(self._call("kill"))

    async def _call(self, operation: str, **told: Any) -> Any:
        return await self._caller.call(f"process_{operation}", number=self._number, **told)

    async def _unless_closed(self, work: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
        shared = isinstance(work, asyncio.Task)
        task = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self._closed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._closed.done():
                raise RolloutFailure("sandbox: it is closed")
            return task.result()
        finally:
            if not shared or self._closed.done():
                task.cancel()

    def close(self) -> None:
        """Stop using this process; it ends with its sandbox."""
        if not self._closed.done():
            self._closed.set_result(None)
        if self._reading is not None:
            self._reading.cancel()


def _encode(content: str | bytes) -> str:
    return base64.b64encode(to_bytes(content)).decode()
