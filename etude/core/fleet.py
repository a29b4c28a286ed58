"""Which workers may be sent a request, and which one gets it. Pure: the gateway asks, tells and waits.

A worker is up while it serves the `live` version or a newer one. It says which version it has when it joins, so one
that was restarted is not up before its weights are loaded. One that failed is forgotten until it joins again, and comes
back as another `Worker`: what still arrives from the old one is told apart by identity.
"""

from __future__ import annotations

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
    """Sessions that have their home here."""


class Fleet:
    def __init__(self, live: int = -1) -> None:
        self.live = live  # no worker with older weights gets a request; below 0, any weights will do
        self._workers: dict[str, Worker] = {}
        self._homes: dict[str, Worker] = {}

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

    def join(self, url: str, region: str, version: int) -> Worker:
        """A worker says that it is there. If it has less than we knew, it was restarted in the meantime."""
        known = self._workers.get(url)
        if known is not None and known.version <= version:
            known.version = version
            return known
        self._workers[url] = Worker(url, region, version)
        return self._workers[url]

    def leave(self, worker: Worker) -> None:
        if self.knows(worker):
            del self._workers[worker.url]

    def knows(self, worker: Worker) -> bool:
        return self._workers.get(worker.url) is worker

    def promise(self, version: int) -> None:
        """From now on nobody with older weights is up."""
        self.live = max(self.live, version)

    def pick(self, session: str = "") -> Worker | None:
        """The session's home, where its keys and values are; otherwise the least loaded worker becomes its home.
        The request counts against the worker until `done`. None if no worker is up."""
        up = self.up
        if not up:
            return None
        home = self._homes.get(session)
        if home is None or not self.knows(home) or not self._is_up(home):
            self.forget(session)
            home = min(up, key=lambda worker: (worker.active, worker.sessions))
            if session:
                self._homes[session] = home
                home.sessions += 1
        home.active += 1
        return home

    def done(self, worker: Worker) -> None:
        worker.active -= 1

    def forget(self, session: str) -> None:
        """The session is over."""
        if home := self._homes.pop(session, None):
            home.sessions -= 1
