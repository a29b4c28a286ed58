"""Figures of the dashboard that a small run does not have."""

from __future__ import annotations

from dataclasses import replace

from etude.core.events import EvalDone, EvalProgress, Launched, StageStarted
from etude.core.metrics import metrics
from etude.dash.answers import solve_rates
from etude.dash.reader import RunView
from etude.dash.recorded import RecordedRun
from etude.dash.table import RolloutTable
from etude.store.objects import Objects
from etude.store.rollouts import RolloutRow, group_rows
from etude.store.runs import Run
from tests.dash.recorded_store import group, trajectory


def row(id: str, reward: float, version: int, kind: str = "train") -> RolloutRow:
    found = group_rows(group(1, trajectory("g000001.0", reward)))[0]
    return replace(found, id=id, kind=kind, group=id.rpartition(".")[0], versions=(version,))


def rates(*rows: RolloutRow) -> dict[str, dict[str, list[float]]]:
    table = RolloutTable()
    table.add(rows)
    return solve_rates(table)


def test_the_few_attempts_of_a_version_count_with_the_next() -> None:
    many = [row(f"g{n}.0", 1.0, n // 8) for n in range(8, 32)]
    few, last = row("a.0", 0.0, 0), row("b.0", 0.0, 4)
    (found,) = rates(few, *many, last).values()
    assert found["version"] == [1, 2, 4]
    assert found["count"] == [9, 8, 9]
    assert found["rate"] == [8 / 9, 1.0, 8 / 9]


def test_several_attempts_at_each_task_are_a_curve_of_their_own() -> None:
    once = row("eval-0-heldout.0", 1.0, 0, "heldout")
    often = row("eval-3-heldout_x8.0", 0.0, 3, "heldout")
    assert {name: each["rate"] for name, each in rates(once, often).items()} == {
        "heldout": [1.0],
        "heldout ×8": [0.0],
    }


def test_reports_tell_of_evaluations_what_events_do_not() -> None:
    run = Run(Objects.open("memory:"))
    told = EvalDone(stage="rl", split="heldout", version=3, solved=9, total=16, low=0.3, high=0.8)
    eight = replace(told, samples=8)
    recorded = RecordedRun("x", run)
    recorded.history.evals.append(told)
    assert recorded.evaluations() == [told], "the report is not there yet"
    once = replace(eight, solved=1, total=2, samples=1)
    run.put_eval("000003.heldout_x8", eight)
    run.put_eval("000003.heldout", once)
    again = RecordedRun("x", run)
    again.history.evals.append(told)
    assert again.evaluations() == [once, eight]


def test_an_evaluation_after_the_run_leaves_its_progress() -> None:
    view = RunView()
    view.apply(0.0, StageStarted(stage="rl", steps=60, done=33, groups_per_step=8))
    view.apply(1.0, Launched(resumed=True))
    assert view.steps == 0, "it may have been given more"
    view.apply(2.0, EvalProgress(stage="rl", split="heldout", done=0, total=8, solved=0))
    assert (view.done, view.steps) == (33, 60)


def test_several_attempts_at_each_task_are_not_taken_for_one() -> None:
    view = RunView()
    once = EvalDone(stage="rl", split="heldout", version=3, solved=1, total=2, low=0.1, high=0.9)
    eight = replace(once, solved=4, total=16, samples=8)
    for each in (once, eight):
        view.apply(0.0, each)
    assert view.evals == {("rl", "heldout"): once, ("rl", "heldout ×8"): eight}
    assert metrics(once) == (3, {"eval/heldout": 0.5})
    assert metrics(eight) == (3, {"eval/heldout_x8": 0.25})
