"""A pool over the pools of many hosts, or over one pool with a budget: `Fleet` decides, this module
waits and opens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from etude.core.clock import Clock, SystemClock
from etude.core.sandbox import TIERS, Sandbox, SandboxPool, SandboxSpec, Tier
from etude.sandbox.fleet import Fleet, Need
from etude.sandbox.limits import COPY_BYTES, memory_for

_OWNER = "here"


class FleetPool:
    """A `core.sandbox.SandboxPool` that opens sandboxes where there is room, and waits while there
    is none."""

    def __init__(
        self,
        pools: Mapping[str, SandboxPool],
        capacities: Mapping[str, Need],
        clock: Clock | None = None,
    ) -> None:
        self._pools = pools
        self._clock = clock or SystemClock()
        self._fleet = Fleet()
        self._placed: dict[int, asyncio.Future[str]] = {}
        for host, capacity in capacities.items():
            self._fleet.join(host, capacity, self._clock.now())

    @property
    def tier(self) -> Tier:
        """The weakest tier of all pools."""
        return min((pool.tier for pool in self._pools.values()), key=TIERS.index)

    def check(self, spec: SandboxSpec) -> None:
        for pool in self._pools.values():
            pool.check(spec)
        self._fleet.closed(self._fleet.want(_OWNER, need_of(spec), self._clock.now()))

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        number = self._fleet.want(_OWNER, need_of(spec), self._clock.now())
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._placed[number] = waiting
        try:
            self._place()
            async with self._pools[await waiting].open(spec) as sandbox:
                self._fleet.up(number)
                self._place()
                yield sandbox
        finally:
            del self._placed[number]
            self._fleet.closed(number)
            self._place()

    def _place(self) -> None:
        for placed in self._fleet.place():
            if not (waiting := self._placed[placed.sandbox]).done():  # the caller has not given up
                waiting.set_result(placed.host)

    def owing(self) -> dict[str, float]:
        """Called once a second; it also reports the pressure of the hosts."""
        now = self._clock.now()
        owed: dict[str, float] = {}
        for host, pool in self._pools.items():
            owed |= {f"{host} {name}": seconds for name, seconds in pool.owing().items()}
            self._fleet.report(host, pressure_here() if host == _OWNER else 0.0, now)
        self._fleet.renew(_OWNER, now)
        self._place()
        return owed

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()


def with_budget(pool: SandboxPool, budget: Need) -> FleetPool:
    """A pool whose sandboxes together use at most this budget."""
    return FleetPool({_OWNER: pool}, {_OWNER: budget})


def need_of(spec: SandboxSpec) -> Need:
    """The most that a sandbox may use. Limits that its spec leaves open are the backend's
    defaults."""
    disk = spec.limits.disk_bytes or COPY_BYTES
    return Need(
        cpus=spec.limits.cpus or 1.0,
        memory_bytes=spec.limits.memory_bytes or memory_for(disk),
        disk_bytes=2 * disk,  # working copy and temporary files
    )


def pressure_here() -> float:
    """Memory pressure of this machine, from 0 to 1. Processors do not count: too few of them make
    sandboxes slow, too little memory kills them."""
    told = {}
    with open("/proc/meminfo") as file:
        for line in file:
            name, _, rest = line.partition(":")
            told[name] = int(rest.split()[0])
    return 1.0 - told["MemAvailable"] / told["MemTotal"]
