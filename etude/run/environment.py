"""The built-in environment: small Python modules with a bug, repaired in a sandbox, graded by
hidden checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import get_args

from etude.core.sandbox import Sandbox, SandboxPool
from etude.core.types import Attempt, Score, Split, Task
from etude.rewards.tests import grade
from etude.tasks.factory import make_tasks
from etude.tasks.repair import RepairTask

SPLITS: dict[str, Split] = {split: split for split in get_args(Split)}


class CodeRepair:
    """A `core.protocols.Environment`. It alone holds the data for grading, by the task's id."""

    def __init__(
        self, pool: SandboxPool, *, counts: Mapping[str, int], seed: int, timeout_s: float = 20.0
    ) -> None:
        """`counts`: split -> number of tasks. `timeout_s` bounds the grading of one attempt."""
        self._pool = pool
        self._counts = counts
        self._seed = seed
        self._timeout_s = timeout_s
        self._repairs: dict[str, RepairTask] = {}

    def tasks(self, split: str) -> Sequence[Task]:
        repairs = make_tasks(SPLITS[split], self._counts[split], self._seed)
        self._repairs |= {repair.task.id: repair for repair in repairs}
        return [repair.task for repair in repairs]

    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        return self._pool.open(task.sandbox)

    def solution(self, task: Task) -> dict[str, str]:
        repair = self._repairs[task.id]
        return {repair.module: repair.solution}

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        repair = self._repairs[task.id]
        return await grade(repair, sandbox, self._pool, timeout_s=self._timeout_s)
