"""A tool: its schema, and what it does; and what the tools of a session share."""

from __future__ import annotations

import os
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from etude.core.harness_config import CodeConfig
from etude.core.memo import Memo
from etude.core.sandbox import CommandResult, Patch, Sandbox, patch_digest
from etude.core.types import Json
from etude.harness.code.diagnostics import Diagnostics
from etude.harness.code.matching import ReadLines, is_crlf, lines_of

Schema = dict[str, Json]


def string(description: str) -> Schema:
    return {"type": "string", "description": description}


def integer(description: str, minimum: int = 1) -> Schema:
    return {"type": "integer", "minimum": minimum, "description": description}


def boolean(description: str) -> Schema:
    return {"type": "boolean", "description": description}


def strings(description: str) -> Schema:
    return {"type": "array", "items": {"type": "string"}, "description": description}


class ToolError(ValueError):
    """What the model did wrong, and what it can do instead."""


@dataclass(frozen=True, slots=True)
class TestCache:
    """Results of the tests of one task."""

    __test__ = False  # no tests, whatever pytest makes of the name

    task: str
    spec: str
    """The digest of what its sandboxes are."""
    results: Memo[CommandResult]
    """Of all tasks."""

    async def run(
        self, argv: Sequence[str], change: Patch, run: Callable[[], Awaitable[CommandResult]]
    ) -> CommandResult:
        """A command that was killed, for its time perhaps, says as much of the machine as of the
        working copy: others who wait for it are told so, and nobody later."""
        key = (self.task, self.spec, *argv, patch_digest(change))
        return await self.results.get(key, run, keep=_was_not_killed)


def _was_not_killed(ran: CommandResult) -> bool:
    return ran.exit_code is not None and ran.exit_code >= 0


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """The content of a file before a tool changed it, and after. None: there was no such file."""

    before: bytes | None
    after: bytes | None


class Workspace:
    """A working copy as the tools of one session see it."""

    def __init__(
        self,
        sandbox: Sandbox,
        config: CodeConfig,
        diagnostics: Diagnostics,
        test_cache: TestCache | None = None,
    ) -> None:
        """`test_cache`: results of the tests in all sessions at the task, if they are to be
        remembered."""
        self.sandbox = sandbox
        self.config = config
        self.failed_tests = 0
        """Runs of the tests that failed."""
        self.open_todos: list[str] = []
        """What the model's own list says is not done."""
        self._changes: list[dict[str, ChangedFile]] = [{}]
        """Of each call of a tool that changed files; the last is the call under way."""
        self._read: dict[str, ReadLines] = {}
        """By path, what was read of it last."""
        self._diagnostics = diagnostics
        self._test_cache = test_cache
        self._root: str | None = None
        self._finds_python: bool | None = None

    def begin_call(self) -> None:
        """What is changed from now on is one change, to be taken back as a whole."""
        if self._changes[-1]:
            self._changes.append({})

    async def by_path(self, argv: Sequence[str]) -> Sequence[str]:
        """A command as the terminal finds it: what a sandbox takes `python` for is a Python without
        the packages of the task, where the path of the task leads to another. The system's own,
        which a plain path leads to, is none of the task's."""
        if self._finds_python is None:
            found = 'command -v python && test "$PATH" != "$0"'
            asked = ["sh", "-c", found, os.defpath]
            ran = await self.sandbox.run(asked, timeout_s=self.config.command_timeout_s)
            self._finds_python = ran.exit_code == 0
        return ["env", *argv] if self._finds_python else argv

    async def run_tests(self, argv: Sequence[str]) -> CommandResult:
        """Run a command of tests, or return what it said over the same working copy before."""
        if self._test_cache is None:
            return await self.sandbox.run(argv, timeout_s=self.config.test_timeout_s)
        run = partial(self._run_in_fork, argv)
        try:
            change = await self.sandbox.patch()
        except ValueError:  # more than can be told apart
            return await run()
        return await self._test_cache.run(argv, change, run)

    async def _run_in_fork(self, argv: Sequence[str]) -> CommandResult:
        """What tests leave behind, in the working copy or elsewhere, would differ between sessions
        that ran them and those that did not."""
        fork = await self.sandbox.fork()
        try:
            return await fork.run(argv, timeout_s=self.config.test_timeout_s)
        finally:
            await fork.close()

    async def inside(self, path: str) -> str:
        """A path as the sandbox takes it: models often write the whole one."""
        if not path.startswith("/"):
            return path
        if self._root is None:
            ran = await self.sandbox.run(["pwd"], timeout_s=self.config.command_timeout_s)
            self._root = ran.output.strip()
        for root in (self._root, "/work"):
            if root and (path == root or path.startswith(f"{root}/")):
                return path[len(root) :].strip("/") or "."
        raise ToolError(f"{path} lies outside of the working copy {self._root}: use the terminal")

    async def read(self, path: str) -> str:
        """ToolError if there is no such text."""
        if (text := await self.find(path)) is None:
            raise ToolError(f"there is no file {path}{self._hint}")
        return text

    async def remember_read(self, path: str, text: str, start: int, last: int) -> None:
        """That lines `start` to `last` of a file were shown, counted from 1."""
        lines = lines_of(text.replace("\r\n", "\n") if is_crlf(text) else text)
        self._read[posixpath.normpath(await self.inside(path))] = ReadLines(lines, start - 1, last)

    async def around_read(self, path: str, text: str) -> tuple[str, str, str]:
        """A file as it is now, in three parts: the second is where what was read of it last stands
        now. It is empty if nothing was."""
        seen = self._read.get(posixpath.normpath(await self.inside(path)))
        return (text, "", "") if seen is None else seen.parts_of(text)

    @property
    def _hint(self) -> str:
        if "glob" not in self.config.tools:
            return ""
        return f": {self.config.name_of('glob')} finds files by pattern"

    async def find(self, path: str) -> str | None:
        """None if there is no such file. ToolError if it is not text."""
        place = await self.inside(path)
        try:
            return await self.sandbox.read(place)
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            raise ToolError(f"{path} is not text: use the terminal to look at it") from None

    async def save(self, path: str, before: str | None, text: str) -> str:
        """Write a file, and say what that broke or mended: empty if nothing. `before`: its text, if
        it was there. If it cannot be written, all files of this call are as before."""
        place = await self.inside(path)
        said = await self._diagnostics.changed(place, before, text)
        content = await self._content(place)
        try:
            self._changes[-1][place] = ChangedFile(content, text.encode())
            await self.sandbox.write(place, text)
        except ValueError:  # a disk that is full has half of it
            await self.take_back_call()
            raise
        return said

    async def take_back_call(self) -> None:
        """Restore all files that this call changed."""
        changed = self._changes[-1]
        self._changes[-1] = {}
        await self._restore(changed)

    async def remove(self, path: str) -> None:
        """Delete a file. There is no way back: nobody knows what kind of file it was."""
        await self._delete(await self.inside(path))
        self._changes = [{}]

    async def undo(self) -> Sequence[str]:
        """Restore the files of the newest change, and return their names. ToolError if there is no
        change, or one of them is not as it left it: then that change is not undone at all."""
        *earlier, _ = self._changes
        if not earlier:
            raise ToolError("there is no change to take back")
        self._changes = [*earlier[:-1], {}]
        for place, changed in earlier[-1].items():
            if await self._content(place) != changed.after:
                raise ToolError(
                    f"{place} is not as that change left it, so it is not taken back; the next "
                    f"call takes back the change before"
                )
        await self._restore(earlier[-1])
        return list(earlier[-1])

    async def _restore(self, files: dict[str, ChangedFile]) -> None:
        # The last one first: of a file with two names, the first knows what was there.
        for place, changed in reversed(files.items()):
            if changed.before is None:
                await self._delete(place)
            else:
                await self.sandbox.write(place, changed.before)

    async def _delete(self, place: str) -> None:
        try:
            await self.sandbox.apply({place: None})
        except ValueError:  # it is behind a linked directory, which `write` follows, `apply` not
            limit_s = self.config.command_timeout_s
            ran = await self.sandbox.run(["rm", "-f", "--", place], timeout_s=limit_s)
            if ran.exit_code != 0:
                raise ToolError(f"{place} cannot be deleted: {ran.output.strip()}") from None

    async def _content(self, place: str) -> bytes | None:
        try:
            return await self.sandbox.read_bytes(place)
        except FileNotFoundError:
            return None


class Tool(ABC):
    """A tool of one session."""

    description: ClassVar[str]
    parameters: ClassVar[Mapping[str, Schema]] = {}
    required: ClassVar[tuple[str, ...]] = ()

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.config = workspace.config

    def describe(self) -> str:
        """What the model is told that it does."""
        return self.description

    @abstractmethod
    async def call(self, *args: Any, **arguments: Any) -> str:
        """The answer. ToolError, or any ValueError, is an answer too."""


def check_arguments(arguments: Json, properties: Mapping[str, Schema], required: set[str]) -> str:
    """What is wrong with them; empty if nothing."""
    if not isinstance(arguments, dict):
        return "the arguments are no JSON object"
    if missing := sorted(required - arguments.keys()):
        return f"{missing[0]} is missing"
    if unknown := sorted(arguments.keys() - properties.keys()):
        return f"there is no parameter {unknown[0]}"
    problems = (_problem(value, properties[name], name) for name, value in arguments.items())
    return next((problem for problem in problems if problem), "")


_TYPES: dict[str, type] = {"string": str, "integer": int, "boolean": bool, "object": dict}


def _problem(value: Json, schema: Schema, where: str) -> str:
    kind = schema["type"]
    if kind == "array":
        if not isinstance(value, list):
            return f"{where} must be a list"
        each = (_problem(v, schema["items"], f"{where}[{n}]") for n, v in enumerate(value))
        return next((problem for problem in each if problem), "")
    is_kind = isinstance(value, _TYPES[kind]) and (kind != "integer" or not isinstance(value, bool))
    if not is_kind:
        return f"{where} must be of type {kind}"
    if kind == "object":
        properties = schema["properties"]
        required = set(schema["required"])
        problem = check_arguments(value, properties, required)
        return f"{where}: {problem}" if problem else ""
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} must be one of {', '.join(schema['enum'])}"
    if "minimum" in schema and value < schema["minimum"]:
        return f"{where} must be at least {schema['minimum']}"
    return ""
