"""Results that processes share through a folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etude.core.sandbox import CommandResult, Limits, SandboxSpec, spec_digest
from etude.core.types import Part, Score
from etude.store.memo import FolderMemo

RESULT = CommandResult(1, "1 failed, ä\n", b"\x00<xml/>")
SCORE = Score(0.5, (Part("tests", 0.5, "1 of 2"),))


class Work:
    def __init__(self, result: CommandResult = RESULT) -> None:
        self.result = result
        self.done = 0

    async def __call__(self) -> CommandResult:
        self.done += 1
        await asyncio.sleep(0)
        return self.result


def memo(folder: Path) -> FolderMemo[CommandResult]:
    return FolderMemo(8, folder, CommandResult)


async def test_another_process_finds_what_was_computed(tmp_path: Path) -> None:
    work = Work()
    for _ in range(2):
        own = memo(tmp_path / "new" / "tests")
        found = await asyncio.gather(*(own.get(("a", 1), work) for _ in range(3)))
        assert found == [RESULT] * 3
    assert work.done == 1
    await memo(tmp_path / "new" / "tests").get(("a", 2), work)
    assert work.done == 2


async def test_verdicts_come_back_as_they_were(tmp_path: Path) -> None:
    async def judge() -> Score:
        return SCORE

    async def refuse() -> Score:
        raise AssertionError("it is there")

    await FolderMemo(8, tmp_path, Score).get("a", judge)
    assert await FolderMemo(8, tmp_path, Score).get("a", refuse) == SCORE


async def test_what_is_not_to_be_kept_and_what_fails_leaves_no_file(tmp_path: Path) -> None:
    async def fail() -> CommandResult:
        raise TimeoutError

    await memo(tmp_path).get("a", Work(), keep=lambda result: result.exit_code == 0)
    with pytest.raises(TimeoutError):
        await memo(tmp_path).get("a", fail)
    assert not list(tmp_path.iterdir())


async def test_a_file_that_was_cut_off_is_computed_and_written_again(tmp_path: Path) -> None:
    work = Work()
    await memo(tmp_path).get("a", work)
    [file] = tmp_path.iterdir()
    for damage in (b"", file.read_bytes()[:-1], b"no result"):
        file.write_bytes(damage)
        assert await memo(tmp_path).get("a", work) == RESULT
    assert await memo(tmp_path).get("a", work) == RESULT
    assert work.done == 4 and [*tmp_path.iterdir()] == [file]


async def test_two_who_compute_the_same_at_once_leave_one_file(tmp_path: Path) -> None:
    work = Work()
    found = await asyncio.gather(*(memo(tmp_path).get("a", work) for _ in range(5)))
    assert found == [RESULT] * 5 and work.done == 5
    assert len([*tmp_path.iterdir()]) == 1


def test_only_equal_specs_have_the_same_digest() -> None:
    spec = SandboxSpec(files={"a.py": "x", "b.py": b"y"}, env={"A": "1", "B": "2"})
    others = [
        SandboxSpec(),
        SandboxSpec(files={"a.py": "x", "b.py": b"z"}, env={"A": "1", "B": "2"}),
        SandboxSpec(files={"a.py": "xb.py", "": b"y"}, env={"A": "1", "B": "2"}),
        SandboxSpec(files={"a.py": "x", "b.py": b"y"}, env={"A": "1"}),
        SandboxSpec(files=spec.files, env=spec.env, image="debian"),
        SandboxSpec(files=spec.files, env=spec.env, limits=Limits(processes=7)),
    ]
    assert len({spec_digest(each) for each in (spec, *others)}) == 1 + len(others)
    same = SandboxSpec(files={"b.py": "y", "a.py": b"x"}, env={"B": "2", "A": "1"})
    assert spec_digest(same) == spec_digest(spec)
