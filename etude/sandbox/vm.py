"""Sandboxes with a machine of their own: a virtual machine of QEMU that contains a sandbox in
namespaces.

One machine of each size boots. When its first process (`vm_guest`) is up, it is saved: its memory
is a file, which every later machine maps privately, copying each page that it writes. A fork is a
running machine that was saved, including memory, processes and services.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from etude.core.errors import RolloutFailure
from etude.core.sandbox import Limits, SandboxSpec, Tier
from etude.sandbox.called import CalledSandbox
from etude.sandbox.limits import COPY_BYTES, MIB, files_in, memory_for
from etude.sandbox.lines import Lines
from etude.sandbox.link import REPLY_TIMEOUT_S
from etude.sandbox.machines import Machines
from etude.sandbox.mounts import Mount, check_walled
from etude.sandbox.qemu import Files, Hardware, Monitor, Snapshot, find_engine, machine_argv
from etude.sandbox.spec import check_machine, to_message
from etude.sandbox.vm_boot import build_disks, cache, keep_template, write_initramfs

_BOOT_S = 600.0
"""Seconds for a machine that is emulated, on a busy host."""
_SYSTEM_BYTES = 192 * MIB
"""Memory for a machine's kernel and first processes, in addition to the sandbox's own."""
_LIMITS = ("cpus", "memory_bytes", "disk_bytes", "processes")


class VmSandboxPool:
    """A `core.sandbox.SandboxPool`."""

    tier: Tier = "vm"

    def __init__(
        self, reply_timeout_s: float = REPLY_TIMEOUT_S, mounts: Sequence[Mount] = ()
    ) -> None:
        """Raises EtudeError if something is missing, or if no machine boots. The first pool on a
        machine takes minutes: it makes a disk of the installed programs."""
        self.engine = find_engine()
        check_walled(mounts)
        self.reply_timeout_s = reply_timeout_s
        disks = build_disks(mounts)
        self.machines: Machines[_Machine, Snapshot] = Machines("vm")
        self.files = Files(
            {name: os.open(disk, os.O_RDONLY) for name, disk in disks.items()},
            self.machines.home / "initramfs",
            self.machines.home / "console",
        )
        write_initramfs(self.files.initramfs, self.engine.kernel, mounts)
        booted = (self.engine, disks, sha256(self.files.initramfs.read_bytes()).hexdigest())
        self._what_boots = repr(booted)

    def check(self, spec: SandboxSpec) -> None:
        check_machine(spec, backend="vm", limits=_LIMITS)

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[CalledSandbox]:
        self.check(spec)
        size = spec.limits.disk_bytes or COPY_BYTES
        told = await to_message(spec, max_bytes=size, max_entries=files_in(size))
        hardware = _hardware(spec.limits)
        template = await self.machines.template(hardware, lambda: self._make_template(hardware))
        machine = await self.restored(template, hardware)
        sandbox = CalledSandbox(machine)
        try:
            ready_s = sum(service.ready_s for service in spec.services)
            await machine.call("open", ready_s, **told)
            yield sandbox
        finally:
            await sandbox.close()

    async def _make_template(self, hardware: Hardware) -> Snapshot:
        """Boot an empty machine and save it. It is kept for later pools, since booting takes much
        longer than restoring."""
        key = sha256(f"{self._what_boots} {hardware}".encode()).hexdigest()[:32]
        kept = cache() / f"template-{key}"
        if not kept.exists():
            new = Path(tempfile.mkdtemp(prefix="new-", dir=self.machines.home))
            snapshot = Snapshot(new / "state", new / "memory")
            async with self.machines.start(lambda: _Machine(self, hardware)) as machine:
                await machine.boot(snapshot)
                await machine.save(snapshot)
            await machine.close()
            await asyncio.to_thread(keep_template, new, kept)
        os.utime(kept)
        return Snapshot(kept / "state", kept / "memory")

    async def restored(self, snapshot: Snapshot, hardware: Hardware) -> _Machine:
        async with self.machines.start(lambda: _Machine(self, hardware)) as machine:
            await machine.restore(snapshot)
        return machine

    def owing(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        await self.machines.close()
        for descriptor in self.files.disks.values():
            os.close(descriptor)


class _Machine:
    """A `called.Caller`: one process of QEMU, the lines to the first process in it, and its
    monitor."""

    def __init__(self, pool: VmSandboxPool, hardware: Hardware) -> None:
        self._pool = pool
        self._hardware = hardware
        self._process: asyncio.subprocess.Process | None = None
        self._lines: Lines | None = None
        self._monitor: Monitor | None = None
        self._saving = asyncio.Lock()

    async def boot(self, snapshot: Snapshot) -> None:
        """Boot, with the memory in the file of the future snapshot."""
        await self._start(snapshot.memory, boots=True)
        try:
            await self._hello(_BOOT_S)
        except RolloutFailure as e:
            said = self._pool.files.console.read_text(errors="replace").strip()
            raise RolloutFailure(f"{e}; its kernel said: {said[-500:] or 'nothing'}") from e

    async def restore(self, snapshot: Snapshot) -> None:
        monitor = await self._start(snapshot.memory, boots=False)
        memory_too = snapshot.memory is None
        await asyncio.to_thread(monitor.load, snapshot.state, memory_too=memory_too)
        await self._hello(self._pool.reply_timeout_s)

    async def _start(self, memory: Path | None, *, boots: bool) -> Monitor:
        port, their_port = socket.socketpair()
        monitor, their_monitor = socket.socketpair()
        with their_port, their_monitor:
            descriptors = {"port": their_port.fileno(), "monitor": their_monitor.fileno()}
            pool = self._pool
            self._process = await asyncio.create_subprocess_exec(
                *machine_argv(
                    pool.engine,
                    self._hardware,
                    pool.files,
                    memory=memory,
                    boots=boots,
                    **descriptors,
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[*descriptors.values(), *pool.files.disks.values()],
                start_new_session=True,
            )
        self._monitor = Monitor(monitor)
        self._lines = Lines(*await asyncio.open_connection(sock=port, limit=1 << 30))
        try:
            await asyncio.to_thread(self._monitor.begin)
        except RolloutFailure as e:
            raise RolloutFailure(f"{e}; it said: {await self._last_words()}") from e
        return self._monitor

    async def _last_words(self) -> str:
        assert self._process is not None and self._process.stderr is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        said = await self._process.stderr.read()
        return said.decode(errors="replace").strip()[-500:] or "nothing"

    async def _hello(self, patience_s: float) -> None:
        """Send the current time and random bytes: a restored machine has those of its snapshot."""
        assert self._lines is not None
        chance = base64.b64encode(os.urandom(64)).decode()
        await self._lines.call("hello", {"now": time.time(), "chance": chance}, patience_s)

    async def call(self, operation: str, working_s: float = 0.0, **told: Any) -> Any:
        assert self._lines is not None
        return await self._lines.call(operation, told, working_s + self._pool.reply_timeout_s)

    async def save(self, snapshot: Snapshot) -> None:
        """Save the machine, which stands still afterwards."""
        assert self._monitor is not None
        memory_too = snapshot.memory is None
        await asyncio.to_thread(self._monitor.save, snapshot.state, memory_too=memory_too)

    async def fork(self) -> CalledSandbox:
        """Fork the machine with everything that runs in it."""
        assert self._monitor is not None
        snapshot = Snapshot(self._pool.machines.place("fork"), None)
        try:
            async with self._saving:
                try:
                    await self.save(snapshot)
                finally:
                    await asyncio.to_thread(self._monitor.go_on)
            return CalledSandbox(await self._pool.restored(snapshot, self._hardware))
        finally:
            snapshot.state.unlink(missing_ok=True)

    async def close(self) -> None:
        self._pool.machines.forget(self)
        if self._lines is not None:
            self._lines.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._monitor is not None:
            self._monitor.close()


def _hardware(limits: Limits) -> Hardware:
    memory = limits.memory_bytes or memory_for(limits.disk_bytes or COPY_BYTES)
    mib = math.ceil((memory + _SYSTEM_BYTES) / MIB)
    return Hardware(memory_mib=mib + mib % 2, processors=math.ceil(limits.cpus or 1))
