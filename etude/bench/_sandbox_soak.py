"""Soak test of sandboxes: thousands are opened while their owners, zygotes and inner processes are
killed at random; then the leftovers on the machine are counted.

    soak.opened                sandboxes that were opened and answered
    soak.killed_agents         processes in sandboxes that were killed
    soak.killed_hosts          zygotes that were killed
    soak.killed_controllers    owners that were killed
    soak.gone_s                longest time from the death of an owner until nothing of it is left
    soak.left.*                leftover processes, namespaces, mounts, cgroups, files, loop devices
    soak.swept                 leftovers that only a sweep removed (`sandbox.reaper`)
    soak.seconds               total time
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import SandboxSpec
from etude.sandbox.namespaces import SPARES, NamespaceSandboxPool
from etude.sandbox.reaper import Footprint, sweep

_AT_ONCE = 24
_PER_OWNER = 120
_LOOK_S = 0.2
_GONE_S = 120.0
_SCRIPTS = (
    ["sh", "-c", "echo a > f; sleep 0.05"],
    ["sh", "-c", "(sleep 1000 &) ; (setsid sleep 1000 &) ; true"],
    ["python", "-c", "import os, time; os.fork(); time.sleep(0.05)"],
    ["sh", "-c", "mkdir -p d/d; head -c 200000 /dev/zero > d/d/f"],
)


async def soaked(count: int) -> dict[str, float]:
    """Run until `count` sandboxes have been opened."""
    rng, done = random.Random(count), Counter[str]()
    gone_s = 0.0
    swept = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="etude.soak.") as directory:
        footprint = Footprint(Path(directory))
        while done["opened"] < count:
            opened = await _one_owner(rng, footprint, done)
            done["opened"] += opened
            died = time.monotonic()
            while any(footprint.left()[kind] for kind in ("processes", "namespaces")):
                if time.monotonic() - died > _GONE_S:
                    break
                await asyncio.sleep(_LOOK_S)
            gone_s = max(gone_s, time.monotonic() - died)
            print(f"{done['opened']} of {count}", file=sys.stderr, flush=True)
        old, tempfile.tempdir = tempfile.tempdir, directory
        swept = sweep()
        await (await asyncio.to_thread(_closed_pool)).close()  # a new pool sweeps cgroups
        tempfile.tempdir = old
        left = footprint.left()
    return {
        "soak.opened": done["opened"],
        "soak.killed_agents": done["agents"],
        "soak.killed_hosts": done["hosts"],
        "soak.killed_controllers": done["controllers"],
        "soak.gone_s": gone_s,
        **{f"soak.left.{kind}": number for kind, number in left.items()},
        "soak.swept": swept,
        "soak.seconds": time.monotonic() - began,
    }


def _closed_pool() -> NamespaceSandboxPool:
    return NamespaceSandboxPool()


async def _one_owner(rng: random.Random, footprint: Footprint, done: Counter[str]) -> int:
    """Start an owner and kill random processes of its sandboxes, and mostly the owner itself.
    Return the number of sandboxes that it had opened."""
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "etude.bench._sandbox_soak",
        str(rng.randrange(1 << 30)),
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(footprint.directory)},
    )
    assert owner.stdout is not None
    opened: list[bytes] = []
    counting = asyncio.create_task(_collect(owner.stdout, opened))
    dies_after = rng.randrange(1, _PER_OWNER * 5 // 4)  # or ends by itself
    while owner.returncode is None and len(opened) < dies_after:
        agents = footprint.look({owner.pid})
        if agents and rng.random() < 0.5:
            done["agents"] += _kill(rng.choice(agents))
        alive = [pid for pid in footprint.zygotes if os.path.exists(f"/proc/{pid}")]
        if opened and alive and rng.random() < 0.1:
            done["hosts"] += _kill(rng.choice(alive))
        await asyncio.sleep(_LOOK_S)
    footprint.look({owner.pid})
    if owner.returncode is None:
        done["controllers"] += _kill(owner.pid)
    await owner.wait()
    await counting
    return len(opened)


async def _collect(lines: asyncio.StreamReader, into: list[bytes]) -> None:
    while line := await lines.readline():
        into.append(line)


def _kill(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


async def _own(seed: int) -> None:
    """Act as an owner: open sandboxes with commands, background processes and forks, some
    concurrently."""
    rng = random.Random(seed)
    pool = NamespaceSandboxPool(spares=SPARES)
    turn = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> None:
        script = _SCRIPTS[number % len(_SCRIPTS)]
        # killing an agent or a zygote may only fail the attempt
        async with turn:
            with contextlib.suppress(RolloutFailure, EtudeError, ValueError):
                async with pool.open(SandboxSpec(files={"a.txt": "a"})) as sandbox:
                    print("opened", flush=True)
                    await sandbox.run(script, timeout_s=20.0)
                    await sandbox.start(["sh", "-c", "sleep 1000"])
                    if rng.random() < 0.2:
                        fork = await sandbox.fork()
                        await fork.close()

    await asyncio.gather(*[one(number) for number in range(_PER_OWNER)])
    await pool.close()


if __name__ == "__main__":
    asyncio.run(_own(int(sys.argv[1])))
