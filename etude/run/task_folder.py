"""The environment of a folder of tasks that `etude tasks build` made."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from etude.core.sandbox import Sandbox, SandboxPool
from etude.core.types import Attempt, Score, Task
from etude.factory.check import task_folders
from etude.factory.grade import grade
from etude.factory.harbor import read_task
from etude.factory.task import RepositoryTask

HELDOUT_SHARE = 4
"""One file in this many: tasks that change the same file are on the same side."""


class TaskFolder:
    """A `core.protocols.Environment`. What grades a task stays in here, by the task's id."""

    def __init__(
        self, pool: SandboxPool, *, counts: Mapping[str, int], seed: int, path: str
    ) -> None:
        """`counts`: split -> number of tasks. `path`: the folder."""
        self._pool = pool
        self._counts = counts
        found = map(read_task, task_folders(Path(path)))
        self._tasks: dict[str, RepositoryTask] = {task.id: task for task in found}

    def tasks(self, split: str) -> Sequence[Task]:
        """Those of a split, in an order that does not favour a repository. None are novel."""
        chosen = [task for task in self._tasks.values() if split_of(task) == split]
        chosen.sort(key=lambda task: hash_of(task.id))
        return [task.as_task() for task in chosen[: self._counts[split]]]

    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        return self._pool.open(task.sandbox)

    def solution(self, task: Task) -> dict[str, str]:
        return {path: text.decode() for path, text in self._tasks[task.id].solution.items()}

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        return await grade(self._tasks[task.id], sandbox, self._pool)


def split_of(task: RepositoryTask) -> str:
    """By the hash of the file that it changes, so that it stays when others come and go."""
    changed = f"{task.repository}/{min(task.solution)}"
    return "heldout" if hash_of(changed) % HELDOUT_SHARE == 0 else "train"


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
