"""The fleet of workers: which of them may be sent a request, and which one gets it. Pure: the
gateway asks, tells and waits.

A worker is up while it serves the `live` version or a newer one. It says which version it has when
it joins, so one that was restarted is not up before its weights are loaded. One that failed is
forgotten until it joins again, and comes back as another `Worker`: what still arrives from the old
one is told apart by identity. One that has not said for `heartbeat_timeout_s` that it is there has
failed too, although nothing broke: it is stopped, or hangs, or its host is gone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Worker:
    url: str
    region: str
    version: int
    """The weights that it serves; below 0 as long as it has none."""
    active: int = 0
    """Requests that it works on for us."""
    sessions: int = 0
    """Sessions with affinity to this worker."""
    heard: float = 0.0
    """When it last said that it is there."""
    joining: bool = False
    """It is being told what to load."""


class Fleet:
    def __init__(self, live: int = -1, heartbeat_timeout_s: float = math.inf) -> None:
        # no worker with older weights gets a request; below 0, any weights will do
        self.live = live
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._workers: dict[str, Worker] = {}
        self._silent: dict[str, Worker] = {}
        self._affinity: dict[str, Worker] = {}

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    @property
    def up(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if self._is_up(worker)]

    def _is_up(self, worker: Worker) -> bool:
        return worker.version >= max(self.live, 0)

    def behind(self, version: int) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.version < version]

    @property
    def silent(self) -> list[Worker]:
        """Those that were taken out for it, and have not joined again."""
        return list(self._silent.values())

    def join(self, url: str, region: str, version: int, now: float) -> Worker:
        """A worker says that it is there. If it has less than we knew, it was restarted in the
        meantime."""
        self._silent.pop(url, None)
        known = self._workers.get(url)
        if known is None or known.version > version:
            known = self._workers[url] = Worker(url, region, version)
        known.version, known.heard = version, now
        return known

    def expire(self, now: float) -> list[Worker]:
        """Takes out those that have been silent for too long, and says which."""
        expired = [
            worker
            for worker in self._workers.values()
            if now - worker.heard >= self._heartbeat_timeout_s
        ]
        for worker in expired:
            self.leave(worker)
            self._silent[worker.url] = worker
        return expired

    def leave(self, worker: Worker) -> None:
        if self.knows(worker):
            del self._workers[worker.url]

    def knows(self, worker: Worker) -> bool:
        return self._workers.get(worker.url) is worker

    def require_version(self, version: int) -> None:
        """From now on nobody with older weights is up."""
        self.live = max(self.live, version)

    def pick(self, session: str = "") -> Worker | None:
        """The worker for a request: the one that the session has affinity to, where its keys and
        values are; otherwise the least loaded one, which it then has affinity to. The request
        counts against the worker until `done`. None if no worker is up."""
        up = self.up
        if not up:
            return None
        home = self._affinity.get(session)
        if home is None or not self.knows(home) or not self._is_up(home):
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
        """The session is over."""
        if home := self._affinity.pop(session, None):
            home.sessions -= 1
