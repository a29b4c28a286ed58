"""The machines of a pool that starts one per sandbox: a limit on how many start at once, the open
ones to be closed with the pool, the templates they are restored from, and their files."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from etude.core.errors import RolloutFailure
from etude.sandbox.owners import is_abandoned, owner_mark

_STARTING = 4
"""Machines that start at the same time: each takes a processor of this host for a while."""


class _Closes(Protocol):
    async def close(self) -> None: ...


M = TypeVar("M", bound=_Closes)
T = TypeVar("T")


class Machines(Generic[M, T]):
    """M: the machines; T: the templates they are restored from, if any."""

    def __init__(self, kind: str, starting: int = _STARTING) -> None:
        """Remove the files that pools of this kind left whose process was killed. Their machines
        ended with them."""
        # distinct from the names of zygotes' directories, which zygotes sweep
        prefix = f"etude.{kind}-"
        for left in abandoned(prefix, Path(tempfile.gettempdir())):
            shutil.rmtree(left, ignore_errors=True)
        self.home = Path(tempfile.mkdtemp(prefix=prefix + owner_mark()))
        self._numbers = itertools.count(1)
        self._open: set[M] = set()
        self._starting = asyncio.Semaphore(starting)
        self._templates: dict[Hashable, asyncio.Task[T]] = {}
        self._closed = False

    def place(self, kind: str) -> Path:
        """A new path for a file or directory. No such name is a prefix of another."""
        return self.home / f"{kind}-{next(self._numbers):08d}"

    @contextlib.asynccontextmanager
    async def start(self, make: Callable[[], M]) -> AsyncIterator[M]:
        """A machine to start in the block; it is closed if that fails."""
        if self._closed:
            raise RolloutFailure("sandbox: the pool is closed")
        async with self._starting:
            machine = make()
            self._open.add(machine)
            try:
                yield machine
            except BaseException:
                await machine.close()
                raise

    def forget(self, machine: M) -> None:
        self._open.discard(machine)

    async def template(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The template that machines with this key are restored from. It is made once; a caller
        that is cancelled while waiting does not cancel it for the others."""
        if key not in self._templates:
            self._templates[key] = asyncio.create_task(make())
        return await asyncio.shield(self._templates[key])

    async def close(self) -> None:
        self._closed = True
        for task in self._templates.values():
            task.cancel()
        await asyncio.gather(*(machine.close() for machine in list(self._open)))
        await asyncio.gather(*self._templates.values(), return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self.home, ignore_errors=True)


def abandoned(prefix: str, place: Path) -> list[Path]:
    """The paths in `place` with this prefix whose owners are gone."""
    found = place.glob(f"{prefix}*")
    return [each for each in found if is_abandoned(each.name.removeprefix(prefix))]
