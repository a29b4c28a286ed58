"""The fleet of workers: their states, and the choice of the worker for a request. Pure: the gateway
asks, reports and waits; the simulator does the same under virtual time.

A worker holds a lease, which every heartbeat renews, and is in one of these states:

    unknown ──join──> syncing ──loaded──> live ──drain──> draining ──lease over──> gone
                         ^                 │  ^               │
                         │   lease over    v  │ join          └─ resume ──> syncing or live
                         └───── join ── suspect ──long silent──> gone

    syncing or live ──its region is put into quarantine──> quarantined ──released──> either

Only a live worker is sent requests: its lease holds, and it serves the oldest version that may be
sampled from (`floor`) or a newer one. A worker with an older version is syncing. A worker whose
lease has run out is suspect although nothing broke: it is stopped, or hangs, or its host is gone. A
worker that comes back is a new `Worker`, so late answers from the old one are told apart by
identity. A worker that failed while it was draining is draining again when it joins, unless its
lease ran out in between: by then there may be another worker at its address.

The floor rises when the fleet can afford it (`may_raise_floor`), not when its slowest worker has
loaded: workers that are then behind are syncing, and start no request until they have caught up.
This keeps the window's promise: a request is started with the floor of its time or newer weights,
and never continued with older ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container
from dataclasses import dataclass
from enum import Enum

QUORUM = 0.5
"""Share of the workers that must serve a version before the others are left behind."""
GONE_AFTER = 30
"""Heartbeat timeouts after which a suspect is forgotten, if there are other workers."""


class WorkerState(Enum):
    UNKNOWN = "unknown"
    SYNCING = "syncing"
    LIVE = "live"
    QUARANTINED = "quarantined"
    SUSPECT = "suspect"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Worker:
    url: str
    region: str
    version: int
    """The version of the weights that it serves; below 0 as long as it has none."""
    active: int = 0
    """Requests from us that it is working on."""
    sessions: int = 0
    """Sessions with affinity to this worker."""
    heard: float = 0.0
    """The time of its last heartbeat."""
    stalled: float = -math.inf
    """The time of its last heartbeat after a silence that was too long for a healthy worker, but
    shorter than its lease."""
    joining: bool = False
    """True while it is being told which version to load."""
    draining: bool = False
    """True if it gets no new requests because it is wanted elsewhere."""
    is_closed: bool = False
    """True if the worker itself reports that it accepts no requests now."""


class Fleet:
    def __init__(
        self,
        live: int = -1,
        heartbeat_timeout_s: float = math.inf,
        *,
        awaits_floor: bool = False,
    ) -> None:
        """`live`: the floor; below 0, any weights will do. `awaits_floor`: no worker is up before a
        floor is set. A restarted gateway needs that: it cannot know what was promised before, and
        some workers may be far behind."""
        self.floor = live
        self._awaits_floor = awaits_floor
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._workers: dict[str, Worker] = {}
        self._suspects: dict[str, Worker] = {}
        self._gone: set[str] = set()  # ever gone; known workers are looked up first
        # URL of a worker that failed while it was draining -> its last heartbeat
        self._drained: dict[str, float] = {}
        self._affinity: dict[str, Worker] = {}
        self.quarantined: frozenset[str] = frozenset()
        """Regions that compute something different from the others (`core.quarantine`): they get no
        requests."""
        self._quorum: tuple[int, float] | None = None  # a version, and since when a quorum has it

    @property
    def workers(self) -> list[Worker]:
        """All workers whose lease holds."""
        return list(self._workers.values())

    @property
    def up(self) -> list[Worker]:
        """The workers that may be sent a request."""
        return [worker for worker in self._workers.values() if self._is_up(worker)]

    def _is_up(self, worker: Worker) -> bool:
        has_floor = worker.version >= max(self.floor, 0)
        return not self._awaits_floor and self._is_wanted(worker) and has_floor

    def _is_wanted(self, worker: Worker) -> bool:
        is_given_away = worker.draining or worker.is_closed
        return not is_given_away and worker.region not in self.quarantined

    def state(self, url: str) -> WorkerState:
        if (worker := self._workers.get(url)) is not None:
            if worker.draining or worker.is_closed:
                return WorkerState.DRAINING
            if not self._is_wanted(worker):
                return WorkerState.QUARANTINED
            return WorkerState.LIVE if self._is_up(worker) else WorkerState.SYNCING
        if url in self._suspects:
            return WorkerState.SUSPECT
        return WorkerState.GONE if url in self._gone else WorkerState.UNKNOWN

    def behind(self, version: int) -> list[Worker]:
        return [
            worker
            for worker in self._workers.values()
            if worker.version < version and self._is_wanted(worker)
        ]

    @property
    def suspects(self) -> list[Worker]:
        """The workers that were taken out for their silence and have not joined again."""
        return list(self._suspects.values())

    def join(
        self, url: str, region: str, version: int, now: float, *, is_closed: bool = False
    ) -> Worker:
        """Process a heartbeat of a worker, which renews its lease. A worker with an older version
        than the one we knew was restarted in the meantime."""
        self._suspects.pop(url, None)
        known = self._workers.get(url)
        if known is None or known.version > version:
            draining = url in self._drained or (known is not None and known.draining)
            known = self._workers[url] = Worker(url, region, version, draining=draining)
        elif self.has_stalled(known, now, now):
            known.stalled = now
        self._drained.pop(url, None)
        known.version, known.heard, known.is_closed = version, now, is_closed
        return known

    def expire(self, now: float) -> list[Worker]:
        """Take out the workers whose lease has run out, and return them. Suspects that stay silent
        are forgotten unless they are the last workers, since sessions that wait for them have no
        other."""
        expired = [
            worker
            for worker in self._workers.values()
            if now - worker.heard >= self._heartbeat_timeout_s
        ]
        for worker in expired:
            self.leave(worker)
            if not worker.draining:
                self._suspects[worker.url] = worker
        for url, heard in list(self._drained.items()):
            if now - heard >= self._heartbeat_timeout_s:
                del self._drained[url]
        for worker in self.suspects if self._workers else ():
            if now - worker.heard >= GONE_AFTER * self._heartbeat_timeout_s:
                del self._suspects[worker.url]
                self._gone.add(worker.url)
        return expired

    def leave(self, worker: Worker) -> None:
        """Take out a worker that failed."""
        if self.knows(worker):
            del self._workers[worker.url]
            self._gone.add(worker.url)
            if worker.draining:
                self._drained[worker.url] = worker.heard

    def drain(self, url: str, draining: bool = True) -> Worker | None:
        """Send a worker no new requests from now on, so that it can be used elsewhere once none are
        `active`; or undo that. Returns None for a worker that is not in the fleet."""
        if (worker := self._workers.get(url)) is not None:
            worker.draining = draining
        return worker

    def spares(self, url: str, keep: int) -> bool:
        """True if at least `keep` workers would be up without this one."""
        return sum(worker.url != url for worker in self.up) >= keep

    def quarantine(self, regions: Collection[str]) -> None:
        """Put these regions into quarantine, and release all others."""
        self.quarantined = frozenset(regions)

    def knows(self, worker: Worker) -> bool:
        return self._workers.get(worker.url) is worker

    def has_stalled(self, worker: Worker, since: float, now: float) -> bool:
        """True if the worker was silent for long after `since`, although its lease holds: a request
        made then took longer than it should have."""
        return worker.stalled > since or now - worker.heard >= self._heartbeat_timeout_s / 2

    def may_raise_floor(
        self, version: int, now: float, refused: Container[Worker] = frozenset()
    ) -> bool:
        """True if requests may be limited to this version and newer ones: at once when all workers
        have it; otherwise when a quorum has had it for as long as a worker may be silent. Workers
        that cannot load it (`refused`) are not waited for; nor, while there are others, are workers
        without any weights, which have just started and load a whole model. If all of them are just
        starting, they are waited for like any others: sessions stay where they start, and the first
        worker to be ready would get them all. Call this often while workers load."""
        able = [
            worker
            for worker in self._workers.values()
            if self._is_wanted(worker) and worker not in refused
        ]
        loaded = [worker for worker in able if worker.version >= 0]
        wanted = able if self._awaits_floor else loaded or able
        ready = sum(worker.version >= version for worker in wanted)
        if ready == len(wanted):
            return True
        if ready < max(1, QUORUM * len(wanted)):
            self._quorum = None
            return False
        if self._quorum is None or self._quorum[0] != version:
            self._quorum = (version, now)
        return now - self._quorum[1] >= self._heartbeat_timeout_s

    def raise_floor(self, version: int) -> None:
        """Send no more requests to workers with older weights."""
        self.floor = max(self.floor, version)
        self._awaits_floor = False

    def pick(self, session: str = "") -> Worker | None:
        """The worker for a request: the one that the session has affinity to, which holds its keys
        and values; otherwise the least loaded one, which the session then has affinity to. The
        request counts against the worker until `done`. None if no worker is up."""
        home = self._affinity.get(session)
        if home is None or not self.knows(home) or not self._is_up(home):
            if not (up := self.up):
                return None
            self.forget(session)
            home = min(up, key=lambda worker: (worker.active, worker.sessions))
            if session:
                self._affinity[session] = home
                home.sessions += 1
        home.active += 1
        return home

    def done(self, worker: Worker) -> None:
        worker.active -= 1

    def forget(self, session: str) -> None:
        """End a session."""
        if home := self._affinity.pop(session, None):
            home.sessions -= 1
