"""Files given to a command: where they are looked up, and which are allowed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from etude.commands.production import _is_gone_id, _write_lines
from etude.commands.run_file import _check_started_there
from etude.commands.trial import _given_solver
from etude.core.consent import Tombstone
from etude.core.errors import EtudeError


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (
            "here.py:Loss",
            r"mine/here.py does not exist, but .*here.py does: write '../here.py:Loss'",
        ),
        ("here.py", "write '../here.py'$"),
        ("data/*.jsonl", r"write '../data/\*.jsonl'"),
        ("there.py:Loss", ""),
        ("both.py", ""),
        ("nowhere.py:Loss", ""),
    ],
)
def test_a_path_that_starts_elsewhere_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("here.py", "mine/there.py", "both.py", "mine/both.py", "data/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if why:
        with pytest.raises(EtudeError, match=why):
            _check_started_there("stage.rl.loss", place, Path("mine"))
    else:
        _check_started_there("stage.rl.loss", place, Path("mine"))


def test_a_solution_is_a_directory_a_patch_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "files" / "inner").mkdir(parents=True)
    for name in ("b.py", "a.py", "inner/c.py"):
        (tmp_path / "files" / name).write_text(name)
    solver = _given_solver(tmp_path / "files")
    assert list(solver._files.items()) == [
        ("a.py", b"a.py"), ("b.py", b"b.py"), ("inner/c.py", b"inner/c.py")
    ]  # fmt: skip
    assert not solver._patch
    (tmp_path / "x.patch").write_text("diff")
    solver = _given_solver(tmp_path / "x.patch")
    assert (solver._files, solver._patch) == ({}, "diff")
    one = tmp_path / "files" / "a.py"
    assert _given_solver(one)._files == {"a.py": b"a.py"}
    assert _given_solver(Path(f"{one}:shop/cart.py"))._files == {"shop/cart.py": b"a.py"}
    for wrong in (tmp_path / "gone.py", tmp_path / "gone.patch"):
        with pytest.raises(EtudeError, match="No such file or directory; give a directory"):
            _given_solver(wrong)


def test_lines_are_written_whole_and_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.jsonl"
    _write_lines(path, [{"a": "é"}, {"b": 1}])
    assert path.read_text() == '{"a": "é"}\n{"b": 1}\n'
    _write_lines(path, [])
    assert path.read_text() == "" and os.listdir(path.parent) == ["lines.jsonl"]


def test_who_is_gone_is_gone_with_what_came_before() -> None:
    tombstones = {"ada": Tombstone(user="ada", time=1000.0)}
    for started, gone in ((999_000, True), (1_000_000, True), (1_000_001, False)):
        assert _is_gone_id(f"ada.{started:013d}-x", tombstones) is gone
    assert not _is_gone_id("bob.0000000000001-x", tombstones)
