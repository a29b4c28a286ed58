"""Survey of the tests of an unchanged repository: which pass every time, how long each takes, and
which lines each runs."""

from __future__ import annotations

import json
import shlex
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from etude.core.sandbox import SandboxPool, SandboxSpec
from etude.factory.recipe import Recipe
from etude.factory.task import LIMITS, PLAIN, PYTEST, Files, sandbox_env

MAX_TESTS = 80
"""Most tests of one task."""
MAX_TESTS_S = 4.0
_RESULT = ".etude-survey"
_PLUGIN = "etude_survey.py"
_SUITE_S = 1500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRun:
    """One run of all tests."""

    outcomes: Mapping[str, tuple[bool, float]]
    """Test -> True if it passed, and its processor seconds."""
    lines: Mapping[str, Mapping[int, Sequence[int]]]
    """File -> line -> the tests that ran it, by their index in `outcomes`."""
    output: str
    start_s: float

    @property
    def passed(self) -> set[str]:
        return {name for name, (passed, _) in self.outcomes.items() if passed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The tests that pass in every run."""

    seconds: Mapping[str, float]
    """Test -> its processor seconds."""
    lines: Mapping[str, Mapping[int, frozenset[str]]]
    """File -> line -> the tests that run it."""
    start_s: float
    """Seconds until the first test runs."""

    def covering(self, path: str, lines: Iterable[int]) -> set[str]:
        """The tests that run any of these lines."""
        known = self.lines.get(path, {})
        return set().union(*(known.get(line, frozenset()) for line in lines))

    def choose(
        self, tests: Iterable[str], most: int = MAX_TESTS, most_s: float = MAX_TESTS_S
    ) -> tuple[str, ...]:
        """As many tests as a task may have, starting with those that run the fewest lines."""
        breadth = self.breadth
        chosen: list[str] = []
        spent = 0.0
        for test in sorted(tests, key=lambda each: (breadth.get(each, 0), each)):
            spent += self.seconds[test]
            if chosen and (spent > most_s or len(chosen) == most):
                break
            chosen.append(test)
        return tuple(sorted(chosen))

    @property
    def breadth(self) -> Mapping[str, int]:
        """Test -> number of lines that it runs."""
        if id(self) not in _BREADTH:
            counts: dict[str, int] = {}
            for lines in self.lines.values():
                for tests in lines.values():
                    for test in tests:
                        counts[test] = counts.get(test, 0) + 1
            _BREADTH[id(self)] = (self, counts)
        return _BREADTH[id(self)][1]

    def estimate_s(self, tests: Iterable[str]) -> float:
        return self.start_s + sum(self.seconds.get(test, 0.0) for test in tests)

    def to_bytes(self) -> bytes:
        told = asdict(self) | {
            "lines": {
                path: {str(line): sorted(tests) for line, tests in lines.items()}
                for path, lines in self.lines.items()
            }
        }
        return zlib.compress(json.dumps(told).encode())

    @classmethod
    def from_bytes(cls, packed: bytes) -> Survey:
        told = json.loads(zlib.decompress(packed))
        lines = {
            path: {int(line): frozenset(tests) for line, tests in found.items()}
            for path, found in told["lines"].items()
        }
        return cls(seconds=told["seconds"], lines=lines, start_s=told["start_s"])


_BREADTH: dict[int, tuple[Survey, Mapping[str, int]]] = {}


def combine(first: SuiteRun, others: Sequence[SuiteRun]) -> Survey:
    """Survey of the tests that passed in all runs. The first one has the lines."""
    stable = first.passed.intersection(*(run.passed for run in others))
    usable = {name for name in stable if name.isprintable() and "'" not in name}
    names = list(first.outcomes)
    plain = others[0] if others else first
    seconds = {name: plain.outcomes[name][1] for name in names if name in usable}
    lines = {
        path: {
            line: frozenset(names[n] for n in tests if names[n] in usable)
            for line, tests in found.items()
        }
        for path, found in first.lines.items()
    }
    return Survey(seconds=seconds, lines=lines, start_s=plain.start_s)


async def run_suite(
    pool: SandboxPool,
    files: Files,
    recipe: Recipe,
    venv: str,
    requirements: Sequence[str],
    *,
    lines: bool,
) -> SuiteRun:
    """Run all tests in a fresh sandbox. `requirements`: the installed ones. `lines`: also record
    the lines that each test runs, which takes longer."""
    plugin = resources.files("etude.factory").joinpath("survey_plugin.py").read_bytes()
    env = sandbox_env(venv, recipe.pythonpath, requirements)
    # a test that needs one order of a set would fail good answers; this exposes it
    env["PYTHONHASHSEED"] = "random"
    if lines:
        env["ETUDE_SURVEY"] = "/work/"
    spec = SandboxSpec(files={**files, _PLUGIN: plugin}, env=env, limits=LIMITS)
    plugin_options = "-p etude_survey --continue-on-collection-errors"
    command = f"{PYTEST} {PLAIN} {plugin_options} {shlex.join(recipe.tests)}"
    async with pool.open(spec) as sandbox:
        ran = await sandbox.run(["sh", "-c", command], timeout_s=_SUITE_S)
        made = await sandbox.patch()
    found: dict[str, Any] = {"tests": {}, "lines": {}, "start_s": 0.0}
    if (entry := made.get(_RESULT)) is not None:
        found = json.loads(zlib.decompress(entry[1]))
    output = ran.output if ran.exit_code is not None else f"timed out\n{ran.output}"
    return SuiteRun(
        outcomes={name: (passed, took) for name, (passed, took) in found["tests"].items()},
        lines={
            path: {int(line): tests for line, tests in each.items()}
            for path, each in found["lines"].items()
        },
        output=output,
        start_s=found["start_s"],
    )
