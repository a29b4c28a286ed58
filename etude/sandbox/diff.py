"""The changes of a working copy as a unified diff that `git apply` takes.

It is computed here from bytes: no program of the agent takes part, and the cost is bounded,
whatever the files contain.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher

from etude.sandbox.tree import Entry, Tree

_CONTEXT = 3
_LINE_PAIRS = 4_000_000
"""Most pairs of lines that are compared, in all files together. Beyond it, a changed region is
shown as replaced as a whole: the diff is still correct, only longer."""

Opcode = tuple[str, int, int, int, int]


def unified_diff(before: Tree, changed: Mapping[str, Entry | None]) -> str:
    """`changed`: as `tree.changes` returns it."""
    differ = _Differ()
    parts: list[str] = []
    for path in sorted(changed):
        was, now = before.get(path), changed[path]
        if was and now and stat.S_IFMT(was.mode) != stat.S_IFMT(now.mode):
            parts += differ.file(path, was, None)
            was = None
        parts += differ.file(path, was, now)
    return "".join(parts)


class _Differ:
    def __init__(self) -> None:
        self._pairs_left = _LINE_PAIRS

    def file(self, path: str, was: Entry | None, now: Entry | None) -> Iterator[str]:
        a, b = _quoted(f"a/{path}"), _quoted(f"b/{path}")
        yield f"diff --git {a} {b}\n"
        if was is None:
            assert now is not None
            yield f"new file mode {now.mode:06o}\n"
        elif now is None:
            yield f"deleted file mode {was.mode:06o}\n"
        elif was.mode != now.mode:
            yield f"old mode {was.mode:06o}\nnew mode {now.mode:06o}\n"
        if was and now and was.content is not None and was.content == now.content:
            return
        a, b = (a if was else "/dev/null"), (b if now else "/dev/null")
        old, new = _lines(was), _lines(now)
        if isinstance(old, str) or isinstance(new, str):
            what = old if isinstance(old, str) else new
            yield f"{what} {a} and {b} differ\n"
        elif old or new:
            yield f"--- {_terminated(a)}\n+++ {_terminated(b)}\n"
            yield from self._hunks(old, new)

    def _hunks(self, old: list[str], new: list[str]) -> Iterator[str]:
        matcher = _Matcher(self._opcodes(old, new))
        for group in matcher.get_grouped_opcodes(_CONTEXT):
            (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
            yield f"@@ -{_range(i1, i2)} +{_range(j1, j2)} @@\n"
            for tag, a1, a2, b1, b2 in group:
                if tag == "equal":
                    yield from (_shown(" ", line) for line in old[a1:a2])
                else:
                    yield from (_shown("-", line) for line in old[a1:a2])
                    yield from (_shown("+", line) for line in new[b1:b2])

    def _opcodes(self, old: list[str], new: list[str]) -> list[Opcode]:
        """Opcodes from old to new. The common head and tail are left out of the search."""
        shorter = min(len(old), len(new))
        head = next((n for n in range(shorter) if old[n] != new[n]), shorter)
        rest = shorter - head
        tail = next((n for n in range(rest) if old[-1 - n] != new[-1 - n]), rest)
        a, b = old[head : len(old) - tail], new[head : len(new) - tail]
        if len(a) * len(b) <= self._pairs_left:
            self._pairs_left -= len(a) * len(b)
            inner: list[Opcode] = list(SequenceMatcher(None, a, b).get_opcodes())
        else:
            inner = [("replace", 0, len(a), 0, len(b))]
        opcodes: list[Opcode] = [("equal", 0, head, 0, head)] if head else []
        opcodes += [
            (tag, i1 + head, i2 + head, j1 + head, j2 + head) for tag, i1, i2, j1, j2 in inner
        ]
        if tail:
            opcodes.append(("equal", len(old) - tail, len(old), len(new) - tail, len(new)))
        return opcodes


class _Matcher(SequenceMatcher[str]):
    """Groups opcodes that are known already."""

    def __init__(self, opcodes: list[Opcode]) -> None:
        super().__init__()
        self._known = opcodes

    def get_opcodes(self) -> list[Opcode]:  # type: ignore[override]
        return list(self._known)


def _lines(entry: Entry | None) -> list[str] | str:
    """Lines with their ends, or the reason why none can be shown."""
    if entry is None:
        return []
    if entry.content is None:
        return "Large files" if stat.S_ISREG(entry.mode) else "Special files"
    if b"\0" in entry.content:
        return "Binary files"
    try:
        text = entry.content.decode()
    except UnicodeDecodeError:
        return "Binary files"
    *lines, last = text.split("\n")
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def _shown(sign: str, line: str) -> str:
    return sign + line if line.endswith("\n") else f"{sign}{line}\n\\ No newline at end of file\n"


def _range(start: int, stop: int) -> str:
    length = stop - start
    if length == 1:
        return f"{start + 1}"
    return f"{start + 1 if length else start},{length}"


def _quoted(path: str) -> str:
    """The path as git quotes names: bytes that are not plain text appear as octal numbers."""
    if path.isprintable() and not {'"', "\\"} & set(path):
        return path
    plain = (
        chr(byte) if 0x20 <= byte < 0x7F and chr(byte) not in '"\\' else f"\\{byte:03o}"
        for byte in os.fsencode(path)
    )
    return f'"{"".join(plain)}"'


def _terminated(path: str) -> str:
    """The path, with a tab that marks the end of a name with blanks."""
    return f"{path}\t" if " " in path and not path.startswith('"') else path
