"""Repair tasks: what the agent sees of one, and the half that only the grader does."""

from __future__ import annotations

from dataclasses import dataclass

from etude.core.types import Json, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One hidden test case: call `function` with `args`. The answer that is `expected` never enters
    any sandbox. It is compared as `==` does: 2.0 is as good as 2, and the order of sets and keys
    does not matter; but True is not 1, and a tuple counts as a list."""

    function: str
    args: list[Json]
    expected: object
    """None, a bool, a number, a text, or a list, tuple, set or dictionary of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairTask:
    """A module with a bug. Its environment keeps it; the agent is handed `task` alone."""

    task: Task
    module: str
    """The file that the grader takes over from the agent's sandbox; all else it takes from the
    task's."""
    solution: str
    """The text of that file without the bug."""
    checks: tuple[Check, ...]

    def text(self, path: str) -> str:
        """A file of the working copy, as the agent finds it."""
        content = self.task.sandbox.files[path]
        assert isinstance(content, str)
        return content

    @property
    def broken(self) -> str:
        return self.text(self.module)

    @property
    def visible_tests(self) -> str:
        return self.text(f"test_{self.module}")
