"""Sandboxes in Linux namespaces: the host's side.

`NamespaceSandboxPool` starts one `zygote` process; every sandbox is a fork of it and answers over a
socket that only this process holds (`link`; see `guest` for the lines that go over it). All of them
live in one event loop, without threads. Needs no daemon, no package and no privilege: an ordinary
user's kernel permits it, unless the system has turned it off.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import (
    CommandResult,
    Limits,
    Patch,
    Process,
    SandboxSpec,
    Tier,
    close_on_failure,
)
from etude.sandbox.diff import unified_diff
from etude.sandbox.files import inside, inside_directory, to_bytes
from etude.sandbox.kept import Keeper, KeptProcess
from etude.sandbox.limits import (
    COPY_BYTES,
    LEAST_MEMORY_BYTES,
    MAX_PROCESSES,
    PROCESS_BYTES,
    files_in,
    memory_for,
)
from etude.sandbox.link import REPLY_TIMEOUT_S, Link, decoded, encoded
from etude.sandbox.services import start_services
from etude.sandbox.spec import check_env, check_spec, opening_tree
from etude.sandbox.streams import Streams
from etude.sandbox.tree import FILE, Entry, Tree, known
from etude.sandbox.walls import Walls

_ZYGOTES = 6
"""So many in a row may be silent when a sandbox is wanted."""
_END_S = 2.0
"""For a zygote to end by itself. The launcher of a run gives its controller a little more."""
_USER = "user"
"""What commands are called in a sandbox."""
_OPENING = 32
"""Sandboxes in the making at once. More would only wait in the zygote's queue."""
_BOOT = (
    "import socket, sys; sys.path.append(sys.argv[1]); from etude.sandbox.zygote import main; "
    "sys.path.pop(); "
    "main(socket.socket(fileno=int(sys.argv[2])), sys.argv[3])"
)


class NamespaceSandboxPool:
    """A `core.sandbox.SandboxPool`."""

    def __init__(self, reply_timeout_s: float = REPLY_TIMEOUT_S) -> None:
        """Raises EtudeError with the call that was refused, where the kernel does not let us.
        `reply_timeout_s`: a zygote that does not answer for so long is replaced, and a sandbox that
        does not has failed."""
        self.reply_timeout_s = reply_timeout_s
        self._sandboxes: set[NamespaceSandbox] = set()
        self._numbers = itertools.count(1)
        self._replaced: list[subprocess.Popen[bytes]] = []
        self._owed_s = 0.0  # by a zygote that was replaced for its silence, until that is told
        self._opening = asyncio.Semaphore(_OPENING)
        self._closed = False
        self._launch()

    def _launch(self) -> None:
        self._control, theirs = socket.socketpair()
        # when the zygote was asked for a sign of life that it still owes
        self._asked: float | None = None
        # The zygote mounts its root over this directory in a mount namespace of its own, and lets
        # go of it.
        with theirs, tempfile.TemporaryDirectory(prefix="etude-") as mountpoint:
            self._zygote = subprocess.Popen(
                _zygote_argv(theirs.fileno(), mountpoint),
                pass_fds=[theirs.fileno()],
                env={"PYTHONHASHSEED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            theirs.close()
            said = _first_line(self._control)
        if "walls" not in said:
            self._control.close()
            self._zygote.wait()
            raise EtudeError(
                f"this kernel refuses the namespaces that sandboxes are made of: "
                f"{said.get('error', 'the launcher died')}. Allow "
                'user namespaces (sysctl user.max_user_namespaces), or set isolation = "process" '
                "under [sandbox], which "
                "has no walls, for code that you trust"
            )
        self.walls = Walls(**said["walls"])

    @property
    def zygote_pid(self) -> int:
        return self._zygote.pid

    @property
    def tier(self) -> Tier:
        """Less than its name where the calls of what runs in there cannot be filtered."""
        return "namespaces" if self.walls.seccomp else "process"

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[NamespaceSandbox]:
        gives = {"repository"} | ({"user"} if spec.user == _USER else set())
        if not any(service.image for service in spec.services):
            gives.add("services")
        check_spec(spec, backend="namespaces", gives=gives, limits=self.walls.limits)
        if (memory := _memory_bytes(spec.limits)) < LEAST_MEMORY_BYTES:
            raise EtudeError(
                f"limits.memory_bytes is {memory}: a sandbox and its files take at least "
                f"{LEAST_MEMORY_BYTES}"
            )
        size = spec.limits.disk_bytes or COPY_BYTES
        before = await opening_tree(spec, max_bytes=size, max_entries=files_in(size))
        sandbox = await self.start(spec, before)
        try:
            await sandbox.fill(before)
            await sandbox.serve()
            yield sandbox
        finally:
            await sandbox.close()

    async def start(
        self, spec: SandboxSpec, before: Tree, like: NamespaceSandbox | None = None
    ) -> NamespaceSandbox:
        """A sandbox with an empty working copy, which the caller closes. `like`: one that it may
        share files with."""
        sandbox = await self._start(spec, before, like)
        if spec.limits != Limits():
            async with close_on_failure(sandbox):
                await sandbox.limit(spec.limits)
        return sandbox

    async def _start(
        self, spec: SandboxSpec, before: Tree, like: NamespaceSandbox | None
    ) -> NamespaceSandbox:
        async with self._opening:
            if self._closed:
                raise RolloutFailure("sandbox: the pool is closed")
            for _ in range(_ZYGOTES):
                # someone killed it; the sandboxes that it made live on
                if self._zygote.poll() is not None:
                    self._replace()
                zygote = self._zygote
                if (sandbox := await self._ask_for_one(spec, before, like)) is not None:
                    return sandbox
                if zygote is self._zygote and not self._closed:
                    self._replace()
                    self._owed_s = self.reply_timeout_s
        raise RolloutFailure(
            f"sandbox: none came from {_ZYGOTES} zygotes in {self.reply_timeout_s:g} s each"
        )

    async def _ask_for_one(
        self, spec: SandboxSpec, before: Tree, like: NamespaceSandbox | None
    ) -> NamespaceSandbox | None:
        """None if the zygote is silent."""
        number, limits = next(self._numbers), spec.limits
        wanted = {
            "name": str(number),
            "memory_bytes": _memory_bytes(limits),
            "cpus": limits.cpus,
            "like": str(like.number) if like else None,
        }
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            line = json.dumps(wanted).encode() + b"\n"
            socket.send_fds(self._control, [line], [theirs.fileno()])
        _, link = await asyncio.get_running_loop().create_unix_connection(
            lambda: Link(ours), sock=ours
        )
        sandbox = NamespaceSandbox(self, link, number, spec, before)
        self._sandboxes.add(sandbox)
        async with close_on_failure(sandbox):
            try:
                async with asyncio.timeout(self.reply_timeout_s):
                    await link.ready
            except TimeoutError:
                sandbox.abandon()
                return None
        return sandbox

    def _replace(self) -> None:
        """Another zygote. One that is only silent ends by itself when it wakes: it sees that its
        socket has ended."""
        self._control.close()
        self._replaced = [
            zygote for zygote in (*self._replaced, self._zygote) if zygote.poll() is None
        ]
        self._launch()

    def owing(self) -> dict[str, float]:
        """To be called again and again: the zygote is asked for a sign of life each time, and has
        given it by the next."""
        now = asyncio.get_running_loop().time()
        # It has said nothing; or it is dead, and will be replaced when one is needed.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            if self._asked is not None:
                self._control.recv(1)
                self._asked = None
            self._control.send(b"?\n")
            self._asked = now
        owed_s, self._owed_s = max(self._owed_s, now - (self._asked or now)), 0.0
        late = {f"sandbox {box.number}": now - box.due for box in self._sandboxes if box.due <= now}
        for box in self._sandboxes:
            late |= box.keepers_owing()
        return {"zygote": owed_s} | late

    def forget(self, sandbox: NamespaceSandbox) -> None:
        self._sandboxes.discard(sandbox)

    def ended(self, sandbox: NamespaceSandbox) -> None:
        """Its zygote may tidy up after it, or will when it ends."""
        with contextlib.suppress(OSError):
            self._control.send(f"-{sandbox.number}\n".encode())

    async def close(self) -> None:
        self._closed = True
        for sandbox in list(self._sandboxes):
            await sandbox.close()
        self._control.close()
        for zygote in (self._zygote, *self._replaced):
            try:
                zygote.wait(_END_S)  # it waits for nothing but the end of that socket
            except subprocess.TimeoutExpired:
                zygote.kill()
                zygote.wait()


def _zygote_argv(control: int, mountpoint: str) -> list[str]:
    # The Python below the virtual environment, without its packages: a sandbox sees the standard
    # library only.
    python = getattr(sys, "_base_executable", sys.executable)
    source = str(Path(__file__).resolve().parents[2])
    return [python, "-s", "-S", "-P", "-X", "utf8", "-c", _BOOT, source, str(control), mountpoint]


def _first_line(control: socket.socket) -> dict[str, Any]:
    """Empty if it died before it said a word."""
    control.settimeout(REPLY_TIMEOUT_S)
    with control.makefile("r") as lines:
        line = lines.readline()
    control.setblocking(False)
    return dict(json.loads(line or "{}"))


class NamespaceSandbox:
    """A `core.sandbox.Sandbox`, by the socket of its first process."""

    def __init__(
        self,
        pool: NamespaceSandboxPool,
        link: Link,
        number: int,
        spec: SandboxSpec,
        before: Tree,
    ) -> None:
        """`before`: what the working copy is compared with."""
        self._pool = pool
        self._link = link
        self.number = number
        self.zygote_pid = pool.zygote_pid
        self._spec = spec
        self._before = before
        self._processes: dict[int, Keeper] = {}
        self._services: list[asyncio.Task[None]] = []
        self._process_numbers = itertools.count(1)
        self.due = math.inf
        """When it should have answered what it is asked now."""
        self._late_s = 0.0
        self._turn = asyncio.Lock()  # a request that arrives during a command ends the command

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
        code, output, reported = await self._ask(
            timeout_s,
            op="run",
            argv=list(argv),
            stdin=_encode(stdin),
            timeout_s=timeout_s,
            cwd=inside_directory(cwd),
            env={**self._spec.env, **(env or {})},
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
    ) -> Process:
        check_env(env or {})
        variables = {**({"TERM": "xterm"} if pty else {}), **self._spec.env, **(env or {})}
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                await self._ask(
                    op="start",
                    descriptor=theirs,
                    argv=list(argv),
                    cwd=inside_directory(cwd),
                    env=variables,
                    pty=pty,
                )
            descriptors = socket.recv_fds(ours, 1, 2)[1]
        except BaseException:
            ours.close()
            raise
        return await self._keep(ours, descriptors)

    async def _keep(self, control: socket.socket, descriptors: list[int]) -> KeptProcess:
        output = descriptors[0]
        source = descriptors[1] if len(descriptors) > 1 else os.dup(output)
        streams = Streams(output, source, terminal=len(descriptors) == 1)
        number = next(self._process_numbers)

        def ended() -> None:
            streams.finish()
            self._processes.pop(number, None)

        keeper = self._processes[number] = Keeper(ended)
        # without a wait in it, for a socket that is connected already
        await asyncio.get_running_loop().create_unix_connection(lambda: keeper, sock=control)
        return KeptProcess(keeper, streams, self._pool.reply_timeout_s, self._answered_late)

    def keepers_owing(self) -> dict[str, float]:
        return {
            f"sandbox {self.number} process {number}": owed_s
            for number, keeper in self._processes.items()
            if (owed_s := keeper.owed_s()) > 0.0
        }

    def _answered_late(self, seconds: float) -> None:
        self._late_s = max(self._late_s, seconds)

    async def read(self, path: str) -> str:
        return (await self.read_bytes(path)).decode()

    async def read_bytes(self, path: str) -> bytes:
        return base64.b64decode(await self._ask(op="read", path=inside(path)))

    async def write(self, path: str, content: str | bytes) -> None:
        await self.fill({inside(path): Entry(FILE, to_bytes(content))})

    async def fill(self, files: Tree) -> None:
        await self._ask(op="write", files=encoded(files))

    async def serve(self) -> None:
        """Start what is to run beside the agent."""
        if services := self._spec.services:
            await self._ask(op="name_services", names=[service.name for service in services])
            self._services = await start_services(self, services)

    async def limit(self, limits: Limits) -> None:
        size = limits.disk_bytes or COPY_BYTES
        processes = limits.processes or MAX_PROCESSES
        # the first process of the sandbox is one of its user's, too
        await self._ask(
            op="limit",
            disk_bytes=size,
            disk_files=files_in(size),
            processes=processes + 1,
            process_bytes=max(PROCESS_BYTES, limits.memory_bytes or 0),
        )

    async def diff(self) -> str:
        before = await asyncio.to_thread(known, self._before)
        answer = await self._ask(op="changes", before=before)
        changed = {path: each and Entry(*each) for path, each in decoded(answer).items()}
        return await asyncio.to_thread(unified_diff, self._before, changed)

    async def patch(self) -> Patch:
        self._close_processes()
        before = await asyncio.to_thread(known, self._before)
        found = decoded(await self._ask(op="patch", before=before))
        return {path: each and (each[0], each[1] or b"") for path, each in found.items()}

    async def apply(self, patch: Patch) -> None:
        plain = {inside(path): entry for path, entry in patch.items()}
        await self._ask(op="apply", patch=encoded(plain))

    async def fork(self) -> NamespaceSandbox:
        sandbox = await self._pool.start(self._spec, self._before, like=self)
        async with close_on_failure(sandbox):
            if not await self._share(sandbox):
                await self._copy_to(sandbox)
            await sandbox.serve()
        return sandbox

    async def _share(self, sandbox: NamespaceSandbox) -> bool:
        """False if the files have to be copied."""
        if sandbox.zygote_pid != self.zygote_pid:  # and so not the same user
            return False
        ours, theirs = socket.socketpair()
        with ours, theirs:
            if not await self._ask(op="freeze", descriptor=ours):
                return False
            await sandbox._ask(op="adopt", descriptor=theirs)
        return True

    async def _copy_to(self, sandbox: NamespaceSandbox) -> None:
        ours, theirs = socket.socketpair()
        done = await asyncio.gather(
            self._copy("send", ours), sandbox._copy("receive", theirs), return_exceptions=True
        )
        failures = [each for each in done if isinstance(each, BaseException)]
        # each of the two fails with the other; what the working copy is to blame for says why
        for failure in sorted(failures, key=lambda e: not isinstance(e, ValueError)):
            raise failure

    async def _copy(self, op: str, over: socket.socket) -> None:
        with over:  # when this one has failed, the other one must see its end
            await self._ask(op=op, descriptor=over)

    async def close(self) -> None:
        self._pool.forget(self)
        self._close_processes()
        await self._link.close()
        self._pool.ended(self)

    def abandon(self) -> None:
        """Does not wait for its end."""
        self._pool.forget(self)
        self._close_processes()
        self._link.abort()

    def _close_processes(self) -> None:
        for reading in self._services:
            reading.cancel()
        for keeper in list(self._processes.values()):
            keeper.close()

    async def _ask(
        self, working_s: float = 0.0, descriptor: socket.socket | None = None, **request: Any
    ) -> Any:
        clock = asyncio.get_running_loop().time
        async with self._turn:
            self._check()
            self.due = clock() + working_s
            try:
                if descriptor is not None:
                    await self._link.send_socket(descriptor)
                    descriptor.close()  # or its end would not be seen at the other one
                answer = await self._link.answer(
                    self._link.send(request), working_s + REPLY_TIMEOUT_S
                )
            finally:
                self._late_s = max(self._late_s, clock() - self.due)
                self.due = math.inf
            self._check()
            return answer

    def _check(self) -> None:
        """What a sandbox says that was stopped, or its command's time, may be due to that."""
        if self._late_s >= self._pool.reply_timeout_s:
            raise RolloutFailure(f"sandbox: its answer came {self._late_s:.0f} s late")


def _memory_bytes(limits: Limits) -> int:
    return limits.memory_bytes or memory_for(limits.disk_bytes or COPY_BYTES)


def _encode(content: str | bytes) -> str:
    return base64.b64encode(to_bytes(content)).decode()
