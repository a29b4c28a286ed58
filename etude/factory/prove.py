"""Proof of a task: find the tests that notice the change, then grade no change and the solution
repeatedly, as a run will grade them. Anything that fails is rejected, with a reason."""

from __future__ import annotations

import asyncio
import hashlib
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.etree import ElementTree

from etude.core.sandbox import SandboxPool, SandboxSpec
from etude.factory.candidates import Candidate, Draft
from etude.factory.grade import grade
from etude.factory.hiding import functions_of, without_functions
from etude.factory.instruct import instruct
from etude.factory.leaks import Windows, is_leaked, windows_of
from etude.factory.recipe import Recipe
from etude.factory.survey import Survey
from etude.factory.task import (
    LIMITS,
    Files,
    RepositoryTask,
    pytest_argv,
    reported_name,
    sandbox_env,
)
from etude.rewards.detector import HONEST_TOO, detect
from etude.rewards.junit import parse_junit
from etude.sandbox.diff import unified_diff
from etude.sandbox.tree import FILE, Entry

REPETITIONS = 2
"""Gradings of no change and of the solution each, after the survey of the tests and a first run of
the change. Results that differ are flaky."""
_UNKNOWN_S = 30.0
"""Processor seconds, for tests that are not in the survey."""
_WAITING_S = 300.0
"""Seconds by the clock, for tests that wait and do not compute."""
_REPRODUCTION = re.compile(r"\s*^You can reproduce this .*@reproduce_failure\(.*$", re.MULTILINE)
"""Advice of Hypothesis, which a user would not pass on."""


class Rejected(Exception):
    """The reason why a draft is not a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository that was installed and surveyed."""

    name: str
    origin: str
    files: Files
    """Including the files that its build makes."""
    recipe: Recipe
    survey: Survey
    requirements: tuple[str, ...]


@dataclass(slots=True)
class Seen:
    """Contents of a folder's tasks so far, and of the environments that all of its sandboxes
    show."""

    digests: set[str] = field(default_factory=set)
    installed: dict[str, Windows] = field(default_factory=dict)
    """Virtual environment -> its text."""
    _trees: dict[int, tuple[Files, dict[str, Windows]]] = field(default_factory=dict)

    def add(self, task: RepositoryTask) -> None:
        """Add a task. Rejected if a similar one exists."""
        digests = digests_of(task)
        if self.digests & digests:
            raise Rejected("duplicate")
        self.digests |= digests

    def check_leaks(self, base: Files, opening: Files, solution: Files) -> None:
        """Rejected if the solution occurs elsewhere in the sandbox."""
        self.check_installed(opening, solution)
        windows = self._windows(base)
        for path, after in solution.items():
            rest = [each for other, each in windows.items() if other != path]
            if is_leaked(opening.get(path, b""), after, [*rest, *self.installed.values()]):
                raise Rejected("leak")

    def check_installed(self, opening: Files, solution: Files) -> None:
        """Rejected if the solution occurs in a virtual environment: another repository of the
        folder depends on this one."""
        for path, after in solution.items():
            if is_leaked(opening.get(path, b""), after, self.installed.values()):
                raise Rejected("installed")

    def _windows(self, files: Files) -> dict[str, Windows]:
        if id(files) not in self._trees:
            if len(self._trees) > 8:
                self._trees.clear()
            self._trees[id(files)] = (files, windows_of(files))
        return self._trees[id(files)][1]


def digests_of(task: RepositoryTask) -> set[str]:
    """Digests that similar tasks share: of the changed lines, and of the changed functions with
    kind and tests."""
    lines = sorted(
        line.strip()
        for path, after in task.solution.items()
        for line in set(after.splitlines()) ^ set(task.opening.get(path, b"").splitlines())
    )
    place = repr((task.repository, task.kind, task.facts.get("functions"), task.fail_to_pass))
    told = (b"\n".join(lines), place.encode())
    return {hashlib.blake2b(each, digest_size=8).hexdigest() for each in told}


async def prove(
    draft: Draft,
    repository: Repository,
    seen: Seen,
    pool: SandboxPool,
    repetitions: int = REPETITIONS,
) -> RepositoryTask:
    """The task that a draft becomes. Raises Rejected."""
    candidate = await asyncio.to_thread(draft.make)
    if candidate is None:
        raise Rejected("nothing there")
    opening = {**candidate.base, **candidate.broken}
    await asyncio.to_thread(seen.check_leaks, candidate.base, opening, candidate.solution)
    found = await _look(candidate, repository, pool)
    task = await asyncio.to_thread(_assembled, draft, candidate, repository, found)
    await asyncio.to_thread(_check_tricks, task)
    seen.add(task)
    await check_both_ends(task, pool, repetitions)
    return task


def _check_tricks(task: RepositoryTask) -> None:
    """Rejected if the detector takes the solution for a trick: correct attempts at such a task
    would be set aside."""
    before, after = (
        {path: Entry(FILE, files[path]) for path in task.solution.keys() & files.keys()}
        for files in (task.opening, task.solution)
    )
    found = detect([], unified_diff(before, after))
    if any(finding.family not in HONEST_TOO for finding in found):
        raise Rejected("looks like a trick")


async def check_both_ends(task: RepositoryTask, pool: SandboxPool, repetitions: int) -> None:
    """Grade no change and the solution, this many times each. Raises Rejected."""
    spec = task.as_task().sandbox
    async with pool.open(spec) as sandbox:
        nothing = [await grade(task, sandbox, pool) for _ in range(repetitions)]
    if all(score.reward == 1.0 for score in nothing):
        raise Rejected("no change passes")
    if len({(score.reward, score.parts[0].value) for score in nothing}) > 1:
        raise Rejected("flaky")
    async with pool.open(spec) as sandbox:
        for path, content in task.solution.items():
            await sandbox.write(path, content)
        solved = [(await grade(task, sandbox, pool)).reward for _ in range(repetitions)]
    if not any(solved):
        raise Rejected("the solution fails")
    if not all(solved):
        raise Rejected("flaky")


@dataclass(frozen=True, slots=True)
class _Found:
    failing: tuple[str, ...]
    passing: tuple[str, ...]
    error: str
    """The error of the first failing test."""


async def _look(candidate: Candidate, repository: Repository, pool: SandboxPool) -> _Found:
    """Run the tests to find those that notice the change."""
    processor_s = _processor_s(candidate, repository)
    tests = set(candidate.tests)
    if candidate.test_files:
        files = {**candidate.base, **candidate.broken, **candidate.solution, **candidate.test_files}
        cases, _ = await _outcomes(candidate, repository, pool, files, processor_s)
        tests = {name for name in tests if cases.get(name)}
    files = {**candidate.base, **candidate.broken, **candidate.test_files}
    cases, report = await _outcomes(candidate, repository, pool, files, processor_s)
    failing = tuple(sorted(name for name in tests if not cases.get(name)))
    if not failing:
        raise Rejected("no test notices")
    if any(not each & set(failing) for each in candidate.noticed_by):
        raise Rejected("a change goes unnoticed")
    return _Found(failing, tuple(sorted(tests - set(failing))), _error_of(failing[0], report))


def _processor_s(candidate: Candidate, repository: Repository) -> float:
    """Processor seconds that the candidate's tests may take."""
    survey = repository.survey
    known = all(test in survey.seconds for test in candidate.tests)
    return 4 + 4 * survey.estimate_s(candidate.tests) if known else _UNKNOWN_S


async def _outcomes(
    candidate: Candidate,
    repository: Repository,
    pool: SandboxPool,
    files: Files,
    processor_s: float,
) -> tuple[Mapping[str, bool], bytes]:
    """Test -> True if it passed, and the report with these results."""
    pythonpath = repository.recipe.pythonpath
    env = sandbox_env(repository.name, pythonpath, repository.requirements)
    spec = SandboxSpec(files=files, env=env, limits=LIMITS)
    async with pool.open(spec) as sandbox:
        argv = pytest_argv(candidate.tests, plain=False, processor_s=processor_s)
        ran = await sandbox.run(argv, timeout_s=_WAITING_S, report=True)
    if ran.exit_code in (None, -signal.SIGXCPU, -signal.SIGKILL):
        raise Rejected("hangs")
    try:
        cases = parse_junit(ran.report)
    except ValueError as e:
        raise Rejected("no report") from e
    if not cases or (ran.exit_code not in (0, 1) and not candidate.test_files):
        raise Rejected("does not import")
    outcomes = {
        name: all(own)
        for name in candidate.tests
        if (own := [ok for case, ok in cases.items() if _is_case(case, reported_name(name))])
    }
    return outcomes, ran.report


def _is_case(case: str, name: str) -> bool:
    return case == name or case.startswith(f"{name}[")


def _error_of(test: str, report: bytes) -> str:
    """The error message of a test."""
    for case in ElementTree.fromstring(report).iter("testcase"):
        if _is_case(f"{case.get('classname')}::{case.get('name')}", reported_name(test)):
            for failure in (*case.iter("failure"), *case.iter("error")):
                return _REPRODUCTION.sub("", failure.get("message", "")).strip()
    return ""


def _assembled(
    draft: Draft, candidate: Candidate, repository: Repository, found: _Found
) -> RepositoryTask:
    """The task, with the tests that notice the change hidden from the agent."""
    tests = dict(candidate.test_files)
    changes = dict(candidate.broken)
    first = ""
    for path in dict.fromkeys(name.partition("::")[0] for name in found.failing):
        content = tests.get(path) or candidate.base[path]
        names = {name.partition("::")[2] for name in found.failing if name.startswith(f"{path}::")}
        sources = functions_of(content)
        first = first or sources.get(found.failing[0].partition("::")[2], "")
        if candidate.test_files:
            continue  # the agent has their earlier version
        tests[path] = content
        if candidate.shows_tests:
            continue
        # tests that are inherited from a base class in another file are hidden with their file
        changes[path] = without_functions(content, names) if names <= sources.keys() else b""
    if any(fails_to_parse(changes[path]) for path in changes if path.endswith(".py")):
        raise Rejected("cannot be parsed")
    instruction = instruct(draft.id, draft.kind, candidate.facts, found.failing, first, found.error)
    return RepositoryTask(
        id=draft.id,
        kind=draft.kind,
        repository=repository.name,
        origin=repository.origin,
        instruction=instruction.strip() + "\n",
        base=candidate.base,
        changes=changes,
        solution=candidate.solution,
        tests=tests,
        fail_to_pass=found.failing,
        pass_to_pass=found.passing,
        sources=repository.recipe.sources,
        venv=repository.name,
        requirements=repository.requirements,
        pythonpath=repository.recipe.pythonpath,
        processor_s=_processor_s(candidate, repository),
        facts={
            name: told for name, told in candidate.facts.items() if name not in ("head", "message")
        },
    )


def fails_to_parse(content: bytes) -> bool:
    try:
        compile(content, "file", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return True
    return False
