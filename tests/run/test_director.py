"""What an environment of anyone's may not say of its tasks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.types import Task
from etude.run.director import Director

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
