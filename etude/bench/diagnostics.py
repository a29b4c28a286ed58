"""Benchmark of diagnostics after an edit: latency of language servers for text that is not saved
yet.

A sandbox contains a package of 24 modules. One module is changed again and again, alternately with
and without a mistake, and never saved. A round trip is the wait of the edit tool: it sends the text
to every server and collects the diagnostics of all.

    edits                     number of round trips
    p50_ms, p95_ms            their percentiles
    first_ms                  the first one, which starts the servers
    ruff.p50_ms, ty.p50_ms    each server alone; a server that is not installed is left out
    noticed                   share of the mistakes with a diagnostic
    untouched                 1 if the file on disk is unchanged
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence

from etude.core.errors import EtudeError
from etude.core.harness_config import SERVERS, CodeConfig
from etude.core.sandbox import Limits, Sandbox, SandboxSpec
from etude.harness.code.servers import LanguageServers
from etude.sandbox.mounts import mount_programs
from etude.sandbox.pool import open_sandbox_pool

EDITS = 200
MODULES = 24
LIMITS = Limits(memory_bytes=2 << 30, processes=64)
_MODULE = '''\
from __future__ import annotations

from dataclasses import dataclass

{imports}


@dataclass(frozen=True)
class Item{n}:
    """A thing with a price."""

    name: str
    price: int
    count: int = 1

    def total(self, discount: int = 0) -> int:
        full = self.price * self.count
        return max(full - full * discount // 100, 0)


def cheapest_{n}(items: list[Item{n}]) -> str:
    return min(items, key=lambda item: item.price).name
'''


def run() -> dict[str, float]:
    return asyncio.run(_run())


async def _run() -> dict[str, float]:
    servers = CodeConfig().diagnostics
    mounts = mount_programs([argv[0] for argv in servers.values()], SERVERS)
    pool = open_sandbox_pool("namespaces", mounts=mounts, limits=LIMITS)
    files = {f"shop/module_{n}.py": _module(n) for n in range(MODULES)} | {"shop/__init__.py": ""}
    try:
        async with pool.open(SandboxSpec(files=files)) as sandbox:
            figures = await _measure(sandbox, servers, "")
            for name in servers:
                if f"without.{name}" not in figures:
                    alone = await _measure(sandbox, {name: servers[name]}, f"{name}.")
                    figures[f"{name}.p50_ms"] = alone[f"{name}.p50_ms"]
            saved = await sandbox.read("shop/module_7.py")
            return {**figures, "untouched": float(saved == files["shop/module_7.py"])}
    finally:
        await pool.close()


def _module(n: int) -> str:
    imports = f"from shop.module_{n - 1} import Item{n - 1}, cheapest_{n - 1}" if n else ""
    return _MODULE.format(n=n, imports=imports)


async def _measure(
    sandbox: Sandbox, servers: Mapping[str, Sequence[str]], prefix: str
) -> dict[str, float]:
    source = LanguageServers(sandbox, servers, timeout_s=60.0)
    good = _module(7)
    bad = good.replace("self.price * self.count", "self.price * self.amount")
    took: list[float] = []
    counts: list[int] = []
    for number in range(EDITS + 1):
        began = time.perf_counter()
        found = await source.check("shop/module_7.py", bad if number % 2 else good)
        took.append(1000 * (time.perf_counter() - began))
        counts.append(len(found))
    absent = {f"without.{name}": 1.0 for name in source.missing()}
    if len(absent) == len(servers):
        raise EtudeError("no language server is installed: pip install 'etude[diagnostics]'")
    first, *rest = took
    ordered = sorted(rest)
    return {
        f"{prefix}edits": float(EDITS),
        f"{prefix}first_ms": first,
        f"{prefix}p50_ms": statistics.median(ordered),
        f"{prefix}p95_ms": ordered[int(0.95 * len(ordered))],
        f"{prefix}noticed": statistics.mean(n > counts[0] for n in counts[1::2]),
        **absent,
    }
