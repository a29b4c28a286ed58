"""The base class of tools, and the workspace that the tools of a session share."""

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
    """A mistake of the model, with a hint on what it can do instead."""


@dataclass(frozen=True, slots=True)
class TestCache:
    """Results of the tests of one task."""

    __test__ = False  # keeps pytest from collecting this class

    task: str
    spec: str
    """Digest of the specification of the task's sandboxes."""
    results: Memo[CommandResult]
    """Shared by all tasks."""

    async def run(
        self, argv: Sequence[str], change: Patch, run: Callable[[], Awaitable[CommandResult]]
    ) -> CommandResult:
        """Run a test command, or return its result from the cache. A run that was killed, perhaps
        by its time limit, depends on the machine as much as on the working copy: it is returned to
        callers that wait for it, but not stored."""
        key = (self.task, self.spec, *argv, patch_digest(change))
        return await self.results.get(key, run, keep=_was_not_killed)


def _was_not_killed(ran: CommandResult) -> bool:
    return ran.exit_code is not None and ran.exit_code >= 0


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """The content of a file before and after a change by a tool; None if the file did not exist."""

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
        """`test_cache`: results of the tests, shared by all sessions of the task; None disables the
        cache."""
        self.sandbox = sandbox
        self.config = config
        self.failed_tests = 0
        """Number of test runs that failed."""
        self.open_todos: list[str] = []
        """Unfinished items of the model's to-do list."""
        self._changes: list[dict[str, ChangedFile]] = [{}]
        """Changed files of each tool call that changed any; the last entry is the call under
        way."""
        self._read: dict[str, ReadLines] = {}
        """By path, the lines that were last read."""
        self._diagnostics = diagnostics
        self._test_cache = test_cache
        self._root: str | None = None
        self._finds_python: bool | None = None

    def begin_call(self) -> None:
        """Start recording a new change, which can be undone as a whole."""
        if self._changes[-1]:
            self._changes.append({})

    async def by_path(self, argv: Sequence[str]) -> Sequence[str]:
        """Make a command use the PATH of the task, as the terminal does. Otherwise the sandbox
        resolves `python` to a Python without the task's packages. The command stays unchanged if
        the task's PATH has no Python, or is the system's default."""
        if self._finds_python is None:
            found = 'command -v python && test "$PATH" != "$0"'
            asked = ["sh", "-c", found, os.defpath]
            ran = await self.sandbox.run(asked, timeout_s=self.config.command_timeout_s)
            self._finds_python = ran.exit_code == 0
        return ["env", *argv] if self._finds_python else argv

    async def run_tests(self, argv: Sequence[str]) -> CommandResult:
        """Run a test command, or return its earlier result for the same working copy."""
        if self._test_cache is None:
            return await self.sandbox.run(argv, timeout_s=self.config.test_timeout_s)
        run = partial(self._run_in_fork, argv)
        try:
            change = await self.sandbox.patch()
        except ValueError:  # the changes are too many to compare
            return await run()
        return await self._test_cache.run(argv, change, run)

    async def _run_in_fork(self, argv: Sequence[str]) -> CommandResult:
        """Run tests in a fork of the sandbox: files that tests leave behind would differ between
        sessions that ran them and sessions that used the cache."""
        fork = await self.sandbox.fork()
        try:
            return await fork.run(argv, timeout_s=self.config.test_timeout_s)
        finally:
            await fork.close()

    async def inside(self, path: str) -> str:
        """A path relative to the working copy; models often write absolute ones."""
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
        """The text of a file. Raises ToolError if there is no such text file."""
        if (text := await self.find(path)) is None:
            raise ToolError(f"there is no file {path}{self._hint}")
        return text

    async def remember_read(self, path: str, text: str, start: int, last: int) -> None:
        """Remember that lines `start` to `last` of a file, counted from 1, were shown."""
        lines = lines_of(text.replace("\r\n", "\n") if is_crlf(text) else text)
        self._read[posixpath.normpath(await self.inside(path))] = ReadLines(lines, start - 1, last)

    async def around_read(self, path: str, text: str) -> tuple[str, str, str]:
        """The present text of a file in three parts; the second corresponds to the lines that were
        last read, and is empty if none were."""
        seen = self._read.get(posixpath.normpath(await self.inside(path)))
        return (text, "", "") if seen is None else seen.parts_of(text)

    @property
    def _hint(self) -> str:
        if "glob" not in self.config.tools:
            return ""
        return f": {self.config.name_of('glob')} finds files by pattern"

    async def find(self, path: str) -> str | None:
        """The text of a file; None if it does not exist. Raises ToolError if it is not text."""
        place = await self.inside(path)
        try:
            return await self.sandbox.read(place)
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            raise ToolError(f"{path} is not text: use the terminal to look at it") from None

    async def save(self, path: str, before: str | None, text: str) -> str:
        """Write a file and return the changes in diagnostics, empty if none. `before`: its earlier
        text, if it existed. If the write fails, all files of this call are restored."""
        place = await self.inside(path)
        said = await self._diagnostics.changed(place, before, text)
        content = await self._content(place)
        try:
            self._changes[-1][place] = ChangedFile(content, text.encode())
            await self.sandbox.write(place, text)
        except ValueError:  # a full disk keeps a part of it
            await self.take_back_call()
            raise
        return said

    async def take_back_call(self) -> None:
        """Restore all files that this call changed."""
        changed = self._changes[-1]
        self._changes[-1] = {}
        await self._restore(changed)

    async def remove(self, path: str) -> None:
        """Delete a file. This cannot be undone, since the kind of the file is not recorded."""
        await self._delete(await self.inside(path))
        self._changes = [{}]

    async def undo(self) -> Sequence[str]:
        """Restore the files of the newest change, and return their names. Raises ToolError if there
        is no change, or if one of its files has changed since; then nothing of that change is
        undone."""
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
        # In reverse order: if one file has two names, the first entry has its original content.
        for place, changed in reversed(files.items()):
            if changed.before is None:
                await self._delete(place)
            else:
                await self.sandbox.write(place, changed.before)

    async def _delete(self, place: str) -> None:
        try:
            await self.sandbox.apply({place: None})
        except ValueError:  # it is behind a linked directory, which `write` follows, unlike `apply`
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
        """The description that the model sees."""
        return self.description

    @abstractmethod
    async def call(self, *args: Any, **arguments: Any) -> str:
        """Run the tool and return its answer. ToolError, or any ValueError, becomes an answer
        too."""


def check_arguments(arguments: Json, properties: Mapping[str, Schema], required: set[str]) -> str:
    """The first mistake in the arguments; empty if there is none."""
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
