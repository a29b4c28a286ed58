"""Admission, placement and leases of sandboxes on many hosts, without a clock, a lock or a socket.

Hosts join with a capacity and report their pressure. Owners ask for sandboxes, which wait in order
of arrival and are placed on the host with enough room and the least pressure. Each host starts only
so many at once, since a host that starts everything at the same moment starts nothing. An owner or
a host that is silent for the length of a lease is gone: the sandboxes of the owner are to be
closed, and those of the host wait again for another one.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from etude.core.errors import EtudeError

LEASE_S = 60.0
"""Everything of a killed owner is gone after two of these: one until it is noticed, and time to
close."""
PRESSED = 0.95
"""A host with more pressure than this gets no more sandboxes."""
_TINY = 1e-6
"""Tolerance in processors: far more than the rounding errors in sums of fractions, however many
sandboxes came and went."""
_PLAIN_STEP = 1.0 / 64
"""Differences of pressure below this do not count, so hosts take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The most that one sandbox may use, or the capacity of a host for all of its sandboxes."""

    cpus: float
    memory_bytes: float
    disk_bytes: float

    def fits(self, into: Need) -> bool:
        return (
            self.cpus <= into.cpus + _TINY
            and self.memory_bytes <= into.memory_bytes
            and self.disk_bytes <= into.disk_bytes
        )

    def plus(self, other: Need, sign: int = 1) -> Need:
        return Need(
            cpus=self.cpus + sign * other.cpus,
            memory_bytes=self.memory_bytes + sign * other.memory_bytes,
            disk_bytes=self.disk_bytes + sign * other.disk_bytes,
        )

    def share_of(self, whole: Need) -> float:
        """Share of the scarcest resource."""
        return max(
            self.cpus / whole.cpus,
            self.memory_bytes / whole.memory_bytes,
            self.disk_bytes / whole.disk_bytes,
        )


NOTHING = Need(cpus=0.0, memory_bytes=0.0, disk_bytes=0.0)


@dataclass(frozen=True, slots=True)
class Placed:
    """A sandbox to be started on a host."""

    sandbox: int
    host: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Sandboxes to be closed, with their hosts, and sandboxes that were lost with their hosts and
    wait again."""

    to_close: tuple[Placed, ...]
    lost: tuple[int, ...]


@dataclass(slots=True)
class _Host:
    capacity: Need
    starts_at_once: int
    heard: float
    used: Need = NOTHING
    pressure: float = 0.0
    starting: int = 0
    sandboxes: set[int] = field(default_factory=set)
    entry: int = 0
    """The host's newest entry in the heap; older ones do not count."""


@dataclass(slots=True)
class _Wanted:
    owner: str
    need: Need
    host: str = ""
    is_up: bool = False


class Fleet:
    """All hosts and all sandboxes."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._hosts: dict[str, _Host] = {}
        self._sandboxes: dict[int, _Wanted] = {}
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._owners: dict[str, float] = {}
        self._owned: dict[str, set[int]] = {}
        self._numbers = itertools.count(1)
        self._entries = itertools.count(1)
        self._heap: list[tuple[float, int, str]] = []

    def join(self, host: str, capacity: Need, now: float, *, starts_at_once: int = 32) -> None:
        """Add a host. One that joins again under the same name was restarted, and has no
        sandboxes."""
        self._drop(host)
        self._hosts[host] = _Host(capacity, starts_at_once, heard=now)
        self._push(host)

    def report(self, host: str, pressure: float, now: float) -> None:
        """Record that a host is alive. `pressure`: how busy it is, from 0 to 1, by its scarcest
        resource. Reports of a host that was given up are ignored until it joins again."""
        if host in self._hosts:
            self._hosts[host].heard = now
            self._hosts[host].pressure = pressure
            self._push(host)

    def want(self, owner: str, need: Need, now: float) -> int:
        """The number of a sandbox that will be placed. EtudeError if no host can ever hold it."""
        if self._hosts and not any(need.fits(each.capacity) for each in self._hosts.values()):
            raise EtudeError(
                f"a sandbox needs {need.cpus:g} processors, {need.memory_bytes / 2**20:.0f} MiB "
                f"of memory and {need.disk_bytes / 2**20:.0f} MiB of disk, more than any host "
                f"has: lower the task's limits, or raise [sandbox.budget]"
            )
        number = next(self._numbers)
        self._owners[owner] = now
        self._owned.setdefault(owner, set()).add(number)
        self._sandboxes[number] = _Wanted(owner, need)
        self._waiting[number] = None
        return number

    def place(self) -> list[Placed]:
        """Place as many waiting sandboxes as there is room for, in their order, so that smaller
        ones cannot overtake a large one for ever."""
        placed: list[Placed] = []
        while self._waiting:
            number = next(iter(self._waiting))
            host = self._best(self._sandboxes[number].need)
            if host is None:
                break
            del self._waiting[number]
            self._put(number, host)
            placed.append(Placed(number, host))
        return placed

    def up(self, number: int) -> None:
        """Record that a sandbox answers. One that was closed meanwhile is ignored."""
        wanted = self._sandboxes.get(number)
        if wanted and wanted.host and not wanted.is_up:
            wanted.is_up = True
            self._hosts[wanted.host].starting -= 1
            self._push(wanted.host)

    def failed(self, number: int) -> None:
        """Record that a sandbox could not be started on its host: it is the next to be placed."""
        if number in self._sandboxes:
            self._take(number)
            self._waiting[number] = None
            self._waiting.move_to_end(number, last=False)

    def closed(self, number: int) -> None:
        if number in self._sandboxes:
            self._take(number)
            self._waiting.pop(number, None)
            owner = self._sandboxes.pop(number).owner
            self._owned[owner].discard(number)

    def renew(self, owner: str, now: float) -> None:
        if owner in self._owners:
            self._owners[owner] = now

    def expire(self, now: float) -> Ended:
        """End the leases of silent hosts and owners."""
        silent = [name for name, each in self._hosts.items() if now - each.heard >= self._lease_s]
        lost = [number for host in silent for number in self._drop(host)]
        to_close: list[Placed] = []
        for owner in [name for name, heard in self._owners.items() if now - heard >= self._lease_s]:
            for number in sorted(self._owned.pop(owner)):
                if host := self._sandboxes[number].host:
                    to_close.append(Placed(number, host))
                    self._take(number)
                self._waiting.pop(number, None)
                del self._sandboxes[number]
            del self._owners[owner]
        return Ended(tuple(to_close), tuple(n for n in lost if n in self._sandboxes))

    def counts(self) -> Counter[str]:
        """Numbers of sandboxes that wait, are being started, and are up."""
        starting = sum(each.starting for each in self._hosts.values())
        placed = sum(len(each.sandboxes) for each in self._hosts.values())
        return Counter(waiting=len(self._waiting), starting=starting, up=placed - starting)

    def on(self, host: str) -> frozenset[int]:
        return frozenset(self._hosts[host].sandboxes) if host in self._hosts else frozenset()

    def _best(self, need: Need) -> str | None:
        """The least pressed host with enough room. Full hosts enter the heap again when one of
        their sandboxes ends."""
        skipped: list[tuple[float, int, str]] = []
        found = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            host = self._hosts.get(entry[2])
            if host is None or host.entry != entry[1] or not _open(host):
                continue
            if need.fits(host.capacity.plus(host.used, -1)):
                found = entry[2]
            skipped.append(entry)
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return found

    def _put(self, number: int, host: str) -> None:
        wanted, there = self._sandboxes[number], self._hosts[host]
        wanted.host, wanted.is_up = host, False
        there.used = there.used.plus(wanted.need)
        there.starting += 1
        there.sandboxes.add(number)
        self._push(host)

    def _take(self, number: int) -> None:
        wanted = self._sandboxes[number]
        if (there := self._hosts.get(wanted.host)) is not None:
            there.used = there.used.plus(wanted.need, -1)
            there.starting -= not wanted.is_up
            there.sandboxes.discard(number)
            self._push(wanted.host)
        wanted.host, wanted.is_up = "", False

    def _drop(self, host: str) -> list[int]:
        """Remove a host. Return its sandboxes, which wait again, before all others."""
        there = self._hosts.pop(host, None)
        numbers = sorted(there.sandboxes, reverse=True) if there else []
        for number in numbers:
            self._sandboxes[number].host = ""
            self._sandboxes[number].is_up = False
            self._waiting[number] = None
            self._waiting.move_to_end(number, last=False)
        return numbers[::-1]

    def _push(self, name: str) -> None:
        host = self._hosts[name]
        host.entry = next(self._entries)
        if _open(host):
            pressure = max(host.pressure, host.used.share_of(host.capacity))
            rank = round(pressure / _PLAIN_STEP) + host.starting / host.starts_at_once
            heapq.heappush(self._heap, (rank, host.entry, name))


def _open(host: _Host) -> bool:
    return host.starting < host.starts_at_once and host.pressure <= PRESSED
