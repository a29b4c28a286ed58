"""A burst of 100,000 sandboxes over 200 hosts of 16 cores and 128 GiB: the code that places them
(`sandbox.fleet`) under virtual time, with measured costs.

The time of each decision is measured on this machine while the benchmark runs; the controller is
one process, so decisions queue. The costs of a start were measured before (docs/benchmarks.md): the
zygote of a host forks sequentially, and all cores of the host share the rest of the work. A message
takes half a millisecond.

    promised.up                sandboxes that fit if each is promised its limit of memory
    promised.waiting           the rest, which waits
    burst.all_up_s             with memory overcommitted 8 times: until all answer
    burst.p50_s, p99_s         until one answers
    burst.controller_s         processor time of all decisions
    burst.host_s               all_up_s if decisions took no time, so the part of the hosts
    hosts_lost.all_up_s        10 hosts die when half are up: until all answer again
    owner_killed.gone_s        the owner dies silently: until its last sandbox is closed
    share.*                    part of one host's resource that its 500 sandboxes take: the largest
                               runs out first
    first_to_fail_at.*         sandboxes of the whole fleet at which this resource is used up
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from etude.sandbox.fleet import LEASE_S, Fleet, Need, Placed

T = TypeVar("T")
_SANDBOXES, _HOSTS, _CORES = 100_000, 200, 16
_GIB = float(1 << 30)
_ONE = Need(cpus=0.02, memory_bytes=_GIB, disk_bytes=_GIB / 16)
"""The default limits of memory and disk; 50 sandboxes, which mostly wait, share a processor."""
_MACHINE = Need(cpus=_CORES, memory_bytes=128 * _GIB, disk_bytes=64 * _GIB)
_OVERCOMMIT = 8
_FORK_S, _START_CPU_S, _CLOSE_CPU_S = 0.0012, 0.0088, 0.002
"""Processor time of a fork in the zygote, of opening and closing together, and of closing."""
_MESSAGE_S = 0.0005
_LOOK_S = 1.0
_LOST_HOSTS = 10
_PER_SANDBOX = {"memory": 1.35 / (128 * 1024), "processes": 3 / 32768, "cgroups": 2 / 65536}
"""Shares of a host's resources: PSS of its memory; three processes (the first one, a command and
its keeper) of pid_max; cgroups of the 65,536 that a memory controller supports."""


@dataclass(slots=True)
class _Machine:
    """A host as a queue: one zygote, then its cores."""

    zygote_free: float = 0.0
    cores_free: list[float] = field(default_factory=lambda: [0.0] * _CORES)
    alive: bool = True

    def start(self, arrives: float) -> float:
        self.zygote_free = max(arrives, self.zygote_free) + _FORK_S
        return self._work(self.zygote_free, _START_CPU_S - _CLOSE_CPU_S)

    def close(self, arrives: float) -> float:
        return self._work(arrives, _CLOSE_CPU_S)

    def _work(self, ready: float, seconds: float) -> float:
        ends = max(ready, self.cores_free[0]) + seconds
        heapq.heapreplace(self.cores_free, ends)
        return ends


class _World:
    """The fleet, its machines and one controller, in virtual time."""

    def __init__(self, overcommit: float, *, free_decisions: bool = False) -> None:
        self.fleet = Fleet()
        self.machines = {f"host{number}": _Machine() for number in range(_HOSTS)}
        promised = Need(
            cpus=_MACHINE.cpus * overcommit,
            memory_bytes=_MACHINE.memory_bytes * overcommit,
            disk_bytes=_MACHINE.disk_bytes * overcommit,
        )
        for name in self.machines:
            self.fleet.join(name, promised, 0.0)
        self.controller_free = 0.0
        self.controller_s = 0.0
        self.up_at: dict[int, float] = {}
        self._free_decisions = free_decisions
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, then: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), then))

    def decide(self, when: float, decision: Callable[[], T]) -> tuple[float, T]:
        """The time at which the controller has taken this decision, and its result."""
        began = time.thread_time()
        result = decision()
        took = 0.0 if self._free_decisions else time.thread_time() - began
        self.controller_s += took
        self.controller_free = max(when, self.controller_free) + took
        return self.controller_free, result

    def run(self, until: Callable[[], bool], limit_s: float = 600.0) -> float:
        """Run until the condition holds or no events are left. Return the time."""
        now = 0.0
        while self._events and not until() and now < limit_s:
            now, _, then = heapq.heappop(self._events)
            then(now)
        return now

    def burst(self, count: int) -> None:
        for _ in range(count):
            self.decide(0.0, lambda: self.fleet.want("run", _ONE, 0.0))
        self.at(self.controller_free, self.place)
        self.at(_LOOK_S, self.look)

    def place(self, now: float) -> None:
        decided, placed = self.decide(now, self.fleet.place)
        for each in placed:
            machine = self.machines[each.host]
            if machine.alive:
                done = machine.start(decided + _MESSAGE_S) + _MESSAGE_S
                self.at(done, partial(self._is_up, each))

    def _is_up(self, placed: Placed, now: float) -> None:
        if self.machines[placed.host].alive:
            decided, _ = self.decide(now, lambda: self.fleet.up(placed.sandbox))
            self.up_at[placed.sandbox] = decided
            self.place(decided)

    def look(self, now: float) -> None:
        """Collect the reports of hosts and expire leases, once a second."""
        for name, machine in self.machines.items():
            if machine.alive:
                self.fleet.report(name, 0.0, now)
        self.fleet.renew("run", now)
        _, ended = self.decide(now, lambda: self.fleet.expire(now))
        for lost in ended.lost:
            self.up_at.pop(lost, None)
        self.place(now)
        self.at(now + _LOOK_S, self.look)


def simulated() -> dict[str, float]:
    figures = _promised()
    figures |= _burst()
    figures |= _hosts_lost()
    figures |= _owner_killed()
    shares = {name: each * _SANDBOXES / _HOSTS for name, each in _PER_SANDBOX.items()}
    figures |= {f"share.{name}": share for name, share in shares.items()}
    first = max(shares, key=lambda name: shares[name])
    figures[f"first_to_fail_at.{first}"] = _SANDBOXES / shares[first]
    return figures


def _promised() -> dict[str, float]:
    world = _World(overcommit=1.0)
    world.burst(_SANDBOXES)
    world.run(lambda: False, limit_s=5.0)
    counts = world.fleet.counts()
    return {"promised.up": counts["up"], "promised.waiting": counts["waiting"]}


def _burst() -> dict[str, float]:
    world = _World(_OVERCOMMIT)
    world.burst(_SANDBOXES)
    world.run(lambda: len(world.up_at) == _SANDBOXES)
    times = sorted(world.up_at.values())
    ideal = _World(_OVERCOMMIT, free_decisions=True)
    ideal.burst(_SANDBOXES)
    ideal.run(lambda: len(ideal.up_at) == _SANDBOXES)
    return {
        "burst.all_up_s": times[-1],
        "burst.p50_s": times[len(times) // 2],
        "burst.p99_s": times[len(times) * 99 // 100],
        "burst.controller_s": world.controller_s,
        "burst.host_s": max(ideal.up_at.values()),
    }


def _hosts_lost() -> dict[str, float]:
    world = _World(_OVERCOMMIT)
    world.burst(_SANDBOXES)
    world.run(lambda: len(world.up_at) >= _SANDBOXES // 2)
    for machine in itertools.islice(world.machines.values(), _LOST_HOSTS):
        machine.alive = False
    dead = {name for name, machine in world.machines.items() if not machine.alive}

    def whole() -> bool:
        return len(world.up_at) == _SANDBOXES and not any(world.fleet.on(name) for name in dead)

    return {"hosts_lost.all_up_s": world.run(whole)}


def _owner_killed() -> dict[str, float]:
    world = _World(_OVERCOMMIT)
    world.burst(_SANDBOXES)
    now = world.run(lambda: len(world.up_at) == _SANDBOXES)
    killed, gone = now, now
    while now <= killed + 2 * LEASE_S:
        now += _LOOK_S
        for name in world.machines:
            world.fleet.report(name, 0.0, now)
        decided, ended = world.decide(now, partial(world.fleet.expire, now))
        for each in ended.to_close:
            gone = max(gone, world.machines[each.host].close(decided + _MESSAGE_S))
    assert not sum(world.fleet.counts().values())
    return {"owner_killed.gone_s": gone - killed}
