"""Search for leaks: solutions that occur elsewhere in the sandbox.

The comparison uses windows of a few lines without their indentation: a single line, such as `return
None`, occurs everywhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import AnyStr

WINDOW_LINES = 4
SHARE = 0.5
"""A solution is leaked if more than this share of the windows around its lines occurs elsewhere."""
_LARGEST_BYTES = 2 << 20
_TEXT = (
    ".py",
    ".pyi",
    ".pyx",
    ".txt",
    ".md",
    ".rst",
    ".orig",
    ".patch",
    ".diff",
    ".json",
    ".ipynb",
)

Windows = set[int]


def windows_of(files: Mapping[str, bytes]) -> dict[str, Windows]:
    """File -> the windows of its text."""
    return {path: set(_windows(_lines(content))) for path, content in files.items()}


def windows_of_folder(folder: Path) -> Windows:
    """All windows of the text files of a virtual environment."""
    found: Windows = set()
    for path in folder.rglob("*"):
        if path.suffix in _TEXT and path.is_file() and path.stat().st_size <= _LARGEST_BYTES:
            found.update(_windows(_lines(path.read_bytes())))
    return found


def is_leaked(before: bytes, after: bytes, elsewhere: Iterable[Windows]) -> bool:
    """True if the lines in which `after` differs from `before` occur elsewhere, together with those
    around them."""
    old, new = _lines(before), _lines(after)
    changed = {
        line for _, _, low, high in hunks(old, new) for line in range(low, max(high, low + 1))
    }
    told = [
        window
        for start, window in enumerate(_windows(new))
        if any(line in changed for line in range(start, start + WINDOW_LINES))
    ]
    if not told:
        return False
    places = list(elsewhere)
    found = sum(any(window in place for place in places) for window in told)
    return found > SHARE * len(told)


Hunk = tuple[int, int, int, int]
"""Range of lines of the old text, and range of lines of the new one."""


def hunks(old: Sequence[AnyStr], new: Sequence[AnyStr]) -> list[Hunk]:
    """The hunks in which two lists of lines differ. The common head and tail are skipped first:
    files are long, and changes short."""
    start, end = 0, 0
    shorter = min(len(old), len(new))
    while start < shorter and old[start] == new[start]:
        start += 1
    while end < shorter - start and old[-1 - end] == new[-1 - end]:
        end += 1
    matcher = difflib.SequenceMatcher(
        a=old[start : len(old) - end], b=new[start : len(new) - end], autojunk=False
    )
    return [
        (start + a, start + b, start + c, start + d)
        for tag, a, b, c, d in matcher.get_opcodes()
        if tag != "equal"
    ]


def _lines(content: bytes) -> list[str]:
    return [
        line for each in content.decode(errors="replace").splitlines() if (line := each.strip())
    ]


def _windows(lines: list[str]) -> Iterator[int]:
    for start in range(len(lines) - WINDOW_LINES + 1):
        yield hash("\n".join(lines[start : start + WINDOW_LINES]))
