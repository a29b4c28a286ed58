"""The log of a build, its choice of the next source, and its refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.core.errors import EtudeError
from etude.factory import build as building
from etude.factory.build import KEPT, PER_SOURCE, BuildLog, Options, Status, build, rows_of
from etude.factory.candidates import KINDS, Draft
from etude.factory.check import repositories_of
from etude.factory.swebench import Row


def draft(id: str, kind: str = "bug") -> Draft:
    return Draft(id, kind, lambda: None)


def test_a_log_is_read_as_it_was_written_also_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "build.jsonl"
    log = BuildLog(path)
    log.add(draft("a"), "shop", KEPT, {"y", "x"})
    log.add(draft("b", "stub"), "shop", "flaky")
    with path.open("a") as file:
        file.write('{"task": "c", "rep')
    log = BuildLog(path)
    log.add(draft("d"), "other", KEPT)
    log = BuildLog(path)
    assert log.entries == {
        "a": {"task": "a", "repository": "shop", "kind": "bug", "verdict": KEPT,
              "like": ["x", "y"]},
        "b": {"task": "b", "repository": "shop", "kind": "stub", "verdict": "flaky", "like": []},
        "d": {"task": "d", "repository": "other", "kind": "bug", "verdict": KEPT, "like": []},
    }  # fmt: skip
    assert [log.kept_of(name) for name in ("shop", "other", "third")] == [1, 1, 0]
    left = building._unknown(iter([draft("a"), draft("c"), draft("d")]), log)
    assert [each.id for each in left] == ["c"]


@dataclass
class Line:
    kept: int = 0
    under_way: int = 0
    tried: int = 0


@pytest.mark.parametrize(
    ("lines", "kept", "waiting", "chosen"),
    [
        ([Line(tried=2), Line(tried=1)], 0, 0, 1),  # the one with the fewest attempts
        ([Line(kept=2), Line(kept=3, tried=9)], 4, 0, 0),  # its share is 3
        ([Line(kept=2, under_way=1), Line(kept=0, tried=9)], 2, 0, 1),
        ([Line(kept=3)], 3, 1, None),  # another one is being prepared, and has its share
        ([Line(kept=3)], 3, 0, 0),  # no other one is being prepared
        ([Line(kept=3), Line(kept=3)], 6, 0, None),
        ([Line(kept=2, under_way=2), Line(kept=2)], 4, 0, None),
        ([], 0, 1, None),
    ],
)
def test_whom_a_build_asks_next(
    lines: list[Line], kept: int, waiting: int, chosen: int | None
) -> None:
    status = SimpleNamespace(kept=kept, limit=6, sources=2)
    made = SimpleNamespace(_status=status, _lines=lines, _waiting=waiting, _share=3)
    found = building._Build._choose(made)  # type: ignore[arg-type]
    assert (None if found is None else lines.index(found)) == chosen  # type: ignore[arg-type]


async def begun(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], **options: Any
) -> tuple[Status, dict[str, Any]]:
    seen: dict[str, Any] = {}

    class Nothing:
        def __init__(self, workshop: Any, log: Any, options: Any, status: Any, tell: Any) -> None:
            seen["workshop"] = workshop

        async def run(self, sources: list[str], rows: dict[str, list[Row]]) -> None:
            seen.update(sources=sources, rows=rows)

    @asynccontextmanager
    async def open_workshop(folder: Path, options: Options) -> AsyncIterator[str]:
        yield "workshop"

    monkeypatch.setattr(building, "_Build", Nothing)
    monkeypatch.setattr(building, "open_workshop", open_workshop)
    return await build(sources, folder, Options(**options), lambda status: None), seen


def row(repo: str, id: str = "x") -> str:
    return Row(
        instance_id=id, repo=repo, base_commit="c", problem_statement="", patch="", test_patch="",
        fail_to_pass=(), pass_to_pass=(),
    ).to_json()  # fmt: skip


async def test_what_is_held_out_is_built_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    for name in ("shop", "shop.try"):
        (folder / "venvs" / name).mkdir(parents=True)
    heldout = ("https://h/exam.git",)
    status, seen = await begun(folder, monkeypatch, ["https://h/shop.git"], heldout=heldout)
    assert seen["sources"] == ["https://h/shop.git", "https://h/exam.git"]
    assert (status.sources, status.limit) == (2, 2 * PER_SOURCE)
    assert repositories_of(folder, "heldout") == {"exam"}
    assert [path.name for path in (folder / "venvs").iterdir()] == ["shop"], "what was left is gone"
    await begun(folder, monkeypatch, ["https://h/shop.git"], heldout=("other",), limit=7)
    assert repositories_of(folder, "heldout") == {"exam", "other"}
    assert not repositories_of(folder, "novel")
    _, seen = await begun(folder, monkeypatch, [], heldout=heldout, novel=("https://h/last.git",))
    assert seen["sources"] == ["https://h/exam.git", "https://h/last.git"]
    assert repositories_of(folder, "novel") == {"last"}
    BuildLog(folder / "build.jsonl").add(draft("a"), "shop", KEPT)
    BuildLog(folder / "build.jsonl").add(draft("b"), "last", KEPT)
    await begun(folder, monkeypatch, [], novel=("https://h/last.git",))
    with pytest.raises(EtudeError, match="shop cannot be set aside: .* already has tasks of it"):
        await begun(folder, monkeypatch, [], novel=("https://h/shop.git",))
    with pytest.raises(EtudeError, match="last cannot be both held out and novel"):
        await begun(folder, monkeypatch, [], heldout=("https://other/last.git",))
    assert repositories_of(folder, "heldout") == {"exam", "other"}
    status, _ = await begun(tmp_path / "none", monkeypatch, ["shop"], limit=7)
    assert status.limit == 7 and not (tmp_path / "none" / "heldout.txt").exists()


async def test_what_cannot_be_built_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EtudeError, match="give at least one source"):
        await begun(tmp_path, monkeypatch, [])
    with pytest.raises(
        EtudeError, match=f"unknown kind of tasks 'bog'; choose from {', '.join(KINDS)}"
    ):
        await begun(tmp_path, monkeypatch, ["shop"], kinds=("bug", "bog"))
    with pytest.raises(EtudeError, match="have the same name, shop"):
        await begun(tmp_path, monkeypatch, ["https://a/shop", "https://b/shop"])


def test_rows_are_of_their_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "shop").mkdir(parents=True)
    rows = [row("people/shop", "1"), row("here/shop", "2"), row("https://h/a/b", "3")]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "b.jsonl").write_text(row("people/shop", "4"))
    found = rows_of(["other", "a.jsonl", "b.jsonl"])
    assert {place: [each.instance_id for each in of] for place, of in found.items()} == {
        "https://github.com/people/shop.git": ["1", "4"],
        "here/shop": ["2"],
        "https://h/a/b": ["3"],
    }


def test_a_status_adds_up() -> None:
    status = Status(sources=2, limit=9)
    status.kinds.update(bug=2, stub=1)
    status.rejected.update(flaky=4)
    assert status.kept == 3
    told = json.loads(json.dumps(status.summary()))
    assert (told["kept"], told["kinds"], told["rejected"]) == (
        3,
        {"bug": 2, "stub": 1},
        {"flaky": 4},
    )
