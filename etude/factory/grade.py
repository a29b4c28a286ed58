"""Verdict on an attempt at a task of a folder. The original tests run in a fresh sandbox, over the
package's files that the agent changed and nothing else of its working copy."""

from __future__ import annotations

from etude.core.memo import Memo
from etude.core.sandbox import Sandbox, SandboxPool
from etude.core.types import Score
from etude.factory.task import GRADING_S, RepositoryTask
from etude.rewards.fresh import CACHES, grade_by_command

_TESTS = ("tests/*", "test/*", "testing/*", "test_*.py", "*_test.py", "tests.py", "test.py")
NOT_TAKEN = (*CACHES, *_TESTS, *(f"*/{each}" for each in _TESTS), "*conftest.py", "*.pth")
"""Paths that the grader never takes over, in any folder: tests, and files that change how they
run."""


async def grade(
    task: RepositoryTask, sandbox: Sandbox, pool: SandboxPool, graded: Memo[Score] | None = None
) -> Score:
    """1.0 if every test that is expected to pass is reported as passed, else 0.0. `graded`: earlier
    verdicts, if the same change is to be graded only once."""
    return await grade_by_command(
        sandbox,
        pool,
        task.as_task().sandbox,
        task.argv,
        timeout_s=GRADING_S,
        files=task.tests,
        only=task.sources,
        without=NOT_TAKEN,
        expected=task.expected,
        solution=task.solution,
        graded=graded,
    )
