"""The environment of a folder of Harbor tasks from any source."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from etude.core.sandbox import Sandbox, SandboxPool
from etude.core.types import Attempt, Score, Task, Transcript
from etude.factory.check import task_folders
from etude.factory.harbor_task import (
    HarborTask,
    grade_harbor_task,
    prepare,
    read_harbor_task,
    read_provided,
    solve,
)
from etude.run.task_folder import HELDOUT_SHARE, hash_of


class HarborTasks:
    """A `core.protocols.Environment`. It alone holds the data for grading, by the task's id."""

    def __init__(
        self, pool: SandboxPool, *, counts: Mapping[str, int], seed: int, path: str
    ) -> None:
        """`counts`: split -> number of tasks. `path`: the folder."""
        self._pool = pool
        self._counts = counts
        provided = read_provided(Path(path))
        found = [read_harbor_task(each, provided) for each in task_folders(Path(path))]
        self._tasks: dict[str, HarborTask] = {task.id: task for task in found}

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, which a task's name determines. None are novel."""
        chosen = [task for name, task in self._tasks.items() if _split_of(name) == split]
        chosen.sort(key=lambda task: hash_of(task.id))
        return [task.as_task() for task in chosen[: self._counts[split]]]

    @contextlib.asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        async with self._pool.open(task.sandbox) as sandbox:
            await prepare(self._tasks[task.id], sandbox)
            yield sandbox

    def solution(self, task: Task) -> HarborSolver | None:
        found = self._tasks[task.id]
        return HarborSolver(found) if (found.solution / "solve.sh").is_file() else None

    def scoring_s(self, task: Task) -> float:
        return self._tasks[task.id].verifier_s

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        return await grade_harbor_task(self._tasks[task.id], sandbox, self._pool)


class HarborSolver:
    """A `core.protocols.Agent`: applies the solution that comes with a task."""

    def __init__(self, task: HarborTask) -> None:
        self._task = task

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        await solve(self._task, sandbox)
        return Transcript(messages=[], finished=True)


def _split_of(name: str) -> str:
    return "heldout" if hash_of(f"harbor/{name}") % HELDOUT_SHARE == 0 else "train"
