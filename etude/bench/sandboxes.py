"""Benchmark of sandboxes: start times, one by one and in a burst, memory, and the cost of a fork.

    namespaces.start_p50_ms, start_p99_ms   from the request to a sandbox that answers, fully
                                            isolated
    namespaces.echo_p50_ms, echo_p99_ms     the same plus a first command, to its end
    namespaces.close_p50_ms                 from the end of the last command until nothing is left
    namespaces.burst_s                      1,000 requested at once, until the last one answers
    namespaces.burst_close_s                until nothing of them is left
    namespaces.starts_per_s                 sandboxes opened and closed for 10 s, 64 at a time
    namespaces.mib_each                     PSS of all their processes, divided by their number
    namespaces.kernel_mib_each              the remaining decrease of MemAvailable, likewise
    namespaces.fork_1gb_p50_ms, .._p99_ms   a fork of a working copy of 1 GB that was written to
                                            since the last one, 50 ms ago, until the fork answers
    namespaces.branch_postgres_p50_ms, ..   the same with a PostgreSQL of 375 MB (if installed),
                                            until the fork's own server answers
    namespaces.branch_postgres_row_p50_ms   and until it has returned a row of its one large table,
                                            which is copied when it is opened
    gvisor.start_p50_ms, echo_p50_ms        as above, in a sandbox of gVisor (if runsc is installed)
    gvisor.fork_p50_ms                      a fork of a running one, until the fork answers
    gvisor.live_fork_p50_ms                 the same with PostgreSQL (100,000 rows), Redis and a
                                            Python process at work in it, if those are installed
    gvisor.live_restore_p50_ms              the part of it from the checkpoint until the fork
                                            answers
    vm.start_p50_ms, echo_p50_ms            as above, in a virtual machine (if QEMU is installed)
    vm.fork_p50_ms                          a fork of a running one, until the fork answers
    host.start_p50_ms, host.echo_p50_ms     as above, through a sandbox host on this machine

For comparison it also measures those of bubblewrap, crun and runsc that are installed, with
namespaces, a read-only /usr, no network, and `echo` as the command: `NAME.echo_p50_ms` and
`echo_p99_ms`, until the process has ended. They start an engine for each sandbox and have no
working copy, so they are a yardstick, not competitors. `load_before` is the machine's load (1
minute) at the start: times are wall-clock times, and include the effect of other processes.

Other benchmarks take the place of these: `--simulate` places 100,000 sandboxes on 200 hosts under
virtual time (`_sandbox_fleet`), `--soak N` opens N with random kills and counts the leftovers
(`_sandbox_soak`), and `--repositories FORKS` uses real packages as images
(`_sandbox_repositories`).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.bench._sandbox_database import branched
from etude.bench._sandbox_fleet import simulated
from etude.bench._sandbox_repositories import forked_repositories
from etude.bench._sandbox_soak import soaked
from etude.bench._sandbox_tiers import tiers
from etude.core.sandbox import Limits, SandboxSpec
from etude.sandbox.namespaces import SPARES, NamespaceSandboxPool

_STARTS = 200
_OTHER_STARTS = 50
_BURST = 1000
_AT_ONCE = 64
_SUSTAINED_S = 10.0
_FORKS = 20
_APART_S = 0.05
_LONG_S = 600.0
_GB = 1000 * 1000 * 1000
_UP = "up\n"


def run(
    simulate: bool = False, soak: int | None = None, repositories: int | None = None
) -> dict[str, float]:
    if simulate:
        return simulated()
    if soak is not None:
        return asyncio.run(soaked(soak))
    if repositories is not None:
        return asyncio.run(forked_repositories(repositories))
    figures = {"load_before": os.getloadavg()[0]}
    figures |= asyncio.run(_namespaces())
    figures |= tiers()
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as directory:
        for name, argv in others(Path(directory)).items():
            times = sorted(_echo_s(argv) for _ in range(_OTHER_STARTS))
            figures |= _percentiles(f"{name}.echo", times)
    return figures


async def _namespaces() -> dict[str, float]:
    pool = NamespaceSandboxPool(spares=SPARES)
    try:
        figures = await _one_by_one(pool)
        figures |= await _sustained(pool)
        figures |= await _burst(pool)
        figures |= await _fork(pool)
        for name, times in (await branched(pool)).items():
            figures |= _percentiles(name, times)
    finally:
        await pool.close()
    return {f"namespaces.{name}": value for name, value in figures.items()}


async def _one_by_one(pool: NamespaceSandboxPool) -> dict[str, float]:
    starts, echoes, closes = [], [], []
    for _ in range(_STARTS):
        began = time.perf_counter()
        async with pool.open(SandboxSpec()) as sandbox:
            starts.append(time.perf_counter() - began)
            ran = await sandbox.run(["echo", "up"], timeout_s=_LONG_S)
            assert ran.output == _UP
            ended = time.perf_counter()
            echoes.append(ended - began)
        closes.append(time.perf_counter() - ended)
    return (
        _percentiles("start", sorted(starts))
        | _percentiles("echo", sorted(echoes))
        | {"close_p50_ms": 1e3 * sorted(closes)[len(closes) // 2]}
    )


async def _sustained(pool: NamespaceSandboxPool) -> dict[str, float]:
    began = time.perf_counter()
    started = 0

    async def one_after_another() -> None:
        nonlocal started
        while time.perf_counter() < began + _SUSTAINED_S:
            async with pool.open(SandboxSpec()):
                started += 1

    await asyncio.gather(*[one_after_another() for _ in range(_AT_ONCE)])
    return {"starts_per_s": started / (time.perf_counter() - began)}


async def _burst(pool: NamespaceSandboxPool) -> dict[str, float]:
    available = _available_mib()
    began = time.perf_counter()
    opened = await asyncio.gather(*[pool.start(SandboxSpec(), {}) for _ in range(_BURST)])
    burst_s = time.perf_counter() - began
    pss_mib = sum(map(_pss_mib, _below(pool.zygote_pid)))
    used_mib = available - _available_mib()
    began = time.perf_counter()
    await asyncio.gather(*[sandbox.close() for sandbox in opened])
    return {
        "burst_s": burst_s,
        "burst_close_s": time.perf_counter() - began,
        "mib_each": pss_mib / _BURST,
        "kernel_mib_each": max(0.0, used_mib - pss_mib) / _BURST,
    }


async def _fork(pool: NamespaceSandboxPool) -> dict[str, float]:
    limits = Limits(disk_bytes=2 * _GB)
    script = f"for n in $(seq 100); do head -c {_GB // 100} /dev/urandom > f$n; done; du -sb ."
    async with pool.open(SandboxSpec(limits=limits)) as sandbox:
        filled = await sandbox.run(["sh", "-c", script], timeout_s=_LONG_S)
        assert int(filled.output.split()[0]) >= _GB, filled.output
        times = []
        for number in range(_FORKS):
            await sandbox.write("last", str(number))  # so that each fork has something to freeze
            await asyncio.sleep(_APART_S)
            began = time.perf_counter()
            fork = await sandbox.fork()
            times.append(time.perf_counter() - began)
            await fork.close()
    return _percentiles("fork_1gb", sorted(times))


def others(directory: Path) -> dict[str, list[str]]:
    """Installed sandbox engine -> the command that runs `echo` in it."""
    links = {name: os.readlink(f"/{name}") for name in ("bin", "lib", "lib64") if _is_link(name)}
    found = {}
    if shutil.which("bwrap"):
        shown = [word for name, to in links.items() for word in ("--symlink", to, f"/{name}")]
        plain = "--unshare-all --unshare-user --clearenv --ro-bind /usr /usr --proc /proc"
        places = "--dev /dev --tmpfs /tmp --tmpfs /work --chdir /work /usr/bin/echo up"
        found["bubblewrap"] = ["bwrap", *plain.split(), *shown, *places.split()]
    if shutil.which("crun"):
        bundle = directory / "crun"
        for name in ("usr", "proc", "dev", "tmp", "work"):
            (bundle / "rootfs" / name).mkdir(parents=True)
        for name, to in links.items():
            (bundle / "rootfs" / name).symlink_to(to)
        (bundle / "config.json").write_text(json.dumps(_oci_config()))
        # crun refuses a mixture of both versions of cgroups, and needs neither here
        private = "umount /sys/fs/cgroup/unified 2>/dev/null; exec crun run -b $0 etude-bench-$$"
        found["crun"] = ["unshare", "-m", "sh", "-c", private, str(bundle)]
    if shutil.which("runsc"):
        options = ["--network=none", "--ignore-cgroups", f"--root={directory / 'runsc'}"]
        found["runsc"] = ["runsc", *options, "do", "/usr/bin/echo", "up"]
    return found


def _is_link(name: str) -> bool:
    return os.path.islink(f"/{name}")


def _oci_config() -> dict[str, Any]:
    private = ["nosuid", "nodev"]
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/usr/bin/echo", "up"],
            "env": ["PATH=/usr/bin"],
            "cwd": "/",
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": private},
            {"destination": "/work", "type": "tmpfs", "source": "tmpfs", "options": private},
            {"destination": "/usr", "source": "/usr", "options": ["rbind", "ro"]},
        ],
        "linux": {
            "namespaces": [
                {"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount", "cgroup")
            ]
        },
    }


def _echo_s(argv: Sequence[str]) -> float:
    began = time.perf_counter()
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    took_s = time.perf_counter() - began
    assert ran.stdout == _UP, f"{argv[0]}: {ran.stderr or ran.stdout}"
    return took_s


def _percentiles(name: str, times_s: list[float]) -> dict[str, float]:
    """Percentiles of sorted times, in milliseconds."""
    return {
        f"{name}_p{share}_ms": 1e3 * times_s[min(len(times_s) - 1, len(times_s) * share // 100)]
        for share in (50, 99)
    }


def _below(pid: int) -> list[int]:
    """The processes that descend from this one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    found = list(children.get(pid, []))
    for each in found:
        found += children.get(each, [])
    return found


def _pss_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # a short-lived one that makes a spare
        return 0.0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def _available_mib() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 1024
