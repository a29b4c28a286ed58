"""What an environment of anyone's may not say of its tasks, and what a loop hands on of its stage."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.stages import LoopConfig
from etude.core.types import Task
from etude.run import director
from etude.run.director import Director
from etude.run.plan import legs
from etude.store.runs import Run

TASK = Task(id="t", prompt="fix it", files={}, editable=(), checks=(), meta={})


def tasks(given: Any) -> Any:
    config = parse('name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1\n[tasks]\nenvironment = "mine.py:A"\ntrain = 7')
    run: Any = SimpleNamespace(objects=None)
    environment: Any = SimpleNamespace(tasks=lambda split: given())
    gateway: Any = None
    return asyncio.run(Director(run, config, gateway, environment, lambda event: None).tasks("train"))


def test_tasks_are_there_and_have_names_of_their_own() -> None:
    assert tasks(lambda: [TASK]) == [TASK]
    with pytest.raises(EtudeError, match="'mine.py:A' gives no tasks for the split 'train', of which the run wants 7"):
        tasks(list)
    with pytest.raises(EtudeError, match="gives several tasks of the split 'train' the id 't'"):
        tasks(lambda: [TASK, replace(TASK, prompt="another")])
    with pytest.raises(EtudeError, match=r"'mine.py:A': ZeroDivisionError in .*line \d+: division by zero"):
        tasks(lambda: 1 / 0)


@pytest.mark.parametrize("replay", [True, False])
async def test_a_loop_samples_as_its_stage_says(replay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    asked: dict[str, Any] = {}

    class Watched:
        def __init__(self, **options: Any) -> None:
            told.update(options)

        async def run(self) -> None:
            pass

    async def load(version: int) -> None:
        pass

    async def reached(self: Director, version: int) -> int:
        return version

    monkeypatch.setattr(director, "Controller", Watched)
    monkeypatch.setattr(director, "build", lambda *names, **options: asked.update(options))
    monkeypatch.setattr(Director, "reached", reached)
    text = f'[[stage]]\nkind = "rl"\nsteps = 1\ntemperature = 0.7\nreplay = {str(replay).lower()}'
    config = parse(f'name = "a"\n{text}')
    environment: Any = SimpleNamespace(tasks=lambda split: [TASK])
    gateway: Any = SimpleNamespace(http=None, load=load)
    (leg,) = legs(config.stage)
    assert isinstance(leg.stage, LoopConfig)
    await Director(Run.open("memory:"), config, gateway, environment, lambda event: None).loop(leg, leg.stage)
    rollouts = told["attempt"].__self__
    assert rollouts.experts is replay
    assert asked["temperature"] == 0.7
