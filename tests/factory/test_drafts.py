"""Drafts of a repository, and the ones worth grading."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from etude.factory import build as building
from etude.factory import prove as proving
from etude.factory.build import BuildLog, Options, Status
from etude.factory.candidates import Candidate, Draft, Drafts, is_one_token
from etude.factory.check import set_aside
from etude.factory.grade import NOT_TAKEN
from etude.factory.prepare import Workshop
from etude.factory.prove import Rejected, Repository, Seen, prove
from etude.factory.recipe import Recipe
from etude.factory.survey import Survey
from etude.factory.task import RepositoryTask, is_test_file
from etude.run.task_folder import heldout_ids, split_ids

TEST = "tests/test_shop.py::test_all"
TASK = RepositoryTask(
    id="shop-bug-1",
    kind="bug",
    repository="shop",
    origin="shop",
    instruction="Mend it.",
    base={"shop/cart.py": b"x = 1\n"},
    changes={"shop/cart.py": b"x = 2\n"},
    solution={"shop/cart.py": b"x = 1\n"},
    tests={},
    fail_to_pass=(TEST,),
    pass_to_pass=(),
    sources=("shop/*",),
    venv="shop",
    requirements=(),
    facts={"functions": "shop/cart.py:total"},
)


def repository(name: str, source: str) -> Repository:
    path, lines = "shop/cart.py", range(1, 1 + len(source.splitlines()))
    return Repository(
        name=name,
        origin=name,
        files={path: source.encode()},
        recipe=Recipe(requirements=(), pythonpath=(), tests=("tests",), sources=("shop/*",)),
        survey=Survey(
            seconds={TEST: 0.1},
            lines={path: {line: frozenset({TEST}) for line in lines}},
            start_s=0.0,
        ),
        requirements=(),
    )


def drafts_of(source: str) -> list[Draft]:
    """Drafts of a package of one file, in which a test runs every line."""
    of = repository("shop", source)
    drafts: Iterator[Draft] = Drafts("shop", of.files, of.recipe, of.survey, None).all()
    found = list(itertools.islice(drafts, 1000))
    assert len(found) < 1000, "there is no end of them"
    return found


def test_several_mistakes_of_one_kind_in_a_line_have_ids_of_their_own() -> None:
    """They may be proven at the same time, and the second would overwrite the first."""
    source = "def area(a):\n    return [a * 2, a * 3, a * 4, a * 5]\n"
    ids = [draft.id for draft in drafts_of(source)]
    assert len(ids) == len(set(ids))
    assert ids == [draft.id for draft in drafts_of(source)]


def test_a_function_is_drafted_a_few_times_only() -> None:
    source = "def area(a):\n    return [a * 2, a + 3, a - 4, a * 5, a + 6, a - 7]\n"
    kinds = Counter(draft.kind for draft in drafts_of(source))
    assert (kinds["token"], kinds["bug"]) == (4, 2)


def test_no_mistake_is_drafted_twice() -> None:
    # there is only one way to get each of these wrong
    source = "".join(f"def part_{n}(a):\n    return a\n\n\n" for n in range(5))
    bugs = [draft.id for draft in drafts_of(source) if draft.kind == "bug"]
    assert len(bugs) == len(set(bugs)) == 5


@pytest.mark.parametrize("source", ["def total(:\n", "print 'of old'\n"])
def test_nothing_is_drafted_of_what_is_no_python(source: str) -> None:
    assert drafts_of(source) == []


def test_several_mistakes_at_once_are_in_different_functions() -> None:
    one = "def total(items):\n    return sum(items) + 1\n"
    assert not [draft for draft in drafts_of(one) if draft.kind == "bugs"]
    both = drafts_of(one + "\n\ndef first(a):\n    return a\n")
    made = [draft.make() for draft in both if draft.kind == "bugs"]
    assert made and all(each and len(each.noticed_by) == 2 for each in made)


async def test_a_task_like_another_is_rejected_before_it_is_graded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graded: list[str] = []

    async def look(*_: Any) -> None: ...

    async def check_both_ends(task: RepositoryTask, *_: Any) -> None:
        graded.append(task.id)

    monkeypatch.setattr(proving, "_look", look)
    monkeypatch.setattr(proving, "_assembled", lambda draft, *_: replace(TASK, id=draft.id))
    monkeypatch.setattr(proving, "check_both_ends", check_both_ends)
    candidate = Candidate(base={}, broken={}, solution={}, tests=(), facts={})
    seen, nobody = Seen(), Any
    drafts = [Draft(id, "bug", lambda: candidate) for id in ("one", "two")]
    assert (await prove(drafts[0], nobody, seen, nobody)).id == "one"
    with pytest.raises(Rejected, match="duplicate"):
        await prove(drafts[1], nobody, seen, nobody)
    assert graded == ["one"]


async def built(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], solution: str
) -> Status:
    """A build of tasks that all have one solution. Every source but the first has an environment
    that shows it, and is prepared once there is a task."""
    task_is_there = asyncio.Event()

    async def prepare(source: str, workshop: Workshop) -> Repository:
        if source != sources[0]:
            await task_is_there.wait()
            (workshop.venvs / source / "lib").mkdir(parents=True)
            (workshop.venvs / source / "lib" / "cart.py").write_text(solution)
        return repository(source, "def total(items):\n    return sum(items) + 1\n")

    async def prove(draft: Draft, of: Repository, seen: Seen, *_: Any) -> RepositoryTask:
        made = replace(TASK, id=draft.id, solution={"shop/cart.py": solution.encode()})
        seen.add(made)
        task_is_there.set()
        return made

    monkeypatch.setattr(building, "prepare", prepare)
    monkeypatch.setattr(building, "prove", prove)
    options = Options(limit=1, jobs=1)
    status = Status(sources=len(sources), limit=1 + len(list(folder.glob("tasks/*"))))
    workshop = Workshop(folder, Any, options.proposer, options.installer)  # type: ignore[arg-type]
    log = BuildLog(folder / "build.jsonl")
    folder.mkdir(exist_ok=True)
    await building._Build(workshop, log, options, status, lambda status: None).run(sources, {})
    return status


async def test_sources_of_a_later_build_share_what_earlier_ones_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the whole limit, of which the first one to be ready would take nearly everything."""

    async def prepare(source: str, workshop: Workshop) -> Repository:
        if source == "slow":
            await asyncio.sleep(0.5)
        return repository(source, "def total(items):\n    return sum(items) + 1\n")

    async def prove(draft: Draft, of: Repository, seen: Seen, *_: Any) -> RepositoryTask:
        return replace(TASK, id=draft.id, repository=of.name)

    class ManyDrafts:
        def __init__(self, name: str, *_: Any) -> None:
            self.name = name

        def all(self) -> Iterator[Draft]:
            return (Draft(f"{self.name}-{n}", "bug", lambda: None) for n in range(100))

    monkeypatch.setattr(building, "prepare", prepare)
    monkeypatch.setattr(building, "prove", prove)
    monkeypatch.setattr(building, "Drafts", ManyDrafts)
    log = BuildLog(tmp_path / "build.jsonl")
    for number in range(10):
        log.add(Draft(f"exam-{number}", "bug", lambda: None), "exam", building.KEPT)
        (tmp_path / "tasks" / f"exam-{number}").mkdir(parents=True)
    monkeypatch.setattr(building._Build, "_refuse_late_leaks", lambda self: None)
    options = Options(limit=20, jobs=1)
    status = Status(sources=2, limit=20)
    workshop = Workshop(tmp_path, Any, options.proposer, options.installer)  # type: ignore[arg-type]
    await building._Build(workshop, log, options, status, lambda status: None).run(
        ["fast", "slow"], {}
    )
    assert [log.kept_of(name) for name in ("exam", "fast", "slow")] == [10, 5, 5]


SOLUTION = "def total(items):\n    full = 0\n    for item in items:\n        full += item\n"


async def test_a_solution_that_a_later_environment_shows_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = await built(tmp_path, monkeypatch, ["shop"], SOLUTION)
    assert status.summary()["kept"] == 1 and len(list(tmp_path.glob("tasks/*"))) == 1
    other = tmp_path / "both"
    status = await built(other, monkeypatch, ["shop", "fork"], SOLUTION)
    assert status.kept == 0 and status.rejected == {"installed": 1}
    assert not list(other.glob("tasks/*"))
    assert {each["verdict"] for each in BuildLog(other / "build.jsonl").entries.values()} == {
        "installed"
    }


async def test_a_build_that_goes_on_keeps_no_task_like_one_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await built(tmp_path, monkeypatch, ["shop"], SOLUTION)
    status = await built(tmp_path, monkeypatch, ["shop"], SOLUTION)
    assert status.kept == 1 and set(status.rejected) == {"duplicate"}


def changing(path: str, function: str, id: str) -> RepositoryTask:
    facts = {"functions": f"{path}:{function}"}
    return replace(TASK, id=id, solution={path: b""}, facts=facts)


def test_about_a_quarter_of_the_files_is_held_out_and_none_by_halves() -> None:
    tasks = {
        part: [changing(f"shop/part_{part}.py", name, f"{name}-{part}") for name in "fg"]
        for part in range(400)
    }
    held = heldout_ids([task for pair in tasks.values() for task in pair])
    sides = [{task.id in held for task in pair} for pair in tasks.values()]
    assert all(len(side) == 1 for side in sides) and 60 <= sides.count({True}) <= 140
    some = [task for part in range(40) for task in tasks[part]]
    assert heldout_ids(some) == {task.id for task in some} & held  # others do not matter


def test_a_file_or_a_function_alone_is_divided_all_the_same() -> None:
    file = {f: [changing("a.py", f"f{f}", f"{f}-{n}") for n in range(2)] for f in range(40)}
    held = heldout_ids([task for pair in file.values() for task in pair])
    assert all(len({task.id in held for task in pair}) == 1 for pair in file.values())
    assert len(held) == 20
    for count, wanted in ((1, 0), (2, 1), (3, 1), (4, 1), (9, 2)):
        function = [changing("a.py", "f", str(n)) for n in range(count)]
        assert len(heldout_ids(function)) == wanted


@pytest.mark.parametrize(
    "after, is_one",
    [
        ("if a <= b: pass\n", True),
        ("if not a < b: pass\n", True),
        ("if a: pass\n", False),
        ("if b < a: pass\n", False),
        ("if a < b: pass\n", False),
    ],
)
def test_one_token_is_replaced_added_or_left_out(after: str, is_one: bool) -> None:
    assert is_one_token(b"if a < b: pass\n", after.encode()) == is_one


def test_a_task_of_one_token_is_in_a_short_function_and_shows_the_tests() -> None:
    short = "def first(a, b):\n    return a < b\n"
    long = "def second(a, b):\n" + "    a = b\n" * 40 + "    return a < b\n"
    made = [draft.make() for draft in drafts_of(f"{short}\n\n{long}") if draft.kind == "token"]
    kept = [each for each in made if each is not None]
    assert [each.facts["functions"] for each in kept] == ["shop/cart.py:first"]
    assert kept[0].shows_tests and kept[0].facts["lines"] == "1 to 2"
    assert kept[0].broken == {"shop/cart.py": f"{short}\n\n{long}".replace("<", "<=", 1).encode()}


def test_a_task_of_one_token_has_the_tests_of_the_whole_function() -> None:
    """Another change of it must not pass for a repair."""
    source = "def first(a, b):\n    if a:\n        return a < b\n    return b\n"
    of = repository("shop", source)
    ran = {1: "t::both", 2: "t::both", 3: "t::less", 4: "t::other"}
    lines = {"shop/cart.py": {line: frozenset({test}) for line, test in ran.items()}}
    seconds = dict.fromkeys(("t::both", "t::less", "t::other", "t::far"), 0.1)
    survey = replace(of.survey, lines=lines, seconds=seconds)
    drafts = Drafts("shop", of.files, of.recipe, survey, None).all()
    made = [draft.make() for draft in itertools.islice(drafts, 100) if draft.kind == "token"]
    less = next(each for each in made if each and b"a <= b" in each.broken["shop/cart.py"])
    assert sorted(less.tests) == ["t::both", "t::less", "t::other"]


@pytest.mark.parametrize(
    "path", ["tests/a.py", "a/testing/b.py", "tests.py", "a/test.py", "test_a.py"]
)
def test_the_grader_takes_over_nothing_that_belongs_to_the_tests(path: str) -> None:
    assert is_test_file(path)
    assert any(fnmatchcase(path, pattern) for pattern in NOT_TAKEN)


@pytest.mark.parametrize("path", ["a.py", "a/latest.py", "a/attests/b.py", "contest/a.py"])
def test_the_grader_takes_over_the_package(path: str) -> None:
    assert not is_test_file(path)
    assert not any(fnmatchcase(path, pattern) for pattern in NOT_TAKEN)


@pytest.mark.parametrize("check", ["assert a == b", "if a != b:\n        raise AssertionError(a)"])
def test_no_bug_is_put_where_tests_may_assert_with_it(check: str) -> None:
    source = f"\f\ndef same(a, b):\n    {check}\n\n\ndef first(a, b):\n    return a < b\n"
    made = [draft.make() for draft in drafts_of(source) if draft.kind in ("token", "bug")]
    assert {each.facts["functions"] for each in made if each} == {"shop/cart.py:first"}


def test_repositories_that_are_set_aside_are_so_whole(tmp_path: Path) -> None:
    tasks = [replace(TASK, id=name, repository=name) for name in ("shop", "bank", "farm", "mill")]
    set_aside(tmp_path, {"heldout": ["bank"], "novel": ["mill"]})
    wanted = {"train": {"shop", "farm"}, "heldout": {"bank"}, "novel": {"mill"}}
    assert split_ids(tasks, tmp_path) == wanted


def test_without_held_out_repositories_a_share_of_the_files_that_are_not_novel_is(
    tmp_path: Path,
) -> None:
    tasks = [changing(f"shop/part_{part}.py", "f", str(part)) for part in range(100)]
    last = replace(TASK, id="last", repository="mill")
    set_aside(tmp_path, {"heldout": [], "novel": ["mill"]})
    found = split_ids([*tasks, last], tmp_path)
    assert found["novel"] == {"last"} and found["heldout"] == heldout_ids(tasks)
    assert sum(map(len, found.values())) == 101
    assert split_ids([last], tmp_path) == {"train": set(), "heldout": set(), "novel": {"last"}}
