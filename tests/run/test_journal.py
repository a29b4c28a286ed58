from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from etude.core.advantage import AdvantageEstimator, to_rows
from etude.core.errors import EtudeError
from etude.core.ledger import Batched, Dropped, Entry, Issued
from etude.core.sampling import VersionSpan
from etude.core.types import Batch, Group, Score, Segment, Trajectory
from etude.run.journal import Journal, Recovered, load, unrecorded
from etude.store.runs import Run


def issued(group: str) -> Issued:
    return Issued(group=group, task="t", samples=(f"{group}.0",), version=0)


async def test_what_the_ledger_in_memory_says_is_stored_though_its_writer_is_cancelled() -> None:
    """The session that wrote it is cancelled while the entry waits for the previous one; later
    entries build on it."""
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


def attempt(id: str, reward: float) -> Trajectory:
    segment = Segment(
        prompt=(1,), tokens=(2,), mask=(True,), logprobs=(-1.0,), versions=(VersionSpan(0, 1),)
    )
    group = id.partition(".")[0]
    return Trajectory(
        id=id, task="t", group=group, segments=(segment,), score=Score(reward), status="done"
    )


def test_a_finished_group_is_found_though_no_listing_shows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run.open("memory:")
    for name, samples in (("g000001", ("g000001.0", "g000001.1")), ("g000002", ("g000002.0",))):
        run.ledger.append(Issued(group=name, task="t", samples=samples, version=0))
    attempts = (attempt("g000001.0", 0.0), attempt("g000001.1", 1.0))
    done = Group(id="g000001", task="t", slot=1, admitted=0, trajectories=attempts)
    run.put_group(done)
    monkeypatch.setattr(run.objects, "list", lambda prefix, after=None: [])
    _, recovered = load(run, AdvantageEstimator(max_tokens=9, max_lag=1))
    assert recovered.waiting == [done]
    assert [(drop.samples, drop.reason) for drop in recovered.entries] == [  # type: ignore[union-attr]
        (("g000002.0",), "interrupted")
    ]


def test_a_batch_that_is_lost_is_told_as_long_as_the_trainer_needs_it() -> None:
    """The trainer would wait for it forever."""
    run = Run.open("memory:")
    for step in (1, 2):
        group = issued(f"g{step:06d}")
        run.ledger.append(group, Batched(step=step, samples=group.samples))
    estimator = AdvantageEstimator(max_tokens=9, max_lag=1)
    run.put_checkpoint("000001.000000", b"")
    with pytest.raises(EtudeError, match="the batch of step 2 is missing, but the ledger says"):
        load(run, estimator)
    run.put_checkpoint("000002.000000", b"")
    load(run, estimator)


def test_a_ledger_that_is_lost_is_told() -> None:
    """For example, by a removal that was interrupted."""
    run, sample = Run.open("memory:"), attempt("g000001.0", 1.0)
    run.put_batch(Batch(step=1, rows=tuple(to_rows(sample, 1.0)), oldest=0))
    with pytest.raises(
        EtudeError, match=r"does not match .* \(g000001.0 cannot become 1: it was never"
    ):
        load(run, AdvantageEstimator())


def test_batches_that_no_entry_speaks_of_come_in_their_order() -> None:
    entries: list[Entry] = [issued("g"), Batched(step=2, samples=("g.0",))]
    steps = [70000, 3, 2, 33, 1000, 8]
    assert unrecorded(entries, steps) == [3, 8, 33, 1000, 70000]
    assert unrecorded(entries, [2]) == unrecorded(entries, []) == []


def test_only_what_a_stop_cut_short_was_interrupted() -> None:
    made: list[Entry] = [
        Dropped(samples=("a.0",), reason="interrupted"),
        Dropped(samples=("b.0",), reason="failed"),
        issued("c"),
        Dropped(samples=("d.0", "d.1"), reason="interrupted"),
    ]
    recovered = Recovered(made, [], [], slots=0, batched=0, unlisted=[])
    assert recovered.interrupted == ("a.0", "d.0", "d.1")
