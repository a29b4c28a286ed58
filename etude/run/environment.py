"""The environment that ships: small Python modules with a bug, repaired in a sandbox, graded by hidden checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from etude.core.seams import Sandbox, Worlds
from etude.core.types import Task
from etude.rewards.tests import grade
from etude.tasks.factory import Split, make_tasks

SPLITS: dict[str, Split] = {"train": "train", "heldout": "heldout", "novel": "novel"}


class CodeRepair:
    """A `core.seams.Environment`."""

    def __init__(self, worlds: Worlds, *, counts: Mapping[str, int], seed: int, timeout_s: float = 20.0) -> None:
        """`counts`: split -> number of tasks. `timeout_s` bounds the grading of one attempt."""
        self._worlds, self._counts, self._seed, self._timeout_s = worlds, counts, seed, timeout_s

    def tasks(self, split: str) -> Sequence[Task]:
        return make_tasks(SPLITS[split], self._counts[split], self._seed)

    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        return self._worlds.open(task.files)

    async def score(self, task: Task, sandbox: Sandbox) -> dict[str, float]:
        return await grade(task, sandbox, self._worlds, timeout_s=self._timeout_s)
