"""File tools: read, edit, write, patch several files, and undo."""

from __future__ import annotations

import asyncio
import dataclasses
import posixpath
from collections.abc import Mapping, Sequence

from etude.harness.code.matching import (
    Ambiguous,
    NoMatch,
    is_crlf,
    lines_of,
    num_alike,
    replace,
)
from etude.harness.code.patches import FileChange, after_changes, parse_patch
from etude.harness.code.tool import Tool, ToolError, boolean, integer, string

READ_LINES = 400
"""Number of lines that are shown if no range is given."""


class Read(Tool):
    description = (
        f"Read a text file, with line numbers. Without a range, its first {READ_LINES} lines."
    )
    parameters = {
        "path": string("The file."),
        "start": integer("The first line, counted from 1."),
        "end": integer("The last line."),
    }
    required = ("path",)

    async def call(self, path: str, start: int = 1, end: int | None = None) -> str:
        text = await self.workspace.read(path)
        lines = _plain_lines(text)
        if not lines:
            return "(the file is empty)"
        if start > len(lines):
            raise ToolError(f"{path} has {len(lines)} lines, and start is {start}")
        last = min(len(lines), start + READ_LINES - 1 if end is None else end)
        if last < start:
            raise ToolError(f"end is {end}, before start, which is {start}")
        shown, last = self._numbered(lines, start, last)
        await self.workspace.remember_read(path, text, start, last)
        return shown

    def _numbered(self, lines: Sequence[str], start: int, last: int) -> tuple[str, int]:
        """As many whole lines as fit into the answer, with a note where to continue; and the number
        of the last line."""
        shown: list[str] = []
        room = self.config.limit_of("read") - 80  # for the note
        for number in range(start, last + 1):
            line = f"{number:6}\t{lines[number - 1][:2000]}"
            room -= len(line) + 1
            if room < 0 and shown:
                last = number - 1
                break
            shown.append(line)
        if last < len(lines):
            shown.append(f"(lines {last + 1} to {len(lines)} follow: read with start={last + 1})")
        return "\n".join(shown), last


class Edit(Tool):
    description = (
        "Replace a piece of text in a file by another. The old text must stand there once, so give "
        "whole lines with enough of their neighbours; small slips in white space are forgiven. The "
        "answer tells what linter and type checker find new."
    )
    parameters = {
        "path": string("The file."),
        "old": string("The text as it is."),
        "new": string("The text as it shall be."),
        "all": boolean("Replace every place where old stands."),
    }
    required = ("path", "old", "new")

    async def call(self, path: str, old: str, new: str, all: bool = False) -> str:
        text = await self.workspace.read(path)
        has_crlf = is_crlf(text)
        before, old, new = (_unix(each) if has_crlf else each for each in (text, old, new))
        try:
            after, note = await self._replaced(path, before, old, new, all)
        except NoMatch as e:
            raise ToolError(f"{path}: {e}") from e
        if has_crlf:
            after = after.replace("\n", "\r\n")
        said = await self.workspace.save(path, text, after)
        return f"ok{note}: {_where(text, after)}\n{said}".rstrip()

    async def _replaced(
        self, path: str, text: str, old: str, new: str, everywhere: bool
    ) -> tuple[str, str]:
        """The text after the change, and a note on how the place was found."""
        try:
            # beside the other sessions: where many lines are alike it takes seconds
            after, how = await asyncio.to_thread(replace, text, old, new, everywhere=everywhere)
        except Ambiguous as e:
            above, read, below = await self.workspace.around_read(path, text)
            try:
                after, how = replace(read, old, new)
            except NoMatch:
                raise e from None
            if how != e.how:  # among the lines that were read, another kind of match was found
                raise
            return above + after + below, f" (of {e.count} places the one that was read last)"
        return after, "" if how == "exact" else f" (found by {how}: look at the result)"


class Write(Tool):
    description = "Write a whole file: a new one, or all of one that is there."
    parameters = {"path": string("The file."), "content": string("All of its text.")}
    required = ("path", "content")

    async def call(self, path: str, content: str) -> str:
        place = await self.workspace.inside(path)
        try:
            before: str | None = await self.workspace.sandbox.read(place)
        except (FileNotFoundError, UnicodeDecodeError):
            before = None
        said = await self.workspace.save(path, before, content)
        what = "wrote" if before is None else "replaced"
        return f"ok: {what} {path}, {len(lines_of(content))} lines\n{said}".rstrip()


class ApplyPatch(Tool):
    description = (
        "Change several files at once, all or none. The patch is a unified diff, or sections "
        "'*** Update File: F', '*** Add File: F', '*** Delete File: F' between '*** Begin Patch' "
        "and '*** End Patch', with hunks of lines that begin with ' ', '-' or '+'."
    )
    parameters = {"patch": string("The patch.")}
    required = ("patch",)

    async def call(self, patch: str) -> str:
        try:
            changes = [await self._placed(change) for change in parse_patch(patch)]
            names = dict.fromkeys(n for change in changes for n in (change.path, change.to) if n)
            before = {name: await self.workspace.find(name) for name in names}
            after = await asyncio.to_thread(after_changes, before, changes)
            for text in after.values():
                (text or "").encode()  # raises for text that cannot be encoded
        except ValueError as e:
            raise ToolError(f"nothing was changed: {e}") from e
        moved = {change.to: change.path for change in changes if change.to}
        said = ["ok"]
        for name, text in after.items():
            if text is not None and text != before[name]:
                was = before[moved.get(name, name)]
                found = await self.workspace.save(name, was, text)
                what = "added" if was is None else "changed"
                said.append(f"{what} {name}\n{found}".rstrip())
        await self._check_written(before, after)
        for name, text in after.items():
            if text is None and before[name] is not None:
                await self.workspace.remove(name)
                said.append(f"deleted {name}")
        return "\n".join(said)

    async def _check_written(
        self, before: Mapping[str, str | None], after: Mapping[str, str | None]
    ) -> None:
        """Undo the patch if writing one of its files changed another. Each new text is computed on
        its own, so if two names refer to the same file, the second would overwrite the first. Files
        to be deleted still exist until all others are written."""
        for name, text in after.items():
            if await self.workspace.find(name) != (before[name] if text is None else text):
                await self.workspace.take_back_call()
                raise ToolError(
                    f"nothing was changed: {name} is, by a link, the same file as another one of "
                    f"this patch: change it under one of its names"
                )

    async def _placed(self, change: FileChange) -> FileChange:
        """The change with normalised names, so that equal names mean the same file."""
        path, to = [
            posixpath.normpath(await self.workspace.inside(name)) if name else ""
            for name in (change.path, change.to)
        ]
        return dataclasses.replace(change, path=path, to=to)


class Undo(Tool):
    description = (
        "Take back the newest change that these tools made; called again, the one before it."
    )

    async def call(self) -> str:
        return f"ok: {', '.join(await self.workspace.undo())} as before that change"


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")


def _plain_lines(text: str) -> list[str]:
    return [line.rstrip("\r\n") for line in lines_of(text)]


def _where(before: str, after: str) -> str:
    """The range of new lines, from the first that differs to the last."""
    old, new = _plain_lines(before), _plain_lines(after)
    same = num_alike(old, new)
    end = num_alike(old[same:][::-1], new[same:][::-1])
    last = len(new) - end
    if last <= same:
        return f"lines were removed after line {same}"
    return f"line {last}" if last == same + 1 else f"lines {same + 1} to {last}"
