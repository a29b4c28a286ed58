"""Sandboxes with a kernel of their own, which is a program: gVisor's runsc.

Code in a sandbox calls gVisor and never the kernel of this machine. Every sandbox is restored from
a checkpoint that was taken once, with its first process (`machine`) running. A fork is a checkpoint
of a running sandbox, restored as a second one with the same processes and services.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import Limits, SandboxSpec, Tier
from etude.sandbox.bundle import build_root, copy_program, oci_spec
from etude.sandbox.called import CalledProcess, CalledSandbox
from etude.sandbox.limits import COPY_BYTES, files_in
from etude.sandbox.lines import Lines
from etude.sandbox.link import REPLY_TIMEOUT_S, encoded
from etude.sandbox.machines import Machines, abandoned
from etude.sandbox.mounts import Mount, check_walled
from etude.sandbox.services import listen, start_services
from etude.sandbox.spec import check_machine, opening_tree

INSTALL = "apt install -t bookworm-backports runsc"
_ENGINE = (
    "--network=none",
    "--platform=systrap",
    "--overlay2=none",
    "--host-uds=none",
    "--file-access-mounts=exclusive",  # mounted directories do not change
)
_KIND = "gvisor"
_CGROUPS = Path("/sys/fs/cgroup")


class GvisorSandboxPool:
    """A `core.sandbox.SandboxPool`."""

    tier: Tier = "gvisor"

    def __init__(
        self, reply_timeout_s: float = REPLY_TIMEOUT_S, mounts: Sequence[Mount] = ()
    ) -> None:
        """Raises EtudeError if runsc is missing or cannot start a sandbox."""
        if (runsc := shutil.which("runsc")) is None:
            raise EtudeError(f"isolation gvisor needs runsc, which is not installed: {INSTALL}")
        check_walled(mounts)
        self.reply_timeout_s = reply_timeout_s
        self._mounts = mounts
        _sweep_cgroups()
        self.machines: Machines[_Machine, Path] = Machines(_KIND)
        self._home = self.machines.home
        self._engine = [runsc, f"--root={self._home}/state", *_ENGINE]
        build_root(self._home / "root")
        copy_program(self._home / "program")
        if os.geteuid() != 0:
            self._engine.append("--rootless")
        self._cgroups = os.geteuid() == 0 and not self._refusal()
        if not self._cgroups:
            self._engine.append("--ignore-cgroups")
            if why := self._refusal():
                shutil.rmtree(self._home, ignore_errors=True)
                raise EtudeError(f"runsc cannot start a sandbox on this machine: {why}")

    def _refusal(self) -> str:
        """The reason why a trial sandbox that ends at once failed; empty: it did not."""
        self._cgroups = "--ignore-cgroups" not in self._engine
        bundle = self.bundle(Limits())
        argv = [*self._engine, "run", f"--bundle={bundle}", bundle.name]
        try:
            tried = subprocess.run(argv, input=b"", capture_output=True, timeout=REPLY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"it did not end within {REPLY_TIMEOUT_S:.0f} s"
        finally:
            _remove_cgroups(f"{self._home.name}/{bundle.name}")
        return tried.stderr.decode(errors="replace").strip() if tried.returncode else ""

    def check(self, spec: SandboxSpec) -> None:
        by_cgroup = ("memory_bytes", "cpus") if self._cgroups else ()
        check_machine(spec, backend=_KIND, limits=("disk_bytes", *by_cgroup))

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[CalledSandbox]:
        self.check(spec)
        size = spec.limits.disk_bytes or COPY_BYTES
        tree = await opening_tree(spec, max_bytes=size, max_entries=files_in(size))
        machine = await self._restored_template(spec.limits)
        sandbox = CalledSandbox(machine)
        try:
            names = [service.name for service in spec.services]
            env = dict(spec.env)
            await machine.call("open", env=env, tree=encoded(tree), services=names)
            machine.reading = await start_services(sandbox, spec.services)
            yield sandbox
        finally:
            await sandbox.close()

    async def _restored_template(self, limits: Limits) -> _Machine:
        size = limits.disk_bytes or COPY_BYTES
        template = await self.machines.template(size, lambda: self._make_template(size))
        return await self.restore(template, limits)

    async def _make_template(self, disk_bytes: int) -> Path:
        """Make a checkpoint of a machine that has started and is still empty."""
        machine = await self._start(Limits(disk_bytes=disk_bytes), "run")
        image = self._home / f"template-{disk_bytes}"
        try:
            await machine.checkpoint(image)
        finally:
            await machine.close()
        return image

    async def restore(self, image: Path, limits: Limits) -> _Machine:
        return await self._start(limits, "restore", f"--image-path={image}")

    async def _start(self, limits: Limits, *how: str) -> _Machine:
        async with self.machines.start(lambda: _Machine(self, self.bundle(limits), limits)) as made:
            await made.start(how)
        return made

    def bundle(self, limits: Limits) -> Path:
        """Write the bundle of a sandbox. The sandbox is named after it. Names are padded, since
        runsc accepts a prefix of a name for the whole."""
        bundle = self.machines.place(f"etude-{os.getpid()}")
        bundle.mkdir()
        cgroup = f"/{self._home.name}/{bundle.name}" if self._cgroups else ""
        spec = oci_spec(
            self._home / "root", self._home / "program", self._mounts, limits, cgroup=cgroup
        )
        (bundle / "config.json").write_text(json.dumps(spec))
        return bundle

    def argv(self, *words: str) -> list[str]:
        return [*self._engine, *words]

    def owing(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        await self.machines.close()
        _remove_cgroups(f"{self._home.name}/*", self._home.name)


class _Machine:
    """A `called.Caller`: one sandbox of runsc, and the lines to its first process."""

    def __init__(self, pool: GvisorSandboxPool, bundle: Path, limits: Limits) -> None:
        self._pool = pool
        self._name = bundle.name
        self._bundle = bundle
        self._limits = limits
        self._process: asyncio.subprocess.Process | None = None
        self._lines: Lines | None = None
        self.reading: list[asyncio.Task[None]] = []
        """Readers of the services' output."""

    async def start(self, how: Sequence[str]) -> None:
        """`how`: the command of runsc for the bundle."""
        words = [*how, f"--bundle={self._bundle}", self._name]
        with (self._bundle / "errors").open("wb") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *self._pool.argv(*words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                limit=1 << 30,
                start_new_session=True,
            )
        assert self._process.stdout is not None and self._process.stdin is not None
        self._lines = Lines(self._process.stdout, self._process.stdin)
        try:
            await self.call("hello")
        except RolloutFailure as e:
            said = (self._bundle / "errors").read_text(errors="replace").strip()
            raise RolloutFailure(f"{e}; runsc said: {said[-500:] or 'nothing'}") from e

    async def call(self, operation: str, working_s: float = 0.0, **told: Any) -> Any:
        assert self._lines is not None
        patience_s = working_s + self._pool.reply_timeout_s
        return await self._lines.call(operation, told, patience_s)

    async def checkpoint(self, image: Path, *flags: str) -> None:
        image.mkdir()
        words = ["--compression=none", *flags, f"--image-path={image}", self._name]
        asked = await asyncio.create_subprocess_exec(
            *self._pool.argv("checkpoint", *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        _, errors = await asked.communicate()
        if asked.returncode != 0:
            said = errors.decode(errors="replace")[-500:]
            raise RolloutFailure(f"sandbox: could not be checkpointed: {said}")

    async def fork(self) -> CalledSandbox:
        """Fork the sandbox with all its processes. Only the output of services is read in the
        fork."""
        image = self._pool.machines.place("fork")
        try:
            await self.checkpoint(image, "--leave-running")
            machine = await self._pool.restore(image, self._limits)
        finally:
            await asyncio.to_thread(shutil.rmtree, image, ignore_errors=True)
        # services were the first processes to start
        services = [CalledProcess(machine, number + 1) for number in range(len(self.reading))]
        machine.reading = [asyncio.create_task(listen(each, bytearray())) for each in services]
        return CalledSandbox(machine)

    async def close(self) -> None:
        self._pool.machines.forget(self)
        for task in self.reading:
            task.cancel()
        if self._lines is not None:
            self._lines.close()  # the machine ends when its input does
        if self._process is not None and not await _ends(self._process):
            await self._run("kill", self._name, "KILL")
            self._process.kill()
            await self._process.wait()
            await self._run("delete", "--force", self._name)
        await asyncio.to_thread(shutil.rmtree, self._bundle, ignore_errors=True)
        _remove_cgroups(f"{self._bundle.parent.name}/{self._name}")

    async def _run(self, *words: str) -> None:
        null = subprocess.DEVNULL
        ran = await asyncio.create_subprocess_exec(
            *self._pool.argv(*words), stdin=null, stdout=null, stderr=null
        )
        await ran.wait()


def _sweep_cgroups() -> None:
    """Remove the cgroups of pools whose process was killed. Each is named like the pool's
    directory."""
    for place in (_CGROUPS, *_CGROUPS.glob("*/")):
        for left in abandoned(f"etude.{_KIND}-", place):
            _remove_cgroups(f"{left.name}/*", left.name)


def _remove_cgroups(*patterns: str) -> None:
    """Remove cgroups of every kind; runsc creates them and does not remove them."""
    for pattern in patterns:
        for place in (*_CGROUPS.glob(pattern), *_CGROUPS.glob(f"*/{pattern}")):
            with contextlib.suppress(OSError):  # a file, or a cgroup with processes
                place.rmdir()


async def _ends(process: asyncio.subprocess.Process) -> bool:
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S / 6):
            await process.wait()
    except TimeoutError:
        return False
    return True
