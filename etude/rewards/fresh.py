"""Verdict on a whole working copy, by a command that runs in a sandbox which the agent never
touched.

The agent's processes are killed and its changes are collected: text and binary files, deletions,
modes, and links as such. A fresh sandbox of the same spec receives these changes, and then the
grader's files over them, so that no edit of a test counts. Nothing that the agent left running,
linked or cached takes part.

The agent's code does run there, together with the tests. It can end their process with status 0, or
print what a passed test prints, so the exit code alone proves little. A report names each test. It
comes over a separate pipe that only this command uses, and is believed only if it names all
expected tests and nothing else went wrong. Code that sets out to forge it can; if that is a
concern, keep the answers on the host (`rewards.tests`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from etude.core.errors import RolloutFailure
from etude.core.memo import Memo
from etude.core.sandbox import (
    CommandResult,
    Patch,
    Sandbox,
    SandboxPool,
    SandboxSpec,
    patch_digest,
    spec_digest,
)
from etude.core.types import Part, Score
from etude.rewards.junit import parse_junit

CACHES = ("__pycache__/*", "*/__pycache__/*", "*.pyc", ".pytest_cache/*", ".git/*")
"""Paths of a patch that are not the agent's work, and could stand in for it. A star matches
slashes."""
_FILE = 0o100644
_SHOWN_LINES = 20


async def run_in_fresh_sandbox(
    sandbox: Sandbox,
    pool: SandboxPool,
    spec: SandboxSpec,
    argv: Sequence[str],
    *,
    timeout_s: float,
    files: Mapping[str, str | bytes] | None = None,
    only: Collection[str] = ("*",),
    without: Collection[str] = CACHES,
) -> CommandResult:
    """Run a command over a working copy, in a fresh sandbox of the `spec` that it was opened with.
    `files` are the grader's own, put over it last. Changes are left out if their path matches no
    pattern of `only`, or one of `without`. ValueError if the agent has left the working copy in a
    state in which it cannot be taken over."""
    change = await sandbox.patch(only=only, without=without)
    return await _run_over(change, pool, spec, argv, timeout_s, files or {})


async def _run_over(
    change: Patch,
    pool: SandboxPool,
    spec: SandboxSpec,
    argv: Sequence[str],
    timeout_s: float,
    files: Mapping[str, str | bytes],
) -> CommandResult:
    async with pool.open(spec) as fresh:
        await fresh.apply(change)
        await fresh.apply(_as_patch(files))
        return await fresh.run(argv, timeout_s=timeout_s, report=True)


async def grade_by_command(
    sandbox: Sandbox,
    pool: SandboxPool,
    spec: SandboxSpec,
    argv: Sequence[str],
    *,
    timeout_s: float,
    files: Mapping[str, str | bytes] | None = None,
    only: Collection[str] = ("*",),
    without: Collection[str] = CACHES,
    expected: Collection[str] = (),
    solution: Mapping[str, str | bytes] | None = None,
    graded: Memo[Score] | None = None,
) -> Score:
    """Grade a working copy by a command and its report. The reward is 1.0 if the command ends with
    status 0 and the report (JUnit XML, written to the path in ETUDE_REPORT) lists each of the
    `expected` tests as passed, else 0.0. Names are `classname::name`, as in
    `tests.test_cart::test_total`, which stands for all cases of a parametrized test. The part
    `tests` is the share that passed. `graded`: earlier verdicts, if the same change is to be graded
    only once.

    `solution`: the files of a good answer, if one is known. A command that runs out of time earns
    0, unless it does so with the solution, too: then the machine is to blame, and the result is a
    RolloutFailure.
    """
    try:
        change = await sandbox.patch(only=only, without=without)

        async def run_and_judge() -> Score:
            ran = await _run_over(change, pool, spec, argv, timeout_s, files or {})
            return _judged(ran, expected)

        if graded is None:
            return await run_and_judge()
        own = spec_digest(SandboxSpec(files=files or {}))
        key = spec_digest(spec), own, tuple(argv), tuple(expected), patch_digest(change)
        return await graded.get(key, run_and_judge)
    except TimeoutError:
        if solution is not None:
            good = _as_patch(solution)
            ran = await _run_over(good, pool, spec, argv, timeout_s, files or {})
            if ran.exit_code is None:
                raise RolloutFailure(
                    f"sandbox: the tests of the solution did not end within {timeout_s:g} s "
                    f"either: this machine is too busy to grade"
                ) from None
        return _worthless(f"the command did not end within {timeout_s:g} s")
    except ValueError as e:
        return _worthless(f"the working copy cannot be graded: {e}")


def _judged(ran: CommandResult, expected: Collection[str]) -> Score:
    """The score of a command. TimeoutError if it did not end, which may be due to the machine as
    much as to the work."""
    if ran.exit_code is None:
        raise TimeoutError
    if not expected:
        share = float(ran.exit_code == 0)
        return Score(share, (Part("tests", share, _told(ran)),))
    try:
        cases = parse_junit(ran.report)
    except ValueError as e:
        return _worthless(f"no report: {e}; {_told(ran)}")
    right = [name for name in expected if _passed(name, cases)]
    solved = len(right) == len(expected) and ran.exit_code == 0
    evidence = f"{len(right)} of {len(expected)} test functions passed; {_told(ran)}"
    return Score(float(solved), (Part("tests", len(right) / len(expected), evidence),))


def _passed(name: str, cases: Mapping[str, bool]) -> bool:
    own = [passed for case, passed in cases.items() if case == name or case.startswith(f"{name}[")]
    return bool(own) and all(own)


def _told(ran: CommandResult) -> str:
    last = "\n".join(ran.output.splitlines()[-_SHOWN_LINES:])
    return f"exit code {ran.exit_code}\n{last}"


def _worthless(evidence: str) -> Score:
    return Score(0.0, (Part("tests", 0.0, evidence),))


def _as_patch(files: Mapping[str, str | bytes]) -> Patch:
    return {
        path: (_FILE, content.encode() if isinstance(content, str) else content)
        for path, content in files.items()
    }
