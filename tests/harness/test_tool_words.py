"""The tool schemas that a model sees, and the answers to invalid calls.

`schemas.json` holds the expected schemas. After a change to them, write it again, and read what has
changed in it:

    ETUDE_WRITE_ANSWERS=1 python -m pytest tests/harness/test_tool_words.py
"""

from __future__ import annotations

import asyncio
import json
import os
from operator import length_hint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.core.harness_config import CodeConfig
from etude.core.sandbox import CommandResult
from etude.harness.code import testing
from etude.harness.code.files import READ_LINES, Read, _where
from etude.harness.code.output import clip, plain
from etude.harness.code.terminal import KEPT_BYTES, Job
from etude.harness.code.tool import ToolError, Workspace, check_arguments
from etude.harness.code.toolset import TOOLS, Toolset
from etude.harness.tools import SCHEMAS as BUILT_IN

SCHEMAS = Path(__file__).with_name("schemas.json")


def test_a_model_is_shown_what_it_was_shown() -> None:
    config = CodeConfig(tools=tuple(TOOLS))
    toolset = Toolset(Workspace(None, config, None))  # type: ignore[arg-type]
    found = json.loads(json.dumps({"agent": BUILT_IN, "code": toolset.schemas}))
    if os.environ.get("ETUDE_WRITE_ANSWERS"):
        SCHEMAS.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(SCHEMAS.read_text())


PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "line": {"type": "integer", "minimum": 1},
    "all": {"type": "boolean"},
    "kind": {"type": "string", "enum": ["a", "b"]},
    "names": {"type": "array", "items": {"type": "string"}},
    "todo": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "done": {"type": "boolean"}},
        "required": ["text"],
    },
}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"path": ""}, ""),
        ({"path": "x", "line": 1, "all": False, "kind": "b", "names": []}, ""),
        ({"path": "x", "names": ["a", "b"], "todo": {"text": "a", "done": True}}, ""),
        ([], "the arguments are no JSON object"),
        (None, "the arguments are no JSON object"),
        ({}, "path is missing"),
        ({"path": "x", "b": 1, "a": 1}, "there is no parameter a"),
        ({"path": 3}, "path must be of type string"),
        ({"path": "x", "line": True}, "line must be of type integer"),
        ({"path": "x", "line": 1.0}, "line must be of type integer"),
        ({"path": "x", "line": 0}, "line must be at least 1"),
        ({"path": "x", "all": 1}, "all must be of type boolean"),
        ({"path": "x", "kind": "c"}, "kind must be one of a, b"),
        ({"path": "x", "names": "a"}, "names must be a list"),
        ({"path": "x", "names": ["a", 2]}, "names[1] must be of type string"),
        ({"path": "x", "todo": "a"}, "todo must be of type object"),
        ({"path": "x", "todo": {"done": True}}, "todo: text is missing"),
        ({"path": "x", "todo": {"text": 1}}, "todo: text must be of type string"),
        ({"path": "x", "line": 0, "all": 1}, "line must be at least 1"),
    ],
)
def test_what_is_wrong_with_arguments(arguments: Any, problem: str) -> None:
    assert check_arguments(arguments, PROPERTIES, {"path"}) == problem


@pytest.mark.parametrize(
    ("before", "after", "where"),
    [
        ("a\nb\nc", "a\nx\nc", "line 2"),
        ("a\nb\nc", "x\nb\nc", "line 1"),
        ("a\nb\nc", "a\nb\nx", "line 3"),
        ("a\nb\nc", "a\nx\ny\nc", "lines 2 to 3"),
        ("a\nb\nc", "x\nb\ny", "lines 1 to 3"),
        ("a\nb\nc", "a\nc", "lines were removed after line 1"),
        ("a\nb\nc", "b\nc", "lines were removed after line 0"),
        ("a\na", "a\na\na", "line 3"),
        ("", "a", "line 1"),
    ],
)
def test_which_lines_are_new(before: str, after: str, where: str) -> None:
    assert _where(before, after) == where


class Files:
    """A sandbox with these files, whose working copy is /home/me."""

    def __init__(self, **files: str) -> None:
        self.files = files
        self.asked = 0

    async def read(self, path: str) -> str:
        if path == "binary":
            b"\xff".decode()
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    async def run(self, argv: list[str], **how: Any) -> CommandResult:
        assert argv == ["pwd"]
        self.asked += 1
        return CommandResult(0, "/home/me\n")


async def read(text: str, limit: int = 10_000, **arguments: Any) -> str:
    config = SimpleNamespace(limit_of=lambda kind: limit, command_timeout_s=1.0)
    workspace = Workspace(Files(a=text), config, None)  # type: ignore[arg-type]
    return await Read(workspace).call("a", **arguments)


async def test_a_file_is_shown_in_parts() -> None:
    text = "\n".join(f"line {n}" for n in range(1, READ_LINES + 11))
    whole = (await read(text, 100_000)).split("\n")
    assert whole[0] == "     1\tline 1" and whole[READ_LINES - 1].endswith(f"line {READ_LINES}")
    last = READ_LINES + 10
    follow = f"(lines {READ_LINES + 1} to {last} follow: read with start={READ_LINES + 1})"
    assert whole[READ_LINES:] == [follow]
    assert await read(text, start=2, end=3) == (
        f"     2\tline 2\n     3\tline 3\n(lines 4 to {last} follow: read with start=4)"
    )
    assert await read(text, start=last) == f"   {last}\tline {last}"
    assert await read(text, start=last - 1, end=last + 9) == (
        f"   {last - 1}\tline {last - 1}\n   {last}\tline {last}"
    )
    assert await read("") == "(the file is empty)"
    assert await read("x" * 2001 + "\ny") == "     1\t" + "x" * 2000 + "\n     2\ty"


async def test_an_answer_has_room_for_whole_lines_and_one_at_least() -> None:
    text = "\n".join("x" * 12 for _ in range(9))  # 20 characters with number and line end
    for room, shown in ((0, 1), (20, 1), (39, 1), (40, 2), (60, 3), (180, 9)):
        found = (await read(text, room + 80)).split("\n")
        more = (
            [] if shown == 9 else [f"(lines {shown + 1} to 9 follow: read with start={shown + 1})"]
        )
        assert found[shown:] == more


async def test_ranges_that_are_none() -> None:
    with pytest.raises(ToolError, match="a has 2 lines, and start is 3"):
        await read("1\n2", start=3)
    with pytest.raises(ToolError, match="end is 1, before start, which is 2"):
        await read("1\n2", start=2, end=1)


async def test_paths_that_are_written_whole() -> None:
    sandbox = Files(a="x")
    workspace = Workspace(sandbox, CodeConfig(), None)  # type: ignore[arg-type]
    for path, inside in (
        ("a/b", "a/b"), ("/home/me/a", "a"), ("/home/me", "."), ("/home/me/", "."),
        ("/work/a/b", "a/b"), ("/work", "."),
    ):  # fmt: skip
        assert await workspace.inside(path) == inside
    assert sandbox.asked == 1, "once"
    for path in ("/etc/passwd", "/home/me2", "/worker"):
        with pytest.raises(ToolError, match="lies outside of the working copy /home/me"):
            await workspace.inside(path)
    assert await workspace.find("/work/a") == "x" and await workspace.find("b") is None
    with pytest.raises(ToolError, match="there is no file b: glob"):
        await workspace.read("b")
    with pytest.raises(ToolError, match="binary is not text"):
        await workspace.find("binary")


def test_what_a_terminal_would_hide_is_not_shown() -> None:
    assert (
        plain("a\x1b[31mb\x1b[0m\r\nc\rd\r\n10%\r20%\rdone\n\x1b]0;title\x07e") == "ab\nd\ndone\ne"
    )


def test_a_mark_of_a_terminal_hides_nothing_behind_it() -> None:
    link = "\x1b]8;;http://x\x1b\\a link\x1b]8;;\x1b\\"
    assert plain(f"{link}, an error\nand a bell\x07") == "a link, an error\nand a bell\x07"
    assert plain("\x1b]0;no end\nan error\x07") == "\x1b]0;no end\nan error\x07"


def test_lines_that_are_shown_are_those_that_are_numbered() -> None:
    assert clip("1\ta\f\n2\tb\u2028c\n", 99) == "1\ta\f\n2\tb\u2028c"


async def test_of_a_program_that_prints_without_an_end_both_ends_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    news = iter(["first", *["x" * KEPT_BYTES] * 9, "last"])

    async def ended(wait_s: float) -> bool:
        return length_hint(news) == 1

    job = SimpleNamespace(ended=ended, news=lambda: next(news))
    monkeypatch.setattr(testing, "Job", lambda process: job)
    said = await testing._Pdb(None, 600.0).answer(600.0)  # type: ignore[arg-type]
    assert said.startswith("firstx") and said.endswith("xlast\n(the program has ended)")
    assert len(said) < KEPT_BYTES + 100


@pytest.mark.parametrize("first", [9, KEPT_BYTES // 2, KEPT_BYTES // 2 + 9, KEPT_BYTES])
async def test_news_of_a_job_say_nothing_twice(first: int) -> None:
    script = [b"a" * first, b"b" * KEPT_BYTES, b"c" * 9]
    may_read, is_read = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def read() -> bytes:
        is_read.release()
        await may_read.acquire()
        return script.pop(0) if script else b""

    async def wait() -> int:
        return 0

    job = Job(SimpleNamespace(read=read, wait=wait))  # type: ignore[arg-type]
    told = []
    await is_read.acquire()
    for _ in range(3):
        may_read.release()
        await is_read.acquire()
        told.append(job.news())
    assert told[0] == "a" * first
    assert set(told[1]) == {"b"} and told[2] == "c" * 9
    may_read.release()
    assert await job.ended(600.0) and job.news() == ""


def test_a_long_output_keeps_both_ends_and_what_tells_of_errors() -> None:
    assert clip("a\nb", 4) == "a\nb" and clip("a\nb", 3) != "a\nb"
    lines = [f"{n:09}" for n in range(100)]  # 10 characters with the line end
    lines[50], lines[60] = "an error!", "warnings!"
    found = clip("\n".join(lines), 200).split("\n")
    assert found == [
        *lines[:5], "... 85 of 100 lines left out; among them: ...",
        "51: an error!", "61: warnings!", "...", *lines[-10:],
    ]  # fmt: skip
    quiet = clip("\n".join(f"{n:09}" for n in range(100)), 200).split("\n")
    assert len(quiet) == 16 and quiet[5] == "... 85 of 100 lines left out ..."
    long = clip("x" * 501, 10_000)
    assert long == "x" * 250 + " ... 1 characters ... " + "x" * 250
    assert clip("y" * 500, 10_000) == "y" * 500
