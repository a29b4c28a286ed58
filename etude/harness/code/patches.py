"""Changes to several files in one text: a unified diff, or the format between `*** Begin Patch` and
`*** End Patch`.

Line numbers are only hints, since models miscount. A hunk is placed where its lines are found, in
the same way as the edit tool finds text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etude.harness.code.matching import NoMatch, is_crlf, nearest, places, shifted

_NUMBERS = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")
_SECTION = re.compile(r"\*\*\* (Add|Update|Delete) File: (.+)")
_NOISE = (
    *("diff --git ", "index ", "new file mode", "deleted file mode", "old mode ", "new mode "),
    *("similarity index ", "dissimilarity index ", "*** Begin Patch", "*** End Patch"),
    *("*** End of File", "\\ No"),
)


class PatchError(ValueError):
    """A text that is not a patch, or a patch that does not fit. The message tells the model what to
    do."""


@dataclass(slots=True)
class Hunk:
    """The old and the new lines of one place."""

    line: int | None = None
    """The line that it claims to begin at, counted from 0."""
    anchor: str = ""
    """A line that comes before it."""
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    blank: int = 0
    """Number of empty lines at its end; they may only separate it from what follows."""


@dataclass(slots=True)
class FileChange:
    """The change of one file."""

    path: str
    kind: str
    """`add`, `update` or `delete`."""
    to: str = ""
    """The new name of a renamed file."""
    hunks: list[Hunk] = field(default_factory=list)


def parse_patch(text: str) -> list[FileChange]:
    """The changes, in order. Raises PatchError if there are none."""
    changes: list[FileChange] = []
    source = ""
    lines = iter(enumerate(all_lines := text.strip("\n").split("\n")))
    for number, line in lines:
        if _is_header(all_lines[number : number + 3], changes):
            change = _unified(_name(line), _name(next(lines)[1]))
            if changes[-1:] != [change]:  # after git's rename lines this is the same change
                changes.append(change)
        elif line.startswith("rename from "):
            source = line.removeprefix("rename from ")
        elif line.startswith("rename to "):
            changes.append(FileChange(source, "update", to=line.removeprefix("rename to ")))
        elif line.startswith("copy from "):
            raise PatchError(f"{line!r}: a patch cannot copy a file; add the new one")
        elif section := _SECTION.fullmatch(line.rstrip()):
            changes.append(FileChange(section[2].strip(), section[1].lower()))
            if section[1] == "Add":
                changes[-1].hunks.append(Hunk())
        elif line.startswith("*** Move to: "):
            _current(changes, line).to = line.removeprefix("*** Move to: ").strip()
        elif line.startswith(_NOISE):
            continue
        elif line.startswith("@@"):
            _current(changes, line).hunks.append(_hunk(line))
        elif changes:
            _add_line(changes[-1], line)
    if not changes:
        raise PatchError(
            "no file is named in it: give a unified diff (--- a/FILE, +++ b/FILE, @@), or sections "
            "'*** Update File: FILE' between '*** Begin Patch' and '*** End Patch'"
        )
    if not all(change.path for change in changes):
        raise PatchError("a file has no name in it")
    for hunk in (hunk for change in changes for hunk in change.hunks if hunk.blank):
        del hunk.old[-hunk.blank :], hunk.new[-hunk.blank :]
    return changes


def after_changes(
    before: Mapping[str, str | None], changes: Sequence[FileChange]
) -> dict[str, str | None]:
    """The texts of all files after the changes, each applied on top of those before it; None for a
    file that does not exist. Raises PatchError if a change does not fit."""
    after = dict(before)
    for change in changes:
        text = after[change.path]
        target = change.to or change.path
        if (change.kind == "add" or target != change.path) and after[target] is not None:
            raise PatchError(f"{target} is there already: update it, or delete it first")
        if change.kind == "add":
            after[target] = patched("", change)
            continue
        if text is None:
            raise PatchError(f"there is no file {change.path}")
        after[change.path] = None
        if change.kind == "update":
            if is_crlf(text):
                new = patched(text.replace("\r\n", "\n"), change)
                after[target] = new.replace("\n", "\r\n")
            else:
                after[target] = patched(text, change)
    return after


def patched(text: str, change: FileChange) -> str:
    """The text of a file after a change. Raises PatchError if a hunk does not fit."""
    if change.kind == "add":
        return "\n".join([*(line for hunk in change.hunks for line in hunk.new), ""])
    lines = text.split("\n")
    offset = 0
    for number, hunk in enumerate(change.hunks, 1):
        try:
            start, stop = _where(lines, hunk, offset)
        except NoMatch as e:
            raise PatchError(f"{change.path}, hunk {number}: {e}") from e
        lines[start:stop] = shifted(hunk.new, hunk.old, lines[start:stop])
        offset = start + len(hunk.new) - (hunk.line or 0) - len(hunk.old)
    return "\n".join(lines)


def _where(lines: list[str], hunk: Hunk, offset: int) -> tuple[int, int]:
    if not hunk.old:
        if hunk.line is None and not hunk.anchor and any(lines):
            raise NoMatch("it only adds, and does not say where: give lines around it")
        at = _after(lines, hunk.anchor) if hunk.anchor else max((hunk.line or 0) + offset, 0)
        at = min(at, len(lines) - (lines[-1] == ""))
        return at, at
    found = places(lines, hunk.old)
    if not found:
        raise NoMatch(f"its lines stand nowhere in the file{nearest(lines, hunk.old)}")
    if hunk.anchor and len(found) > 1:
        begin = _after(lines, hunk.anchor)
        found = [place for place in found if place.start >= begin][:1] or found
    if hunk.line is not None:
        expected = hunk.line + offset
        found = [place for place in found if place.start == expected] or found
    if len(found) > 1:
        some = ", ".join(str(place.start + 1) for place in found[:8])
        raise NoMatch(f"its lines stand in {len(found)} places (lines {some}): give more around it")
    return found[0].start, found[0].stop


def _after(lines: list[str], anchor: str) -> int:
    found = [n for n, line in enumerate(lines) if line.strip() == anchor.strip()]
    if len(found) != 1:
        what = "stands nowhere" if not found else f"stands in {len(found)} places"
        raise NoMatch(f"the line after @@, {anchor.strip()!r}, {what}: name another, or none")
    return found[0] + 1


def _is_header(lines: Sequence[str], changes: Sequence[FileChange]) -> bool:
    """True if these lines name a file. Inside a hunk, `--- x` may instead remove a line `-- x`; the
    hunk's counts would tell, if models could count."""
    names_file = lines[0].startswith("--- ") and lines[1:2] and lines[1].startswith("+++ ")
    is_in_hunk = bool(changes and changes[-1].hunks)
    return bool(names_file and (not is_in_hunk or lines[2:] and lines[2].startswith("@@")))


def _name(line: str) -> str:
    name = line[4:].split("\t")[0].strip().strip('"')
    return "" if name == "/dev/null" else re.sub(r"^[ab]/", "", name)


def _unified(source: str, target: str) -> FileChange:
    if not source:
        return FileChange(target, "add", hunks=[])
    if not target:
        return FileChange(source, "delete")
    return FileChange(source, "update", to=target if target != source else "")


def _hunk(line: str) -> Hunk:
    if numbers := _NUMBERS.match(line):
        # A hunk without lines of the file names the line that it follows.
        is_behind = numbers[2] is not None and int(numbers[2]) == 0
        return Hunk(line=max(int(numbers[1]) - (not is_behind), 0))
    return Hunk(anchor=line.strip("@ ").strip())


def _current(changes: list[FileChange], line: str) -> FileChange:
    if not changes:
        raise PatchError(f"{line!r} comes before any file is named")
    return changes[-1]


def _add_line(change: FileChange, line: str) -> None:
    if not change.hunks:
        if change.kind != "update" or not line.strip():
            return
        change.hunks.append(Hunk())
    hunk = change.hunks[-1]
    mark, rest = line[:1], line[1:]
    hunk.blank = 0 if line else hunk.blank + 1
    if mark not in ("", " ", "+", "-"):
        raise PatchError(
            f"{change.path}: the line {line!r} begins with none of ' ', '+' and '-': lines of a "
            f"hunk do"
        )
    if mark != "+":
        hunk.old.append(rest)
    if mark != "-":
        hunk.new.append(rest)
