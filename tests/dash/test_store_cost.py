"""Requests per step of a run to its bucket."""

from __future__ import annotations

from dataclasses import replace

import pytest
from obstore.store import MemoryStore

from etude.core.events import FitStep, StoreUsed
from etude.dash import recorded
from etude.dash.page import describe
from etude.dash.reader import RunView
from etude.dash.recorded import RecordedRun
from etude.store.objects import Objects
from etude.store.runs import Run
from etude.store.telemetry import EventReader, event_writer, sync_event_writer


def used(process: str, count: int) -> StoreUsed:
    return StoreUsed(
        process=process, reads=count, writes=count, lists=count, read_bytes=count,
        written_bytes=2 * count,
    )  # fmt: skip


def fit(step: int) -> FitStep:
    return FitStep(stage="sft", step=step, steps=9, loss=1.0, tokens_per_s=1.0)


def test_processes_add_up_and_a_new_life_counts_from_nothing() -> None:
    view = RunView()
    for event in (used("a", 10), fit(1), used("b", 1), used("a", 12), fit(4), used("a", 2)):
        view.apply(0.0, event)
    assert (view.store.requests, view.store.lists, view.store.read_bytes) == (45, 15, 15)
    assert (view.store.written_bytes, view.store.steps) == (30, 4)
    assert str(view.store).startswith("11 requests a step, 3.8 of them listings")
    lines = {line.label: line.text for line in describe(view, 0).lines}
    assert lines["store"] == str(view.store)


def test_a_run_in_a_directory_tells_nothing_of_it() -> None:
    assert "store" not in [line.label for line in describe(RunView(), 0).lines]


async def test_each_process_tells_it_with_its_last_events() -> None:
    run = Run(Objects(MemoryStore(), "s3://fake"))
    async with event_writer(run, "controller"):
        run.objects.list("")
    with sync_event_writer(run, "trainer"):
        run.objects.get("events/controller/0000000000.jsonl")
    told = {event.record.process: event.record for event in EventReader(run).new()}  # type: ignore[union-attr]
    assert told.keys() == {"controller", "trainer"}
    controller, trainer = told["controller"], told["trainer"]
    assert isinstance(controller, StoreUsed) and isinstance(trainer, StoreUsed)
    assert controller.lists == 1 and trainer.read_bytes > 0


def test_looks_that_follow_each_other_ask_the_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Objects(MemoryStore(), "s3://fake"))
    seen = RecordedRun("x", run)
    monkeypatch.setattr(recorded, "FRESH_S", 3600.0)
    seen.refresh()
    before = replace(run.objects.usage)
    seen.refresh()
    assert run.objects.usage == before
    monkeypatch.setattr(recorded, "FRESH_S", 0.0)
    seen.refresh()
    assert run.objects.usage != before
