"""Behaviour of gVisor sandboxes alone: forks of running sandboxes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from etude.core.errors import EtudeError
from etude.core.sandbox import Limits, Sandbox, SandboxSpec, Service
from etude.sandbox.gvisor import GvisorSandboxPool
from tests.sandbox.conftest import need_gvisor

pytestmark = pytest.mark.tiers
LONG_S = 120.0
POSTGRES = "/usr/lib/postgresql/15/bin"
START_POSTGRES = f"""
{POSTGRES}/initdb -D /work/db -N -A trust > /dev/null
exec {POSTGRES}/postgres -D /work/db -k /tmp -c shared_buffers=16MB -c fsync=off
"""
COUNT = """
import itertools, time
for n in itertools.count():
    print(n, file=open("/work/count", "w"), flush=True)
    time.sleep(0.01)
"""


@pytest.fixture
async def pool() -> AsyncIterator[GvisorSandboxPool]:
    need_gvisor()
    opened = GvisorSandboxPool()
    yield opened
    await opened.close()


async def said(sandbox: Sandbox, *argv: str) -> str:
    ran = await sandbox.run(argv, timeout_s=LONG_S)
    assert ran.exit_code == 0, ran
    return ran.output.strip()


async def sql(sandbox: Sandbox, text: str) -> str:
    return await said(sandbox, "psql", "-h", "db", "-U", "user", "-Atqc", text, "postgres")


async def test_a_live_database_is_forked_with_what_runs_beside_it(pool: GvisorSandboxPool) -> None:
    if not (shutil.which("redis-server") and Path(POSTGRES).exists()):
        pytest.skip("apt install redis-server postgresql")
    spec = SandboxSpec(
        files={"db.sh": START_POSTGRES, "count.py": COUNT},
        limits=Limits(disk_bytes=256 << 20),
        services=(
            Service(name="db", argv=("sh", "db.sh"), port=5432, ready_s=LONG_S),
            Service(name="cache", argv=("redis-server", "--save", ""), port=6379, ready_s=LONG_S),
        ),
    )
    async with pool.open(spec) as origin:
        await sql(origin, "create table t as select n from generate_series(1, 1000) n")
        await said(origin, "redis-cli", "-h", "cache", "set", "key", "kept")
        await origin.start(["python", "count.py"])
        while await said(origin, "sh", "-c", "cat count 2> /dev/null || echo") == "":
            await asyncio.sleep(0.05)
        forks = [await origin.fork() for _ in range(2)]
        for number, each in enumerate([origin, *forks]):
            await sql(each, f"insert into t values ({-number})")
            assert await sql(each, "select count(*), min(n) from t") == f"1001|{-number}"
            assert await said(each, "redis-cli", "-h", "cache", "get", "key") == "kept"
            before = await said(each, "cat", "count")
            while await said(each, "cat", "count") == before:
                await asyncio.sleep(0.05)
        for each in forks:
            await each.close()


async def test_one_that_is_closed_takes_its_forks_not_along(pool: GvisorSandboxPool) -> None:
    async with pool.open(SandboxSpec(files={"a": "1"})) as origin:
        fork = await origin.fork()
    again = await fork.fork()
    await fork.close()
    assert await again.read("a") == "1"
    await again.close()


AWAY = f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        exec({COUNT!r})
    os._exit(0)
os.wait()
import time; time.sleep(1000)
"""


@pytest.mark.parametrize("end", ["kill", "patch"])
async def test_what_a_process_left_ends_with_it(pool: GvisorSandboxPool, end: str) -> None:
    async with pool.open(SandboxSpec(files={"away.py": AWAY})) as sandbox:
        process = await sandbox.start(["python", "away.py"])
        while await said(sandbox, "sh", "-c", "cat count 2> /dev/null || echo") == "":
            await asyncio.sleep(0.05)
        await (process.kill() if end == "kill" else sandbox.patch())
        # it counts in hundredths of seconds, and a command takes several
        counts = {await said(sandbox, "cat", "count") for _ in range(5)}
        assert len(counts) == 1


async def test_limits_that_it_cannot_hold_are_refused(pool: GvisorSandboxPool) -> None:
    with pytest.raises(EtudeError, match="gvisor sandboxes do not support.*: limits.processes"):
        pool.check(SandboxSpec(limits=Limits(processes=4)))


OWNER = """
import asyncio, sys
from etude.core.sandbox import SandboxSpec
from etude.sandbox.gvisor import GvisorSandboxPool

async def main():
    pool = GvisorSandboxPool()
    async with pool.open(SandboxSpec()) as sandbox:
        await sandbox.start(["sleep", "1000"])
        print(pool.machines.home, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_nothing_is_left_of_an_owner_that_was_killed() -> None:
    need_gvisor()
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        home = owner.stdout.readline().decode().strip()
        assert _processes_of(home)
        owner.send_signal(signal.SIGKILL)
    while _processes_of(home):
        os.sched_yield()
    assert Path(home).exists()

    async def open_another() -> None:
        await GvisorSandboxPool().close()

    asyncio.run(open_another())
    assert not Path(home).exists()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{Path(home).name}"))


def _processes_of(home: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if home.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found
