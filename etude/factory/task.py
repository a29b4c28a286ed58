"""A task made from a repository: the working copy of its agent, a good answer, and the files of the
grader."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from etude.core.sandbox import VENVS, Limits, SandboxSpec
from etude.core.types import Task

Files = Mapping[str, bytes]
"""Path -> content."""

LIMITS = Limits(memory_bytes=2 << 30, disk_bytes=128 << 20, processes=64)
GRADING_S = 180.0
"""Most seconds by the clock, which are many since machines are busy at times."""

PYTEST = (
    "python -m pytest -q -p no:cacheprovider -o addopts= -o console_output_style=classic "
    "--rootdir=. --tb=short"
)
"""Command of pytest without the project's own options, which may ask for coverage, other processes
and the like."""
PLAIN = "--assert=plain"
"""Failures are reported in fewer words, and files with thousands of tests load in a fraction of the
time."""
_FIXED_EXAMPLES = {
    # also applies if a repository loads a profile of its own
    "PYTEST_ADDOPTS": "--hypothesis-seed=0",
    # Hypothesis takes this for CI and does not let a busy machine fail a test: no deadline, no
    # check for slow examples. CI itself would be read by pytest too, and by tests that skip
    # themselves there.
    "__TOX_ENVIRONMENT_VARIABLE_ORIGINAL_CI": "true",
}
"""Makes Hypothesis draw the same examples every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryTask:
    """A task of a folder. Names of tests are pytest's, as in `tests/test_cart.py::test_total`; one
    stands for all cases of a parametrized test."""

    id: str
    kind: str
    repository: str
    """The name of the checkout that it was made from."""
    origin: str
    """The source of that checkout, with its commit if it has one."""
    instruction: str
    base: Files
    """The files of the repository, before `changes`. Tasks of a repository share them."""
    changes: Files
    """Files put over them before the agent starts: the bug, and tests without the hidden ones."""
    solution: Files
    """The files of a good answer."""
    tests: Files
    """The grader's files, put over all others."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    sources: tuple[str, ...]
    """Patterns of the files that the grader takes over from the agent."""
    venv: str
    """The name of the virtual environment that it runs in."""
    requirements: tuple[str, ...] = ()
    """The packages installed in there, with versions."""
    pythonpath: tuple[str, ...] = ("",)
    """Folders of the working copy that contain modules."""
    processor_s: float | None = None
    """Processor seconds that the grader's tests may use, so that an answer that never ends does not
    delay a group by GRADING_S. None: limited by the clock alone."""
    solve_rate: float | None = None
    """The solve rate of a given policy, as a measure of difficulty. None: not measured."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Other facts about the task, such as the changed function."""

    @property
    def opening(self) -> Files:
        """The initial working copy of the agent."""
        return {**self.base, **self.changes}

    @property
    def env(self) -> dict[str, str]:
        return sandbox_env(self.venv, self.pythonpath, self.requirements)

    @property
    def expected(self) -> tuple[str, ...]:
        """The tests that a solution passes, by their names in a report."""
        return tuple(map(reported_name, (*self.fail_to_pass, *self.pass_to_pass)))

    @property
    def argv(self) -> list[str]:
        """The command of the grader."""
        tests = (*self.fail_to_pass, *self.pass_to_pass)
        return pytest_argv(tests, processor_s=self.processor_s)

    def as_task(self) -> Task:
        """The part that an agent may see."""
        return Task(
            id=self.id,
            prompt=self.instruction,
            sandbox=SandboxSpec(files=self.opening, env=self.env, limits=LIMITS),
            meta={
                "module": next(iter(self.solution)),
                "kind": self.kind,
                "repository": self.repository,
                "family": f"{self.repository}: {self.kind}",
            },
        )


def sandbox_env(
    venv: str, pythonpath: Iterable[str], requirements: Iterable[str]
) -> dict[str, str]:
    """The environment variables of commands in a working copy."""
    path = f"{VENVS}/{venv}/bin:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, **python_env(pythonpath, requirements)}


def python_env(pythonpath: Iterable[str], requirements: Iterable[str]) -> dict[str, str]:
    """The variables that Python and tests read. Proven tests must end the same way every time, so
    these remove chance as far as possible from outside."""
    installed = {re.split(r"[^\w.-]", each)[0].lower() for each in requirements}
    return {
        "PYTHONPATH": ":".join(f"/work/{place}".rstrip("/") for place in pythonpath),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        **(_FIXED_EXAMPLES if "hypothesis" in installed else {}),
    }


def pytest_argv(
    tests: tuple[str, ...], *, plain: bool = True, processor_s: float | None = None
) -> list[str]:
    """The command that runs these tests and reports on each. Without `plain`, failures are
    explained in more words. `processor_s`: processor time after which it is ended, however busy the
    machine is."""
    limit = "" if processor_s is None else f"ulimit -t {math.ceil(processor_s)}; "
    way = PLAIN if plain else ""
    return ["sh", "-c", f"{limit}exec {PYTEST} {way} --junitxml=$ETUDE_REPORT {shlex.join(tests)}"]


def reported_name(test: str) -> str:
    """`tests/test_cart.py::TestCart::test_total` -> `tests.test_cart.TestCart::test_total`, as in
    JUnit's XML."""
    path, *names = test.split("::")
    module = re.sub(r"\.py$", "", path).replace("/", ".")
    return f"{'.'.join([module, *names[:-1]])}::{names[-1]}"


def is_test_file(path: str) -> bool:
    """True if a file belongs to the tests of a project."""
    name = path.rpartition("/")[2]
    return (
        bool(re.search(r"(^|/)(tests?|testing)/", path))
        or name.startswith("test_")
        or name.endswith("_test.py")
        or name in ("conftest.py", "tests.py", "test.py")
    )
