from __future__ import annotations

import asyncio
import contextlib
import threading

from etude.core.ledger import Entry, Issued
from etude.run.journal import Journal
from etude.store.runs import Run


def issued(group: str) -> Issued:
    return Issued(group=group, task="t", samples=(f"{group}.0",), version=0)


async def test_what_the_ledger_in_memory_says_is_stored_though_its_writer_is_cancelled() -> None:
    """The session that wrote it is cancelled while the entry waits for the one before: who comes after builds on it."""
    run, gate = Run.open("memory:"), threading.Event()
    append = run.ledger.append

    def slowly(*entries: Entry) -> None:
        assert gate.wait(60)
        append(*entries)

    run.ledger.append = slowly  # type: ignore[method-assign]
    journal = Journal(run, ())
    writing = [asyncio.create_task(journal.write(issued(group))) for group in ("a", "b", "c")]
    while journal.ledger.issued < 3:
        await asyncio.sleep(0)
    writing[1].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await writing[1]
    gate.set()
    await writing[2]
    assert run.ledger.records() == [issued("a"), issued("b"), issued("c")]
