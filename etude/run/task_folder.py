"""The environment of a folder of tasks that `etude tasks build` made."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from etude.core.memo import Memo
from etude.core.sandbox import CommandResult, Sandbox, SandboxPool
from etude.core.types import Attempt, Score, Task
from etude.factory.check import repositories_of, task_folders
from etude.factory.grade import grade
from etude.factory.harbor import read_task
from etude.factory.task import RepositoryTask
from etude.store.memo import FolderMemo

HELDOUT_SHARE = 4
"""One task in this many is held out."""
REMEMBERED = 16384
"""Verdicts that are kept in memory, and as many test results."""


class TaskFolder:
    """A `core.protocols.Environment`. It alone holds the data for grading, by the task's id."""

    def __init__(
        self,
        pool: SandboxPool,
        *,
        counts: Mapping[str, int],
        seed: int,
        path: str,
        results: str | None = None,
    ) -> None:
        """`counts`: split -> number of tasks. `path`: the folder. `results`: another folder, for
        caching verdicts and, for the harness, test results."""
        self._pool = pool
        self._counts = counts
        found = map(read_task, task_folders(Path(path)))
        self._tasks: dict[str, RepositoryTask] = {task.id: task for task in found}
        self._ids = split_ids(self._tasks.values(), Path(path))
        # the tasks were proven, so the same change gets the same grade each time
        self._graded: Memo[Score] = Memo(REMEMBERED)
        self.test_results: Memo[CommandResult] | None = None
        if results is not None:
            self._graded = FolderMemo(REMEMBERED, Path(results) / "verdicts", Score)
            self.test_results = FolderMemo(REMEMBERED, Path(results) / "tests", CommandResult)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, in an order that does not favour a repository."""
        chosen = [self._tasks[name] for name in self._ids[split]]
        chosen.sort(key=lambda task: hash_of(task.id))
        return [task.as_task() for task in chosen[: self._counts[split]]]

    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        return self._pool.open(task.sandbox)

    def solution(self, task: Task) -> dict[str, str]:
        return {path: text.decode() for path, text in self._tasks[task.id].solution.items()}

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        return await grade(self._tasks[task.id], sandbox, self._pool, self._graded)


def split_ids(tasks: Collection[RepositoryTask], folder: Path) -> dict[str, set[str]]:
    """The ids of the tasks of each split. Repositories that the folder lists as held out or novel
    belong to these splits entirely."""
    set_aside = repositories_of(folder, "novel")
    novel = {task.id for task in tasks if task.repository in set_aside}
    others = [task for task in tasks if task.id not in novel]
    heldout = heldout_ids(others, repositories_of(folder, "heldout"))
    train = {task.id for task in others} - heldout
    return {"train": train, "heldout": heldout, "novel": novel}


def heldout_ids(tasks: Collection[RepositoryTask], repositories: Collection[str] = ()) -> set[str]:
    """The ids of held-out tasks. If `repositories` are given, all of their tasks. Otherwise tasks
    are chosen by the hash of the file that they change, so that the choice is stable when others
    are added or removed. A few files may all fall on one side: then the hash of the function
    decides, and as a last resort that of the task."""
    if repositories:
        return {task.id for task in tasks if task.repository in repositories}
    held = {task.id for task in tasks if hash_of(_file(task)) % HELDOUT_SHARE == 0}
    if 0 < len(held) < len(tasks):
        return held
    units = {task.id: _function(task) for task in tasks}
    if len({*units.values()}) == 1:
        units = {name: name for name in units}
    found = sorted({*units.values()}, key=hash_of)
    chosen = found[: (len(found) + HELDOUT_SHARE // 2) // HELDOUT_SHARE]  # rounded: one of two
    return {name for name, unit in units.items() if unit in chosen}


def _file(task: RepositoryTask) -> str:
    return f"{task.repository}/{min(task.solution)}"


def _function(task: RepositoryTask) -> str:
    """The first function that the task changes; a task from a commit has only files."""
    return f"{task.repository}/{min(task.facts.get('functions', '').split(', '))}"


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
