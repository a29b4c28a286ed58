"""Repair tasks: the part that the agent sees, and the part for the grader alone."""

from __future__ import annotations

from dataclasses import dataclass

from etude.core.types import Json, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One hidden test case: call `function` with `args`. The `expected` answer never enters any
    sandbox. Answers are compared by `==`: 2.0 equals 2, and the order of sets and keys does not
    matter; but True is not 1, and a tuple counts as a list."""

    function: str
    args: list[Json]
    expected: object
    """Value of one of these types: None, bool, number, text, or a list, tuple, set or dictionary of
    them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairTask:
    """A module with a bug. Its environment keeps it; the agent receives `task` alone."""

    task: Task
    module: str
    """The file that the grader takes from the agent's sandbox; all others come from the task's."""
    solution: str
    """The text of that file without the bug."""
    checks: tuple[Check, ...]

    def text(self, path: str) -> str:
        """A file of the working copy in its initial state."""
        content = self.task.sandbox.files[path]
        assert isinstance(content, str)
        return content

    @property
    def broken(self) -> str:
        return self.text(self.module)

    @property
    def visible_tests(self) -> str:
        return self.text(f"test_{self.module}")
