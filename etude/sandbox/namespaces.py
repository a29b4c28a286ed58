"""Sandboxes in Linux namespaces: the host's side.

`NamespaceSandboxPool` starts one `zygote` process; every sandbox is a fork of it and answers over a
socket of its own (`namespace_sandbox`). All of them are served by one event loop, without threads.
No daemon, package or privilege is needed: kernels allow this to ordinary users, unless the system
has turned it off.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import Limits, SandboxSpec, Tier, close_on_failure
from etude.sandbox.egress import Hosts, Outside
from etude.sandbox.image_view import ImageView
from etude.sandbox.limits import (
    COPY_BYTES,
    LEAST_MEMORY_BYTES,
    MAX_PROCESSES,
    PROCESS_BYTES,
    files_in,
    memory_for,
)
from etude.sandbox.link import REPLY_TIMEOUT_S, Link
from etude.sandbox.mounts import Mount, check_walled
from etude.sandbox.namespace_sandbox import NamespaceSandbox
from etude.sandbox.places import WORKDIRS
from etude.sandbox.reaper import SWEEP_S, mountpoint_prefix, sweep
from etude.sandbox.spec import check_spec, given_within_walls, opening_tree
from etude.sandbox.tree import Tree
from etude.sandbox.walls import Walls

_ZYGOTES = 6
"""Number of silent zygotes in a row after which opening a sandbox fails."""
_END_S = 2.0
"""Seconds for a zygote to end by itself. The launcher of a run gives its controller a little
more."""
_FULL_S = 0.005
"""Seconds until a zygote with a full socket is asked again."""
_OPENING = 32
"""Sandboxes that are started at the same time. More would only wait in the zygote's queue."""
SPARES = 4
"""Spare sandboxes for callers that open one after the other, or a few at once. Each takes 2 MiB."""
_BOOT = (
    "import socket, sys; sys.path.append(sys.argv[1]); from etude.sandbox.zygote import main; "
    "sys.path.pop(); "
    "main(socket.socket(fileno=int(sys.argv[2])), sys.argv[3], sys.argv[4])"
)


_NO_LOG = Outside()


class NamespaceSandboxPool:
    """A `core.sandbox.SandboxPool`."""

    def __init__(
        self,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
        mounts: Sequence[Mount] = (),
        image: ImageView | None = None,
        outside: Outside = _NO_LOG,
        spares: int = 0,
    ) -> None:
        """Raises EtudeError with the call that the kernel refused. `reply_timeout_s`: seconds
        without an answer after which a zygote is replaced, and a sandbox has failed. `spares`:
        number of sandboxes that are made in advance (`spares`)."""
        self.reply_timeout_s = reply_timeout_s
        check_walled(mounts)
        self._mounts = mounts
        self._image = image
        self.outside = outside
        self._spares = spares
        self._template: NamespaceSandbox | None = None
        self._making_template = asyncio.Lock()
        self._sandboxes: set[NamespaceSandbox] = set()
        self._numbers = itertools.count(1)
        self._replaced: list[subprocess.Popen[bytes]] = []
        self._owed_s = 0.0  # by a zygote that was replaced for its silence, until reported
        self._opening = asyncio.Semaphore(_OPENING)
        self._closed = False
        self._swept = time.monotonic()
        sweep()
        self._launch()

    def _launch(self) -> None:
        self._control, theirs = socket.socketpair()
        # when the zygote was asked for the sign of life that it still owes
        self._asked: float | None = None
        # In a mount namespace of its own, the zygote mounts its root over this directory, and then
        # detaches from it.
        with theirs, tempfile.TemporaryDirectory(prefix=mountpoint_prefix()) as mountpoint:
            self._zygote = subprocess.Popen(
                _zygote_argv(theirs.fileno(), mountpoint, self._shown()),
                pass_fds=[theirs.fileno()],
                # otherwise every fork would have to bind symbols itself
                env={"PYTHONHASHSEED": "0", "LD_BIND_NOW": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            theirs.close()
            said = _first_line(self._control, max(REPLY_TIMEOUT_S, self.reply_timeout_s))
        if "walls" not in said:
            self._control.close()
            self._zygote.wait()
            raise EtudeError(
                f"this kernel does not allow the namespaces that sandboxes need: "
                f"{said.get('error', 'the launcher died')}. Allow user namespaces (sysctl "
                f'user.max_user_namespaces), or set isolation = "process" under [sandbox], '
                f"which does not isolate, for code that you trust"
            )
        self.walls = Walls(**said["walls"])
        with contextlib.suppress(ConnectionError):  # a killed zygote is noticed when it is needed
            self._control.send(f"+{self._spares}\n".encode())

    def _shown(self) -> dict[str, Any]:
        image = self._image
        return {
            "mounts": [*self._mounts, *(image.mounts if image else ())],
            "layers": image.layers if image else [],
            "system": image is not None and image.system,
            "hostname": image.hostname if image else "localhost",
            "user": image.user if image else "",
            "packages": image is not None and image.packages,
        }

    @property
    def zygote_pid(self) -> int:
        return self._zygote.pid

    @property
    def tier(self) -> Tier:
        """Weaker than its name if the system calls of commands cannot be filtered."""
        return "namespaces" if self.walls.seccomp else "process"

    def check(self, spec: SandboxSpec) -> None:
        Hosts.parse(spec.network)
        # names that harnesses use would give away a machine that is to look lived-in
        workdirs = () if self._image and self._image.user else WORKDIRS
        gives = given_within_walls(spec, workdirs) | {"network"}
        check_spec(spec, backend="namespaces", gives=gives, limits=self.walls.limits)
        if (memory := _memory_bytes(spec.limits)) < LEAST_MEMORY_BYTES:
            raise EtudeError(
                f"limits.memory_bytes is {memory}, but a sandbox with its files needs at least "
                f"{LEAST_MEMORY_BYTES}"
            )

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[NamespaceSandbox]:
        self.check(spec)
        size = spec.limits.disk_bytes or COPY_BYTES
        added = await opening_tree(spec, max_bytes=size, max_entries=files_in(size))
        before = {**self._working_copy(), **added}
        if template := await self._open_template():
            sandbox = await template.branch(spec, before, always=True)
        else:
            sandbox = await self.start(spec, before)
        try:
            await sandbox.fill(added)
            await sandbox.serve()
            yield sandbox
        finally:
            await sandbox.close()

    async def open_empty(self, spec: SandboxSpec) -> NamespaceSandbox:
        """Open a sandbox for the files of another one with the same spec; its diff is against the
        files that the other one started with. The caller fills it, calls its `serve`, and closes
        it."""
        self.check(spec)
        size = spec.limits.disk_bytes or COPY_BYTES
        added = await opening_tree(spec, max_bytes=size, max_entries=files_in(size))
        return await self.start(spec, {**self._working_copy(), **added})

    def _working_copy(self) -> Tree:
        return self._image.work if self._image else {}

    async def _open_template(self) -> NamespaceSandbox | None:
        """The sandbox that holds the working copy of the image, frozen, for all others; None if
        that working copy is empty. One that died with its zygote is replaced."""
        if not (work := self._working_copy()):
            return None
        async with self._making_template:
            stale = self._template
            if stale is None or stale.zygote_pid != self._zygote.pid:
                size = sum(len(entry.content or b"") for entry in work.values())
                limits = Limits(disk_bytes=max(COPY_BYTES, 2 * size + 4096 * len(work)))
                made = await self.start(SandboxSpec(limits=limits), work)
                async with close_on_failure(made):
                    await made.fill(work)
                    await made.date(self._image.times if self._image else {})
                self._template = made
                if stale:
                    await stale.close()
            assert self._template is not None
            return self._template

    async def start(
        self, spec: SandboxSpec, before: Tree, like: NamespaceSandbox | None = None
    ) -> NamespaceSandbox:
        """A sandbox with an empty working copy, which the caller closes. `like`: a sandbox that it
        may share files with."""
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
            f"sandbox: {_ZYGOTES} zygotes did not start one within {self.reply_timeout_s:g} s each"
        )

    async def _ask_for_one(
        self, spec: SandboxSpec, before: Tree, like: NamespaceSandbox | None
    ) -> NamespaceSandbox | None:
        """Ask the zygote for a sandbox; None if the zygote is silent."""
        number = next(self._numbers)
        limits = spec.limits
        wanted = {
            "name": str(number),
            "memory_bytes": _memory_bytes(limits),
            "cpus": limits.cpus,
            "bounds": self._bounds(limits),
            "like": str(like.number) if like else None,
        }
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            if not await self._ask(json.dumps(wanted).encode() + b"\n", theirs.fileno()):
                ours.close()
                return None
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

    def _bounds(self, limits: Limits) -> list[int]:
        """The limits in the order in which `guest.Guest` takes them."""
        if limits == Limits():
            return []
        size = limits.disk_bytes or COPY_BYTES
        processes = limits.processes or MAX_PROCESSES
        memory = limits.memory_bytes or PROCESS_BYTES
        if self.walls.cgroup:  # which counts memory that is used, not only mapped
            memory = max(memory, PROCESS_BYTES)
        # the first process of the sandbox belongs to the same user
        return [size, files_in(size), processes + 1, memory]

    async def _ask(self, line: bytes, its_end: int) -> bool:
        """Send a line and a descriptor; False if the zygote does not read. If many sandboxes end at
        once, the messages about them fill its socket until it has tidied up."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.reply_timeout_s
        while loop.time() < until:
            with contextlib.suppress(BlockingIOError):
                socket.send_fds(self._control, [line], [its_end])
                return True
            await asyncio.sleep(_FULL_S)
        return False

    def _replace(self) -> None:
        """Start another zygote. A silent one ends by itself when it wakes and sees that its socket
        is closed."""
        self._control.close()
        self._replaced = [
            zygote for zygote in (*self._replaced, self._zygote) if zygote.poll() is None
        ]
        self._launch()

    def owing(self) -> dict[str, float]:
        """Seconds that the zygote and the sandboxes owe an answer. To be called periodically: each
        call asks the zygote for a sign of life, and reads the previous one."""
        now = asyncio.get_running_loop().time()
        if time.monotonic() - self._swept >= SWEEP_S:
            self._swept = time.monotonic()
            sweep()
        # It is silent; or it is dead, and is replaced when one is needed.
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
        """Tell the zygote to tidy up after a sandbox. A dead one has done so."""
        with contextlib.suppress(OSError):
            self._control.send(f"-{sandbox.number}\n".encode())

    async def close(self) -> None:
        self._closed = True
        for sandbox in list(self._sandboxes):
            await sandbox.close()
        self._control.close()
        for zygote in (self._zygote, *self._replaced):
            try:
                zygote.wait(_END_S)  # it only waits for that socket to close
            except subprocess.TimeoutExpired:
                zygote.kill()
                zygote.wait()


def _zygote_argv(control: int, mountpoint: str, shown: dict[str, Any]) -> list[str]:
    # The Python below the virtual environment, without its packages: a sandbox sees the standard
    # library only. Without bytecode: on a full disk it would be cut off, and break later starts.
    python = getattr(sys, "_base_executable", sys.executable)
    source = str(Path(__file__).resolve().parents[2])
    told = [source, str(control), mountpoint, json.dumps(shown)]
    return [python, "-B", "-s", "-S", "-P", "-X", "utf8", "-c", _BOOT, *told]


def _first_line(control: socket.socket, timeout_s: float) -> dict[str, Any]:
    """The zygote's first message; empty if it died before it sent one."""
    control.settimeout(timeout_s)
    with control.makefile("r") as lines:
        line = lines.readline()
    control.setblocking(False)
    return dict(json.loads(line or "{}"))


def _memory_bytes(limits: Limits) -> int:
    return limits.memory_bytes or memory_for(limits.disk_bytes or COPY_BYTES)
