"""The proof of a draft, with sandboxes that give scripted answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import VENVS, CommandResult, SandboxPool, SandboxSpec
from etude.core.types import Part, Score
from etude.factory import check as checking
from etude.factory import prove as proving
from etude.factory.candidates import Candidate, Draft
from etude.factory.harbor import read_settings, read_task, write_task
from etude.factory.prove import Rejected, Repository, Seen, check_both_ends, digests_of, prove
from etude.factory.recipe import Recipe
from etude.factory.survey import Survey
from etude.factory.swebench import Row, read_rows, row_of, write_rows
from etude.factory.task import LIMITS, RepositoryTask, is_test_file, pytest_argv, sandbox_env

TESTS = b"""\
class TestShop:
    def test_total(self):
        assert total([1]) == 1

    def test_names(self):
        assert names() == []


def test_other():
    assert 1
"""
GOOD = b"def total(items):\n    return sum(items)\n\n\ndef names():\n    return []\n"
BAD = GOOD.replace(b"sum(items)", b"sum(items) + 1")
TOTAL, NAMES, OTHER = (
    f"tests/test_shop.py::{name}"
    for name in ("TestShop::test_total", "TestShop::test_names", "test_other")
)
REPOSITORY = Repository(
    name="shop",
    origin="https://host/shop@" + "0" * 40,
    files={"shop/cart.py": GOOD, "tests/test_shop.py": TESTS},
    recipe=Recipe(
        requirements=("pytest",), pythonpath=("src", ""), tests=("tests",), sources=("shop/*",)
    ),
    survey=Survey(seconds={TOTAL: 1.0, NAMES: 0.5, OTHER: 0.25}, lines={}, start_s=2.0),
    requirements=("pytest==9.0", "six==1.0"),
)
CANDIDATE = Candidate(
    base=REPOSITORY.files,
    broken={"shop/cart.py": BAD},
    solution={"shop/cart.py": GOOD},
    tests=(TOTAL, NAMES, OTHER),
    facts={"functions": "shop/cart.py:total", "mutations": "constant", "head": "def"},
)  # fmt: skip


def report(outcomes: Mapping[str, str | None]) -> bytes:
    """A report as pytest writes it. `outcomes`: test -> its failure."""
    cases = []
    for test, failure in outcomes.items():
        path, *names = test.split("::")
        module = ".".join([path.removesuffix(".py").replace("/", "."), *names[:-1]])
        inner = "" if failure is None else f'<failure message="{failure}"/>'
        cases.append(f'<testcase classname="{module}" name="{names[-1]}">{inner}</testcase>')
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>".encode()


class Scripted:
    """Sandboxes, one after the other, with these results of their command."""

    def __init__(self, *results: CommandResult) -> None:
        self.results = list(results)
        self.specs: list[SandboxSpec] = []
        self.asked: list[tuple[Any, ...]] = []

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Any]:
        self.specs.append(spec)
        yield SimpleNamespace(run=self._run, write=self._write)

    async def _run(self, argv: list[str], **how: Any) -> CommandResult:
        self.asked.append((argv, how))
        return self.results.pop(0)

    async def _write(self, path: str, content: bytes) -> None:
        self.asked.append((path, content))


def ran(outcomes: Mapping[str, str | None], exit_code: int | None = 1) -> CommandResult:
    return CommandResult(exit_code, "", report(outcomes))


async def proved(
    monkeypatch: pytest.MonkeyPatch,
    candidate: Candidate,
    *results: CommandResult,
    kind: str = "bug",
) -> tuple[RepositoryTask, Scripted]:
    async def no_check(*_: Any) -> None: ...

    monkeypatch.setattr(proving, "check_both_ends", no_check)
    pool, draft = Scripted(*results), Draft("shop-bug-1", kind, lambda: candidate)
    return await prove(draft, REPOSITORY, Seen(), pool), pool  # type: ignore[arg-type]


FAILS = ran({TOTAL: "assert 2 == 1", f"{NAMES}[a]": None, f"{NAMES}[b]": None, OTHER: None})


async def test_a_solution_that_the_detector_flags_makes_no_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = GOOD.replace(b"sum(items)", b"sum(items) if sys._getframe().f_back else 0")
    candidate = replace(CANDIDATE, solution={"shop/cart.py": good})
    with pytest.raises(Rejected, match="^looks like a trick$"):
        await proved(monkeypatch, candidate, FAILS)
    there = replace(candidate, broken={"shop/cart.py": good.replace(b"return []", b"return 0")})
    await proved(monkeypatch, there, FAILS)


async def test_a_task_is_all_that_is_known_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    task, pool = await proved(monkeypatch, CANDIDATE, FAILS)
    shown = TESTS.replace(b"    def test_total(self):\n        assert total([1]) == 1\n", b"")
    assert task == RepositoryTask(
        id="shop-bug-1",
        kind="bug",
        repository="shop",
        origin=REPOSITORY.origin,
        instruction=task.instruction,
        base=REPOSITORY.files,
        changes={"shop/cart.py": BAD, "tests/test_shop.py": shown},
        solution={"shop/cart.py": GOOD},
        tests={"tests/test_shop.py": TESTS},
        fail_to_pass=(TOTAL,),
        pass_to_pass=(NAMES, OTHER),
        sources=("shop/*",),
        venv="shop",
        requirements=("pytest==9.0", "six==1.0"),
        pythonpath=("src", ""),
        processor_s=4 + 4 * 3.75,
        facts={"functions": "shop/cart.py:total", "mutations": "constant"},
    )
    assert task.instruction.endswith("\n") and task.instruction == task.instruction.strip() + "\n"
    (spec,) = pool.specs
    assert spec.files == {**REPOSITORY.files, "shop/cart.py": BAD}
    assert spec.limits == LIMITS == task.as_task().sandbox.limits
    assert spec.env == task.as_task().sandbox.env
    assert spec.env == sandbox_env("shop", ("src", ""), REPOSITORY.requirements)
    ((argv, how),) = pool.asked
    # 4 seconds, and 4 times the duration of the tests and their start
    assert argv == pytest_argv(CANDIDATE.tests, plain=False, processor_s=4 + 4 * 3.75)
    assert how["report"] is True


async def test_tests_that_are_shown_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    task, _ = await proved(monkeypatch, replace(CANDIDATE, shows_tests=True), FAILS)
    assert task.changes == {"shop/cart.py": BAD} and task.tests == {"tests/test_shop.py": TESTS}


async def test_advice_of_hypothesis_is_not_what_a_user_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advice = "You can reproduce this test case by adding @reproduce_failure('6', b'AA==') here"
    failure = f"assert 2 == 1&#10;Failing test case: x=1&#10;&#10;{advice}&#10;and more"
    results = ran({TOTAL: failure, NAMES: None, OTHER: None})
    task, _ = await proved(monkeypatch, CANDIDATE, results, kind="bugs")
    assert "assert 2 == 1\nFailing test case: x=1\nand more\n" in task.instruction


async def test_tests_of_a_base_class_hide_with_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = "tests/test_shop.py::TestShop::test_inherited"
    candidate = replace(CANDIDATE, tests=(inherited, OTHER))
    task, _ = await proved(monkeypatch, candidate, ran({inherited: "boom", OTHER: None}))
    assert task.changes["tests/test_shop.py"] == b"" and task.fail_to_pass == (inherited,)


async def test_tests_that_came_with_a_commit_pass_with_it_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A test that fails even with the solution is not a test of it."""
    candidate = replace(
        CANDIDATE,
        broken={},
        tests=(TOTAL, NAMES, OTHER),
        test_files={"tests/test_shop.py": TESTS + b"\n# new\n"},
        facts={"message": "Add totals"},
    )
    with_it = ran({TOTAL: None, NAMES: "broken anyway", OTHER: None})
    task, pool = await proved(
        monkeypatch, candidate, with_it, replace(FAILS, exit_code=2), kind="history"
    )
    assert [spec.files["shop/cart.py"] for spec in pool.specs] == [GOOD, GOOD]
    assert all(spec.files["tests/test_shop.py"] == TESTS + b"\n# new\n" for spec in pool.specs)
    assert (task.fail_to_pass, task.pass_to_pass) == ((TOTAL,), (OTHER,))
    assert task.changes == {} and task.tests == candidate.test_files
    assert task.instruction == "Add totals\n"


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (ran({TOTAL: None, NAMES: None, OTHER: None}, 0), "no test notices"),
        (CommandResult(None, ""), "hangs"),
        (CommandResult(-24, ""), "hangs"),
        (CommandResult(-9, ""), "hangs"),
        (CommandResult(1, "", b"no XML"), "no report"),
        (ran({}, 1), "does not import"),
        (ran({TOTAL: "boom"}, 2), "does not import"),
    ],
)
async def test_what_tells_nothing_is_rejected(
    monkeypatch: pytest.MonkeyPatch, result: CommandResult, why: str
) -> None:
    with pytest.raises(Rejected, match=why):
        await proved(monkeypatch, CANDIDATE, result)


async def test_every_change_must_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    both = replace(CANDIDATE, noticed_by=(frozenset({TOTAL}), frozenset({NAMES, OTHER})))
    with pytest.raises(Rejected, match="a change goes unnoticed"):
        await proved(monkeypatch, both, FAILS)
    await proved(monkeypatch, both, ran({TOTAL: "boom", NAMES: None, OTHER: "boom"}))


async def test_what_is_no_python_any_more_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for broken in (b"def total(:\n", b"\0"):
        with pytest.raises(Rejected, match="not to be parsed"):
            await proved(monkeypatch, replace(CANDIDATE, broken={"shop/cart.py": broken}), FAILS)
    data = replace(CANDIDATE, broken={"shop/cart.py": BAD, "notes.md": b"def total(:\n"})
    await proved(monkeypatch, data, FAILS)


async def test_a_draft_that_comes_to_nothing() -> None:
    with pytest.raises(Rejected, match="nothing there"):
        await prove(Draft("a", "bug", lambda: None), REPOSITORY, Seen(), Scripted())  # type: ignore[arg-type]


async def test_a_test_that_is_not_known_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    survey = replace(REPOSITORY.survey, seconds={TOTAL: 1.0})
    monkeypatch.setattr(Survey, "estimate_s", lambda *_: 1.0)
    pool = Scripted(FAILS)
    await proving._look(CANDIDATE, replace(REPOSITORY, survey=survey), pool)  # type: ignore[arg-type]
    assert "ulimit -t 30;" in pool.asked[0][0][2]


def score(reward: float, share: float = 0.0) -> Score:
    return Score(reward, (Part("tests", share, ""),))


@pytest.mark.parametrize(
    ("nothing", "solved", "why"),
    [
        ([score(0.0), score(0.0)], [score(1.0), score(1.0)], None),
        ([score(1.0), score(1.0)], [], "no change passes"),
        ([score(0.0), score(1.0)], [], "flaky"),
        ([score(0.0, 0.5), score(0.0, 0.25)], [], "flaky"),
        ([score(0.0), score(0.0)], [score(0.0), score(0.0)], "the solution fails"),
        ([score(0.0), score(0.0)], [score(1.0), score(0.0)], "flaky"),
    ],
)
async def test_both_ends_are_graded_again_and_again(
    monkeypatch: pytest.MonkeyPatch, nothing: list[Score], solved: list[Score], why: str | None
) -> None:
    scores = iter([*nothing, *solved])

    async def grade(*_: Any) -> Score:
        return next(scores)

    monkeypatch.setattr(proving, "grade", grade)
    task, pool = task_of(), Scripted()
    if why is None:
        await check_both_ends(task, pool, 2)  # type: ignore[arg-type]
        assert pool.asked == [("shop/cart.py", GOOD)]
        assert [spec.files for spec in pool.specs] == [task.opening, task.opening]
    else:
        with pytest.raises(Rejected, match=why):
            await check_both_ends(task, pool, 2)  # type: ignore[arg-type]
    assert next(scores, None) is None


def task_of(**changes: Any) -> RepositoryTask:
    made = RepositoryTask(
        id="shop-bug-1", kind="bug", repository="shop", origin="shop==1.2@" + "0" * 40,
        instruction="Mend it.\n", base=REPOSITORY.files, changes={"shop/cart.py": BAD},
        solution={"shop/cart.py": GOOD}, tests={"tests/test_shop.py": TESTS + b"\n# hidden\n"},
        fail_to_pass=(TOTAL,), pass_to_pass=(OTHER,), sources=("shop/*",), venv="shop",
        requirements=("six==1.0",), pythonpath=("src", ""),
        facts={"functions": "shop/cart.py:total"},
    )  # fmt: skip
    return replace(made, **changes)


def test_two_tasks_are_alike_by_their_lines_or_by_their_place() -> None:
    first = digests_of(task_of())
    assert len(first) == 2
    lines = task_of(kind="bugs", fail_to_pass=(NAMES,), facts={})
    place = task_of(solution={"shop/cart.py": GOOD + b"x = 1\n"})
    other = replace(place, facts={"functions": "shop/cart.py:names"})
    assert len(first & digests_of(lines)) == 1 and len(first & digests_of(place)) == 1
    assert not first & digests_of(other)
    assert digests_of(task_of(id="another", instruction="Please.")) == first


def test_a_solution_in_reach_is_a_leak() -> None:
    long = b"".join(b"line %d\n" % n for n in range(9))
    task = task_of(changes={"shop/cart.py": b""}, solution={"shop/cart.py": long})
    Seen().check_leaks(task.base, task.opening, task.solution)  # its own file is where it belongs
    elsewhere = {**task.base, "copy.txt": long}
    with pytest.raises(Rejected, match="leak"):
        Seen().check_leaks(elsewhere, task.opening, task.solution)
    seen = Seen(installed={"shop": proving.windows_of({"x": long})["x"]})
    with pytest.raises(Rejected, match="installed"):
        seen.check_leaks(task.base, task.opening, task.solution)
    with pytest.raises(Rejected, match="installed"):
        seen.check_installed(task.opening, task.solution)
    Seen().check_installed(task.opening, task.solution)


async def test_no_test_runs_for_what_leaks() -> None:
    long = b"".join(b"line %d\n" % n for n in range(9))
    made = Candidate(
        base={"shop/cart.py": b"", "copy.txt": long},
        broken={"shop/cart.py": b""},
        solution={"shop/cart.py": long},
        tests=(NAMES,),
        facts={},
    )
    draft = Draft("shop-1", "bug", lambda: made)
    with pytest.raises(Rejected, match="leak"):
        await prove(draft, REPOSITORY, Seen(), cast(SandboxPool, None))


def test_trees_that_were_looked_at_are_forgotten_in_time() -> None:
    seen = Seen()
    for _ in range(30):
        seen._windows({"a": b"x"})
    assert 1 <= len(seen._trees) <= 9


def test_rows_are_written_and_read_as_they_are(tmp_path: Path) -> None:
    tasks = [task_of(), task_of(id="two", facts={"parent": "abc"})]
    assert write_rows(tmp_path / "rows.jsonl", tasks) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    (tmp_path / "rows.jsonl").open("a").write("\n  \n")
    rows = read_rows(tmp_path / "rows.jsonl")
    assert rows == [row_of(task) for task in tasks]
    first = rows[0]
    assert (first.instance_id, first.repo, first.version) == ("shop-bug-1", "shop==1.2", "1.2")
    assert (first.base_commit, rows[1].base_commit) == ("0" * 40, "abc")
    by_ssh = row_of(task_of(origin=f"git@host:shop.git@{'a' * 40}"))
    assert (by_ssh.repo, by_ssh.base_commit) == ("git@host:shop.git", "a" * 40)
    of_folder = row_of(task_of(origin="shop"))
    assert (of_folder.repo, of_folder.base_commit) == ("shop", "")
    assert (first.fail_to_pass, first.pass_to_pass) == ((TOTAL,), (OTHER,))
    assert "+    return sum(items)\n" in first.patch and "+# hidden" in first.test_patch
    assert "-    return sum(items)\n" in first.setup_patch
    assert first.problem_statement == "Mend it.\n"
    written = replace(first, problem_statement="a\u2028b").to_json().replace(r"\u2028", "\u2028")
    (tmp_path / "rows.jsonl").write_text(written)
    assert [row.problem_statement for row in read_rows(tmp_path / "rows.jsonl")] == ["a\u2028b"]
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{oh\n')
    with pytest.raises(EtudeError, match=r"rows.jsonl:1: no row .* 'instance_id'"):
        read_rows(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text(f"{first.to_json()}\n{{oh\n")
    with pytest.raises(EtudeError, match=r"rows.jsonl:2: the line is no JSON \(.* column 2"):
        read_rows(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("names", ["[oh", '{"a": 1}', "[1]", None, 3])
def test_lists_of_tests_are_lists_of_texts(names: object) -> None:
    record: dict[str, object] = dict.fromkeys(
        ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch"), "x"
    )
    good = record | {"FAIL_TO_PASS": '["a"]', "PASS_TO_PASS": ["b"]}
    found = Row.from_json(good, "here")
    assert (found.fail_to_pass, found.pass_to_pass) == (("a",), ("b",))
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        with pytest.raises(EtudeError, match="here: .*list"):
            Row.from_json(good | {key: names}, "here")


def test_a_task_that_is_written_again_is_the_new_one(tmp_path: Path) -> None:
    """Nothing of the old one is left, and Harbor finds what it needs."""
    write_task(tmp_path, task_of(tests={"tests/old.py": b"old"}, solve_rate=0.5), tmp_path / "a")
    task = task_of(solve_rate=0.25)
    place = write_task(tmp_path, task, tmp_path / "a")
    assert read_task(place) == task
    assert {path.name for path in tmp_path.iterdir()} == {"a", task.id}
    settings = read_settings(place)
    assert settings["agent"] == {"timeout_sec": 1800.0}
    assert settings["verifier"] == {"timeout_sec": 180.0}
    assert settings["environment"] == {
        "cpus": 1, "memory_mb": 2048, "storage_mb": 128, "network_mode": "no-network"
    }  # fmt: skip
    assert settings["task"]["name"] == "etude/shop-bug-1"
    assert settings["metadata"]["category"] == "software-engineering"
    docker = (place / "environment" / "Dockerfile").read_text()
    assert "pip install --no-cache-dir six==1.0\n" in docker
    assert "ENV PYTHONPATH=/work/src:/work PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0\n" in docker
    for script in ("solution/solve.sh", "tests/test.sh"):
        assert (place / script).stat().st_mode & 0o777 == 0o755
        assert (place / script).read_text().startswith("#!/bin/sh\n")
    tests = (place / "tests" / "test.sh").read_text()
    assert TOTAL in tests and OTHER in tests and "echo $reward > /logs/verifier/reward.txt" in tests


@pytest.mark.parametrize("content", [b"\xff", b"a = ", None])
def test_settings_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "task.toml").write_bytes(content)
    with pytest.raises(EtudeError, match="is this a task of Harbor"):
        read_settings(tmp_path)


def test_what_commands_find_in_their_environment() -> None:
    plain = {
        "PATH": f"{VENVS}/shop/bin:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": "/work/src:/work",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
    others = ("pytest==9.0", "hypothesis-jsonschema==0.23")
    assert sandbox_env("shop", ("src", ""), others) == plain
    # pytest knows the option only if hypothesis is installed
    for requirement in ("hypothesis==6.1", "Hypothesis[numpy] >= 6", "hypothesis"):
        env = sandbox_env("shop", ("src", ""), (*others, requirement))
        assert env["PYTEST_ADDOPTS"] == "--hypothesis-seed=0" and env.items() > plain.items()
        assert "CI" not in env
    (shell, flag, command) = pytest_argv(("a b.py::c",), processor_s=1.2)
    assert (shell, flag) == ("sh", "-c") and command.startswith(
        "ulimit -t 2; exec python -m pytest"
    )
    assert command.endswith("--assert=plain --junitxml=$ETUDE_REPORT 'a b.py::c'")
    assert "ulimit" not in pytest_argv(())[2] and "plain" not in pytest_argv((), plain=False)[2]


@pytest.mark.parametrize(
    ("path", "is_test"),
    [
        ("tests/a.py", True), ("a/test/b.py", True), ("testing/b.py", True), ("test_a.py", True),
        ("a_test.py", True), ("a/conftest.py", True), ("tests.py", True), ("test.py", True),
        ("a/contest.py", False), ("latest/a.py", False), ("a/test_data.txt", True),
        ("attest.py", False), ("tests_a.py", False),
    ],
)  # fmt: skip
def test_files_of_the_tests(path: str, is_test: bool) -> None:
    assert is_test_file(path) is is_test


async def test_a_sandbox_that_breaks_is_told_and_does_not_end_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check_both_ends(task: RepositoryTask, pool: SandboxPool, repetitions: int) -> None:
        if task.id == "one":
            raise RolloutFailure("sandbox: no answer in 240 s")

    monkeypatch.setattr(checking, "check_both_ends", check_both_ends)
    for name in ("one", "two"):
        write_task(tmp_path / "tasks", task_of(id=name), tmp_path / "archives")
    found = await checking.check(
        tmp_path, cast(SandboxPool, None), repetitions=1, jobs=1, changed=lambda found: None
    )
    assert (found.tasks, found.ok, found.flaky) == (2, 1, 0)
    assert found.broken == {"one": "sandbox: no answer in 240 s"}
