"""The other tiers in the benchmark of sandboxes: gVisor, virtual machines, and a sandbox host."""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from etude.bench._sandbox_database import POSTGRES
from etude.core.errors import EtudeError
from etude.core.sandbox import Limits, Sandbox, SandboxPool, SandboxSpec, Service
from etude.sandbox.gvisor import GvisorSandboxPool
from etude.sandbox.qemu import missing_packages
from etude.sandbox.remote import RemoteSandboxPool
from etude.sandbox.vm import VmSandboxPool

_STARTS = 10
_FORKS = 5
_LONG_S = 600.0
_START_POSTGRES = f"""
{POSTGRES}/initdb -D /work/db -N -A trust > /dev/null
exec {POSTGRES}/postgres -D /work/db -k /tmp -c shared_buffers=16MB -c fsync=off
"""
_ROWS = "create table t as select n, md5(n::text) from generate_series(1, 100000) n"
_COUNT = "import time\nn = 0\nwhile True: n += 1; time.sleep(0.1)"


class TimedGvisorPool(GvisorSandboxPool):
    async def restore(self, image: Path, limits: Limits) -> Any:
        began = time.perf_counter()
        machine = await super().restore(image, limits)
        self.restored_s = time.perf_counter() - began
        return machine


async def gvisor() -> dict[str, float]:
    """The figures of gVisor; empty if runsc is not installed or too old."""
    if shutil.which("runsc") is None:
        return {}
    try:
        pool = TimedGvisorPool()
    except EtudeError as e:
        print(f"skipping gvisor: {e}", file=sys.stderr)
        return {}
    try:
        async with pool.open(SandboxSpec()):  # the first one makes the template
            pass
        figures = await _starts(pool)
        async with pool.open(SandboxSpec()) as sandbox:
            figures["fork_p50_ms"] = await _fork_ms(sandbox)
        if POSTGRES.exists() and shutil.which("redis-server"):
            figures |= await _live_fork(pool)
    finally:
        await pool.close()
    return {f"gvisor.{name}": value for name, value in figures.items()}


async def vm() -> dict[str, float]:
    """The figures of virtual machines; empty if a required package is not installed."""
    if missing_packages():
        return {}
    pool = VmSandboxPool(_LONG_S)
    try:
        async with pool.open(SandboxSpec()):  # the first one makes the template
            pass
        figures = await _starts(pool)
        async with pool.open(SandboxSpec()) as sandbox:
            figures["fork_p50_ms"] = await _fork_ms(sandbox)
    finally:
        await pool.close()
    return {f"vm.{name}": value for name, value in figures.items()}


async def host() -> dict[str, float]:
    """The figures of namespace sandboxes on a sandbox host on this machine, which show the cost of
    the connection."""
    argv = [sys.executable, "-m", "etude", "sandboxes", "serve", "--port=0"]
    env = {name: value for name, value in os.environ.items() if name != "ETUDE_SANDBOX_TOKEN"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[2].rstrip(":")
        pool = RemoteSandboxPool([url], "namespaces")
        try:
            figures = await _starts(pool)
        finally:
            await pool.close()
            server.terminate()
    return {f"host.{name}": value for name, value in figures.items()}


async def _starts(pool: SandboxPool) -> dict[str, float]:
    starts, echoes = [], []
    for _ in range(_STARTS):
        began = time.perf_counter()
        async with pool.open(SandboxSpec()) as sandbox:
            starts.append(time.perf_counter() - began)
            ran = await sandbox.run(["echo", "up"], timeout_s=_LONG_S)
            assert ran.output == "up\n", ran
            echoes.append(time.perf_counter() - began)
    return {
        "start_p50_ms": 1e3 * statistics.median(starts),
        "echo_p50_ms": 1e3 * statistics.median(echoes),
    }


async def _live_fork(pool: TimedGvisorPool) -> dict[str, float]:
    services = (
        Service(name="db", argv=("sh", "db.sh"), port=5432, ready_s=_LONG_S),
        Service(name="cache", argv=("redis-server", "--save", ""), port=6379, ready_s=_LONG_S),
    )
    files = {"db.sh": _START_POSTGRES, "count.py": _COUNT}
    spec = SandboxSpec(files=files, services=services, limits=Limits(disk_bytes=256 << 20))
    async with pool.open(spec) as sandbox:
        argv = [f"{POSTGRES}/psql", "-h", "db", "-U", "user", "-qc", _ROWS, "postgres"]
        made = await sandbox.run(argv, timeout_s=_LONG_S)
        assert made.exit_code == 0, made
        await sandbox.start(["python", "count.py"])
        forks, restores = [], []
        for _ in range(_FORKS):
            forks.append(await _fork_s(sandbox))
            restores.append(pool.restored_s)
    return {
        "live_fork_p50_ms": 1e3 * statistics.median(forks),
        "live_restore_p50_ms": 1e3 * statistics.median(restores),
    }


async def _fork_ms(sandbox: Sandbox) -> float:
    return 1e3 * statistics.median([await _fork_s(sandbox) for _ in range(_FORKS)])


async def _fork_s(sandbox: Sandbox) -> float:
    """Seconds of checkpoint and restore, until the fork answers."""
    began = time.perf_counter()
    fork = await sandbox.fork()
    await fork.diff()
    seconds = time.perf_counter() - began
    await fork.close()
    return seconds


def tiers() -> dict[str, float]:
    return asyncio.run(gvisor()) | asyncio.run(vm()) | asyncio.run(host())
