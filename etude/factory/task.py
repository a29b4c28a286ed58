"""A task made from a repository: what its agent finds, a good answer, and what only the grader
has."""

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
"""The most by the clock. It is long since machines are busy at times."""

PYTEST = (
    "python -m pytest -q -p no:cacheprovider -o addopts= -o console_output_style=classic "
    "--rootdir=. --tb=short"
)
"""Without the project's own options: they ask for coverage, other processes and the like."""
PLAIN = "--assert=plain"
"""Failures are told in fewer words, and files with thousands of tests are read in a fraction of the
time."""
_FIXED_EXAMPLES = {
    # also where a repository loads a profile of its own
    "PYTEST_ADDOPTS": "--hypothesis-seed=0",
    # Hypothesis takes this for CI and lets no busy machine fail a test: no deadline, no check for
    # slow examples. CI itself would be read by pytest too, and by tests that skip themselves there.
    "__TOX_ENVIRONMENT_VARIABLE_ORIGINAL_CI": "true",
}
"""Hypothesis draws the same examples every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryTask:
    """A task of a folder. Names of tests are pytest's, as in `tests/test_cart.py::test_total`; one
    stands for all cases of a parametrized test."""

    id: str
    kind: str
    repository: str
    """The name of the checkout that it was made from."""
    origin: str
    """Where that came from, and the commit, where there is one."""
    instruction: str
    base: Files
    """The files of the repository, before `changes`. Tasks of a repository share them."""
    changes: Files
    """What is put over them before the agent comes: the bug, and tests without the hidden ones."""
    solution: Files
    """The files of a good answer."""
    tests: Files
    """The grader's own, put over all else."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    sources: tuple[str, ...]
    """Patterns of the files that the grader takes over from the agent."""
    venv: str
    """The name of the virtual environment that it runs in."""
    requirements: tuple[str, ...] = ()
    """What is installed in there, with versions."""
    pythonpath: tuple[str, ...] = ("",)
    """Folders of the working copy that modules are found in."""
    processor_s: float | None = None
    """How long the grader's tests may keep a processor busy: an answer that never ends does not
    hold a group up for GRADING_S. None: so long by the clock alone."""
    solve_rate: float | None = None
    """How often a given policy solved it: its difficulty. None: not measured."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What else there is to say of it, such as the function that was changed."""

    @property
    def opening(self) -> Files:
        """The working copy as the agent finds it."""
        return {**self.base, **self.changes}

    @property
    def env(self) -> dict[str, str]:
        return sandbox_env(self.venv, self.pythonpath, self.requirements)

    @property
    def expected(self) -> tuple[str, ...]:
        """The tests that a solution passes, as a report names them."""
        return tuple(map(reported_name, (*self.fail_to_pass, *self.pass_to_pass)))

    @property
    def argv(self) -> list[str]:
        """The command of the grader."""
        tests = (*self.fail_to_pass, *self.pass_to_pass)
        return pytest_argv(tests, processor_s=self.processor_s)

    def as_task(self) -> Task:
        """The half that an agent may see."""
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
    """Those of them that Python and its tests look at. Tests that were proven end the same way
    every time, so chance is taken out of them as far as it can be from outside."""
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
    """The command that runs these tests and reports on each. Not `plain`: in more words.
    `processor_s`: it is ended after so much time of a processor, however busy the machine is."""
    limit = "" if processor_s is None else f"ulimit -t {math.ceil(processor_s)}; "
    way = PLAIN if plain else ""
    return ["sh", "-c", f"{limit}exec {PYTEST} {way} --junitxml=$ETUDE_REPORT {shlex.join(tests)}"]


def reported_name(test: str) -> str:
    """`tests/test_cart.py::TestCart::test_total` -> `tests.test_cart.TestCart::test_total`, as
    JUnit's XML has it."""
    path, *names = test.split("::")
    module = re.sub(r"\.py$", "", path).replace("/", ".")
    return f"{'.'.join([module, *names[:-1]])}::{names[-1]}"


def is_test_file(path: str) -> bool:
    """Whether a file belongs to the tests of a project."""
    name = path.rpartition("/")[2]
    return (
        bool(re.search(r"(^|/)(tests?|testing)/", path))
        or name.startswith("test_")
        or name.endswith("_test.py")
        or name in ("conftest.py", "tests.py", "test.py")
    )
