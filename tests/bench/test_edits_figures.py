"""Edits from a git history, and passes counted over them with a model that knows the answer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from etude.bench.edits import Edit, counted, history, one_line_change, words
from etude.core.errors import EtudeError


def commit(repo: Path, text: str) -> None:
    (repo / "a.py").write_text(text)
    for arguments in (
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", "-C", str(repo), *arguments], check=True)


def test_edits_are_taken_from_a_history(tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="--repo"):
        history(tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    lines = [f"value_{n} = {n * n}\n" for n in range(50)]
    commit(tmp_path, "".join(lines))
    with pytest.raises(EtudeError, match="a file of 40 to 600 lines"):
        history(tmp_path)
    changed = [*lines[:20], "value_20 = other(3)\n", *lines[21:]]
    commit(tmp_path, "".join(changed))
    (edit,) = history(tmp_path)
    assert edit == Edit("".join(lines), "".join(changed))
    assert edit.kept == 0.98


def test_a_file_with_one_changed_line_takes_few_passes() -> None:
    edit = one_line_change()
    assert len(edit.after.splitlines()) == 200
    assert (
        sum(a != b for a, b in zip(edit.before.splitlines(), edit.after.splitlines(), strict=True))
        == 1
    )
    anew = Edit("nothing\n" * 50, edit.after)
    figures = counted([edit, anew], words())
    assert (figures["edits.count"], figures["all.count"]) == (1, 2)
    assert figures["edits.tokens_per_pass"] > 40
    assert 1 < figures["all.tokens_per_pass"] < figures["edits.tokens_per_pass"]
