"""Telemetry: events are written to the run's store in the background, and read back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from etude.core.errors import EtudeError
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


@contextlib.contextmanager
def sync_event_writer(run: Run, process: str) -> Iterator[Emit]:
    """For a synchronous process, whose steps may take minutes: a thread stores what is emitted
    twice a second. What went wrong there is raised at the next event, or at the end."""
    log = run.events(process, EVENTS)
    ended = threading.Event()
    wrong: list[EtudeError] = []

    def flush() -> None:
        while not wrong and not ended.wait(FLUSH_S):
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
        log.flush()


class EventReader:
    """Reads all events of a run, as they come. Nobody but people depends on them: what is damaged
    is left out, and told."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.damaged: list[Damaged] = []
        self._logs: dict[str, tuple[Log[Event], int]] = {}

    def new(self) -> list[Stamped[Event]]:
        found: list[Stamped[Event]] = []
        for process in self._run.processes(known=self._logs):
            log, start = self._logs.get(process) or (
                self._run.events(process, EVENTS, self.damaged.append),
                0,
            )
            records, start = log.read(start)
            self._logs[process] = (log, start)
            found += records
        return sorted(found, key=lambda stamped: stamped.t)
