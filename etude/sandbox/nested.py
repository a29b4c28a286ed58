"""The first process of a machine that was not built for it, such as a container: it opens a sandbox
in namespaces for the host, and serves it over its standard input and output (`machine` has the
lines, `nested_caller` the host's end).

The machine is one wall, and inside it are all the walls of `namespaces`. Files get out of it, and
into another machine, as streams that are read and written like a process. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from etude.core.sandbox import Sandbox
from etude.sandbox.image import read_times, read_tree
from etude.sandbox.image_view import ImageView
from etude.sandbox.machine import Machine
from etude.sandbox.mounts import Mount
from etude.sandbox.namespace_sandbox import NamespaceSandbox
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.places import LINKS, WORK
from etude.sandbox.served import ServedSandbox, lasting
from etude.sandbox.spec import from_message

PATIENCE_S = 600.0
"""The host decides when an answer is late: in here, everything may take many times as long."""
_TEMPORARY = "/tmp"
_CHUNK = 1 << 20
_OWN = {
    *("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "dev", "proc", "sys", "run"),
    *("tmp", "mnt", "boot"),
    *(path.strip("/") for path in (WORK, *LINKS)),
}
"""Names in the root that are always shown, or that a sandbox has for itself."""
_MEMORY_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
"""Files of both versions of cgroups, as a container sees its own."""


class NestedMachine(Machine):
    """The server of one sandbox of a pool."""

    def __init__(self, pool: NamespaceSandboxPool) -> None:
        super().__init__()
        self._pool = pool
        self._opened: AbstractAsyncContextManager[NamespaceSandbox] | None = None

    async def open(self, told: dict[str, Any]) -> Sandbox:
        self._opened = self._pool.open(from_message(told))
        return await self._opened.__aenter__()

    async def _do(self, operation: str, told: dict[str, Any]) -> Any:
        if operation == "send":
            return self._send()
        if operation == "receive":
            return await self._receive(told)
        return await super()._do(operation, told)

    def _send(self) -> int:
        """The number of a process whose output is the working copy."""
        assert self._served is not None and isinstance(self._served.sandbox, NamespaceSandbox)
        ours, theirs = socket.socketpair()
        return self._served.adopt(_Copying(ours, self._served.sandbox.send(theirs)))

    async def _receive(self, told: dict[str, Any]) -> int:
        """The number of a process that makes a sandbox of its input, and ends when the sandbox is
        ready."""
        sandbox = await self._pool.open_empty(from_message(told))
        self._served = ServedSandbox(sandbox)
        ours, theirs = socket.socketpair()
        return self._served.adopt(_Copying(ours, _fill(sandbox, theirs)))


async def _fill(sandbox: NamespaceSandbox, source: socket.socket) -> None:
    await sandbox.receive(source)
    await sandbox.serve()


class _Copying:
    """A `core.sandbox.Process` that copies the files of a sandbox."""

    def __init__(self, ours: socket.socket, work: Coroutine[Any, Any, None]) -> None:
        self._ours = ours
        self._ours.setblocking(False)
        self._work = lasting(work)

    async def read(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._ours, _CHUNK)

    async def write(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # `wait` raises the reason
            if data:
                await asyncio.get_running_loop().sock_sendall(self._ours, data)
            else:
                self._ours.shutdown(socket.SHUT_WR)

    async def wait(self) -> int:
        await asyncio.shield(self._work)
        self._ours.close()
        return 0

    async def kill(self) -> None:
        self._work.cancel()
        self._ours.close()


def _image_here() -> ImageView:
    """The file system that this machine was started with, as an image: its programs and packages,
    all directories that a sandbox does not have for itself, and its working directory as the
    working copy.

    It is not a layer, since a root with mounts on it cannot be one.
    """
    work = Path.cwd() if Path.cwd() != Path("/") else None
    others = [each for each in sorted(Path("/").iterdir()) if each.name not in _OWN]
    shown = [str(each) for each in others if each.is_dir() and not each.is_symlink()]
    return ImageView(
        layers=(),
        system=False,
        # directories that commands, run by an ordinary user, may read
        mounts=tuple(Mount(each, each) for each in shown if os.stat(each).st_mode & 0o005 == 0o005),
        hostname="localhost",
        user="",
        work=read_tree(work) if work else {},
        times=read_times(work) if work else {},
        packages=True,
    )


def _memory_bytes() -> int | None:
    """Memory that all processes of this machine may hold together; None: no known limit."""
    for path in _MEMORY_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            return int(Path(path).read_text())
    return None


async def _run(told: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ["TMPDIR"] = _TEMPORARY
    image = _image_here() if told["image"] else None
    os.chdir("/")
    pool = NamespaceSandboxPool(PATIENCE_S, [Mount(*each) for each in told["mounts"]], image)
    if told["probe"]:
        print(json.dumps({"walls": str(pool.walls), "memory_bytes": _memory_bytes()}))
        await pool.close()
    else:
        await NestedMachine(pool).serve()


def main(told: str) -> None:
    """Serve the machine. `told`, as JSON: `mounts`, pairs of the path of a host's directory in this
    machine and its path in sandboxes; `image`, true if sandboxes show the whole system of this
    machine; `probe`, true to only report what this machine can provide."""
    asyncio.run(_run(json.loads(told)))
    sys.stdout.flush()
    os._exit(0)
