"""The report of an evaluation, field by field, and the events while it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from etude.core.events import EvalDone, EvalProgress, Event
from etude.core.statistics import clustered_wilson, wilson
from etude.core.types import Cost, Score, Task, Trajectory
from etude.run.evaluate import Report, evaluate, pass_ks, report_name, reports
from etude.store.runs import Run

COST = Cost(prompt_tokens=10, sampled_tokens=3, seconds=0.5, calls=2)


def outcome(task: str, reward: float, *flags: str, messages: int = 1) -> Trajectory:
    return Trajectory(
        id="s", task=task, group="", segments=(), score=Score(reward, flags=flags),
        status="completed", cost=COST, messages=[{"content": str(n)} for n in range(messages)],
    )  # fmt: skip


async def evaluated(
    planned: dict[str, list[Trajectory]], samples: int = 1, **more: Any
) -> tuple[Report, list[tuple[str, str, int]]]:
    """The report, and (task, sample, seed) of every attempt."""
    asked: list[tuple[str, str, int]] = []
    left = {name: list(each) for name, each in planned.items()}

    async def attempt(task: Task, sample: str, seed: int) -> Trajectory:
        asked.append((task.id, sample, seed))
        return replace(left[task.id].pop(0), id=sample)

    tasks = [Task(id=name, prompt="x") for name in planned]
    report = await evaluate(
        tasks, attempt, stage="rl", split="novel", version=7, seed=3, samples=samples, **more
    )
    return report, asked


async def test_a_report_of_one_attempt_each() -> None:
    events: list[Event] = []
    kept: list[Trajectory] = []
    planned = {
        "b": [outcome("b", 1.0, messages=2)],
        "a": [outcome("a", 0.5, "cheat:tests", messages=9)],
        "c": [outcome("c", 1.0, "slow", messages=4)],
        "d": [outcome("d", 0.0)],
    }
    report, asked = await evaluated(planned, emit=events.append, keep=kept.append)
    low, high = wilson(2, 4)
    assert report == Report(
        stage="rl", split="novel", version=7, solved=2, total=4, low=low, high=high,
        rewards={"a": 0.5, "b": 1.0, "c": 1.0, "d": 0.0},
        example=[{"content": str(n)} for n in range(4)],
        samples=1, solved_by_task={"a": 0, "b": 1, "c": 1, "d": 0},
        honest_by_task={"a": 0, "b": 1, "c": 1, "d": 1},
        cost=Cost(prompt_tokens=40, sampled_tokens=12, seconds=2.0, calls=8),
    )  # fmt: skip
    assert list(report.rewards) == list(report.solved_by_task) == ["a", "b", "c", "d"]
    assert report.rate == 0.5 and report.pass_at(1) == 0.5
    assert [sample for _, sample, _ in asked] == [f"eval-7-novel.{n}" for n in range(4)]
    assert [t.task for t in kept] == ["b", "a", "c", "d"]
    first, last = events[0], events[-1]
    assert first == EvalProgress(stage="rl", split="novel", done=0, total=4, solved=0)
    assert last == EvalDone(
        stage="rl", split="novel", version=7, solved=2, total=4, low=low, high=high, samples=1
    )
    assert len(events) == 2 + 4, "and each attempt"


async def test_a_report_of_several_attempts_each() -> None:
    planned = {
        "a": [outcome("a", 1.0), outcome("a", 0.5), outcome("a", 1.0, "cheat:x")],
        "b": [outcome("b", 0.0), outcome("b", 0.0), outcome("b", 0.25)],
    }
    report, asked = await evaluated(planned, samples=3)
    assert (report.solved, report.total, report.samples) == (2, 6, 3)
    assert (report.low, report.high) == clustered_wilson([2, 0], 3)
    assert report.rewards == {"a": 2.5 / 3, "b": 0.25 / 3}
    assert report.solved_by_task == {"a": 2, "b": 0}
    assert report.honest_by_task == {"a": 2, "b": 3}
    assert report.pass_at(1) == pytest.approx(1 / 3) and report.pass_at(2) == 0.5
    assert [(task, sample) for task, sample, _ in asked] == [
        (task, f"eval-7-novel_x3.{n}") for n, task in enumerate("ababab")
    ]
    seeds = [seed for _, _, seed in asked]
    assert len(set(seeds)) == 6, "no two attempts draw the same"
    again, asked = await evaluated(planned, samples=3)
    assert [seed for _, _, seed in asked] == seeds and again == report


async def test_the_seed_of_an_attempt_hangs_on_its_task_alone() -> None:
    _, both = await evaluated({"a": [outcome("a", 0.0)], "b": [outcome("b", 0.0)]})
    _, alone = await evaluated({"b": [outcome("b", 0.0)]})
    assert alone[0][2] == both[1][2] != both[0][2]


async def test_without_a_solved_task_there_is_no_example() -> None:
    report, _ = await evaluated({"a": [outcome("a", 0.99, messages=5)]})
    assert report.example == [] and report.solved == 0


async def test_every_twentieth_attempt_is_told() -> None:
    events: list[Event] = []
    planned = {str(n): [outcome(str(n), float(n % 2))] for n in range(41)}
    await evaluated(planned, emit=events.append)
    told = [event for event in events if isinstance(event, EvalProgress)]
    assert [(event.done, event.solved, event.total) for event in told] == [
        (0, 0, 41), (20, 10, 41), (40, 20, 41),
    ]  # fmt: skip


def test_names_of_reports() -> None:
    assert report_name(7, "novel") == report_name(7, "novel", 1) == "000007.novel"
    assert report_name(7, "novel", 2) == "000007.novel_x2"
    assert [pass_ks(n) for n in (1, 2, 3, 4, 5, 8)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 8],
    ]  # fmt: skip


def test_reports_of_older_runs_say_what_was_solved_by_the_rewards() -> None:
    report = Report(
        stage="rl", split="novel", version=1, solved=1, total=2, low=0.0, high=1.0,
        rewards={"a": 1.0, "b": 0.5}, example=[],
    )  # fmt: skip
    assert report.solved_by_task == {"a": 1, "b": 0} and report.name == "000001.novel"
    assert replace(report, samples=4, solved_by_task={}).solved_by_task == {}
    run = Run.open("memory:")
    for version in (12, 2):
        run.put_eval(report_name(version, "novel"), replace(report, version=version))
    assert [each.version for each in reports(run)] == [2, 12]
