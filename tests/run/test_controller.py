"""What an environment of anyone's may not say of its tasks, and what a loop hands on of its
stage."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.lineage import stage_spans
from etude.core.stages import RolloutStageConfig
from etude.core.types import Score, Task, Trajectory
from etude.run import controller as controller
from etude.run.controller import Controller
from etude.store.rollouts import RolloutLog
from etude.store.runs import Run

TASK = Task(id="t", prompt="fix it")


def tasks(given: Any) -> Any:
    config = parse(
        'name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1\n[tasks]\nenvironment = "mine.py:A"\ntrain '
        "= 7"
    )
    run: Any = SimpleNamespace(objects=None)
    environment: Any = SimpleNamespace(tasks=lambda split: given())
    gateway: Any = None
    return asyncio.run(
        Controller(run, config, gateway, environment, lambda event: None).tasks("train")
    )


def test_tasks_are_there_and_have_names_of_their_own() -> None:
    assert tasks(lambda: [TASK]) == [TASK]
    with pytest.raises(
        EtudeError,
        match="'mine.py:A' gives no tasks for the split 'train', of which the run wants 7",
    ):
        tasks(list)
    with pytest.raises(EtudeError, match="gives several tasks of the split 'train' the id 't'"):
        tasks(lambda: [TASK, replace(TASK, prompt="another")])
    with pytest.raises(
        EtudeError, match=r"'mine.py:A': ZeroDivisionError in .*line \d+: division by zero"
    ):
        tasks(lambda: 1 / 0)


@pytest.mark.parametrize("replay", [True, False])
async def test_a_loop_samples_as_its_stage_says(
    replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}
    asked: dict[str, Any] = {}

    class Watched:
        def __init__(self, **options: Any) -> None:
            told.update(options)

        async def run(self) -> None:
            pass

    async def load(version: int) -> None:
        pass

    async def reached(self: Controller, version: int) -> int:
        return version

    monkeypatch.setattr(controller, "RolloutLoop", Watched)
    monkeypatch.setattr(controller, "build", lambda *names, **options: asked.update(options))
    monkeypatch.setattr(Controller, "wait_for_version", reached)
    text = (
        f'[[stage]]\nkind = "rl"\nsteps = 1\ntemperature = 0.7\nrouter_replay = '
        f"{str(replay).lower()}"
    )
    config = parse(f'name = "a"\n{text}')
    environment: Any = SimpleNamespace(tasks=lambda split: [TASK])
    gateway: Any = SimpleNamespace(http=None, load=load)
    (span,) = stage_spans(config.stage)
    assert isinstance(span.stage, RolloutStageConfig)
    await Controller(
        Run.open("memory:"), config, gateway, environment, lambda event: None
    ).run_loop(span, span.stage)
    rollouts = told["attempt"].__self__
    assert rollouts.experts is replay
    assert asked["temperature"] == 0.7


async def test_an_evaluation_leaves_one_row_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def attempt(task: Task, sample: str, seed: int) -> Trajectory:
        group = sample.rpartition(".")[0]
        score = Score(float(task.id == "b"))
        return Trajectory(
            id=sample, task=task.id, group=group, segments=(), score=score, status="done"
        )

    async def load(version: int) -> None:
        pass

    monkeypatch.setattr(Controller, "rollouts", lambda self, *, temperature: attempt)
    config = parse('name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1\n[tasks]\nnovel = 2')
    environment: Any = SimpleNamespace(
        tasks=lambda split: [replace(TASK, id=id) for id in ("b", "a")]
    )
    gateway: Any = SimpleNamespace(load=load)
    run = Run.open("memory:")
    await Controller(run, config, gateway, environment, lambda event: None).evaluate(1, "novel")
    rows = RolloutLog(run.objects).rows()
    assert [(row.task, row.kind, row.stage, row.reward) for row in rows] == [
        ("a", "novel", "rl", 0.0),
        ("b", "novel", "rl", 1.0),
    ]
    assert run.evals() == ["000001.novel"]
