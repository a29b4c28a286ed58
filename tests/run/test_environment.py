"""The built-in environment: the data that grades a task never reaches its agent."""

from __future__ import annotations

import json

import pytest

from etude.core.types import Attempt, Task, Transcript
from etude.run.environment import CodeRepair
from etude.sandbox.fake import FakeSandboxPool
from etude.sandbox.process import ProcessSandboxPool
from etude.tasks.factory import make_tasks

COUNTS = {"train": 5, "heldout": 3, "novel": 2}
ATTEMPT = Attempt(transcript=Transcript(messages=[], finished=True), segments=())


def test_a_task_holds_no_answer() -> None:
    environment = CodeRepair(FakeSandboxPool(), counts=COUNTS, seed=0)
    for split in ("train", "heldout", "novel"):
        tasks = environment.tasks(split)
        hidden = make_tasks(split, COUNTS[split], 0)  # type: ignore[arg-type]
        assert tasks == [repair.task for repair in hidden] and len(tasks) == COUNTS[split]
        for task, repair in zip(tasks, hidden, strict=True):
            seen = json.dumps([task.prompt, dict(task.sandbox.files), dict(task.meta)])
            assert json.dumps(repair.solution)[1:-1] not in seen
            assert not hasattr(task, "checks")


async def test_the_solution_of_every_split_earns_the_reward() -> None:
    pool = ProcessSandboxPool()
    environment = CodeRepair(pool, counts=COUNTS, seed=0)
    for split in ("train", "novel"):
        task = environment.tasks(split)[0]
        repair = make_tasks(split, COUNTS[split], 0)[0]  # type: ignore[arg-type]
        async with environment.open(task) as sandbox:
            before = await environment.score(task, sandbox, ATTEMPT)
            await sandbox.write(repair.module, repair.solution)
            after = await environment.score(task, sandbox, ATTEMPT)
        assert (before.reward, after.reward) == (0.0, 1.0)
    await pool.close()


@pytest.mark.parametrize("given", [{}, {"prompt": "go", "messages": ({"role": "user"},)}])
def test_a_task_has_a_prompt_or_messages(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="of prompt and messages: set exactly one"):
        Task(id="t", **given)  # type: ignore[arg-type]


def test_the_opening_of_a_session() -> None:
    said = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "go"})
    assert Task(id="t", prompt="go").opening == [{"role": "user", "content": "go"}]
    task = Task(id="t", messages=said)
    task.opening.append({})
    task.opening[0]["content"] = ""
    assert task.opening == list(said), "whoever goes on with it changes no task"
