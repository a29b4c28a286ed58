"""Telemetry: events are written to the run's store in the background, and read back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from etude.core.events import EVENTS, Event
from etude.store.codec import Damaged, Stamped
from etude.store.log import Log
from etude.store.runs import Run

FLUSH_S = 0.5

Emit = Callable[[Event], None]


@contextlib.asynccontextmanager
async def event_writer(run: Run, process: str) -> AsyncIterator[Emit]:
    """For an asyncio process: what is emitted is stored twice a second, and at the end."""
    log = run.events(process, EVENTS)

    async def flush() -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await asyncio.to_thread(log.flush)

    flushing = asyncio.create_task(flush())
    try:
        yield log.append
    finally:
        flushing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await flushing
        log.flush()


def sync_event_writer(run: Run, process: str) -> Emit:
    """For a synchronous process: what is emitted is stored with the first event that comes half a
    second after the last storing. A stage's first and last events are worth a write of their
    own."""
    log = run.events(process, EVENTS)
    last = 0.0

    def emit(event: Event) -> None:
        nonlocal last
        log.append(event)
        if time.monotonic() - last > FLUSH_S or type(event).__name__.startswith("Stage"):
            log.flush()
            last = time.monotonic()

    return emit


class EventReader:
    """Reads all events of a run, as they come. Nobody but people depends on them: what is damaged
    is left out, and told."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.damaged: list[Damaged] = []
        self._logs: dict[str, tuple[Log[Event], int]] = {}

    def new(self) -> list[Stamped[Event]]:
        found: list[Stamped[Event]] = []
        for process in self._run.processes():
            log, start = self._logs.get(process) or (
                self._run.events(process, EVENTS, self.damaged.append),
                0,
            )
            records, start = log.read(start)
            self._logs[process] = (log, start)
            found += records
        return sorted(found, key=lambda stamped: stamped.t)
