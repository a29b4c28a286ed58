"""Telemetry: events are written to the run's store in the background, and read back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict

from etude.core.errors import EtudeError
from etude.core.events import EVENTS, Event, StoreUsed
from etude.store.codec import Damaged, Stamped
from etude.store.log import Log
from etude.store.objects import Objects
from etude.store.runs import Run

FLUSH_S = 0.5
BUCKET_FLUSH_S = 2.0
"""Each flush is a request that costs money."""
USAGE_S = 10.0
"""Time between two events about the use of the store."""

Emit = Callable[[Event], None]


def flush_s(run: Run) -> float:
    return BUCKET_FLUSH_S if run.objects.is_bucket else FLUSH_S


def store_used(objects: Objects, process: str) -> list[StoreUsed]:
    """The requests of this process to the run's store; empty for a directory."""
    return [StoreUsed(process=process, **asdict(objects.usage))] if objects.is_bucket else []


class EventLog:
    """The events of one process, to be flushed periodically. If the run is in a bucket, they
    include the requests of the process to it."""

    def __init__(self, run: Run, process: str) -> None:
        self._run = run
        self._process = process
        self._log = run.events(process, EVENTS)
        self._told = time.monotonic()
        self.append: Emit = self._log.append

    def flush(self, *, last: bool = False) -> None:
        if last or time.monotonic() - self._told >= USAGE_S:
            self._told = time.monotonic()
            self._log.append(*store_used(self._run.objects, self._process))
        self._log.flush()


@contextlib.asynccontextmanager
async def event_writer(run: Run, process: str) -> AsyncIterator[Emit]:
    """Event writer of an asyncio process: events are stored every `flush_s`, and at the end. An
    error is raised at the next event, or at the end."""
    log = EventLog(run, process)

    async def flush() -> None:
        while True:
            await asyncio.sleep(flush_s(run))
            await asyncio.to_thread(log.flush)

    def emit(event: Event) -> None:
        if flushing.done():
            flushing.result()
        log.append(event)

    flushing = asyncio.create_task(flush())
    try:
        yield emit
    finally:
        flushing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await flushing
        log.flush(last=True)


@contextlib.contextmanager
def sync_event_writer(run: Run, process: str) -> Iterator[Emit]:
    """Event writer of a synchronous process, whose steps may take minutes: a thread stores the
    events every `flush_s`. An error is raised at the next event, or at the end."""
    log = EventLog(run, process)
    ended = threading.Event()
    wrong: list[EtudeError] = []

    def flush() -> None:
        while not wrong and not ended.wait(flush_s(run)):
            try:
                log.flush()
            except EtudeError as e:
                wrong.append(e)

    def emit(event: Event) -> None:
        if wrong:
            raise wrong[0]
        log.append(event)

    flushing = threading.Thread(target=flush, name="events", daemon=True)
    flushing.start()
    try:
        yield emit
    finally:
        ended.set()
        flushing.join()
        log.flush(last=True)


class EventReader:
    """Reads all events of a run incrementally. Only people depend on them, so damaged segments are
    left out, and reported."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.damaged: list[Damaged] = []
        self._logs: dict[str, tuple[Log[Event], int]] = {}

    def new(self) -> list[Stamped[Event]]:
        found: list[Stamped[Event]] = []
        for process in self._run.processes(known=self._logs):
            if process in self._logs:
                log, start = self._logs[process]
            else:
                log = self._run.events(process, EVENTS, self.damaged.append)
                start = 0
                if (lost := log.lost()) is not None:
                    self.damaged.append(lost)
            records, start = log.read(start)
            self._logs[process] = (log, start)
            found += records
        return sorted(found, key=lambda stamped: stamped.t)
