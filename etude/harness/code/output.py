"""Shortening of long output: its beginning, its end, and the lines in between that mention errors.
A model pays for every token, and the cause is rarely in the middle of a log."""

from __future__ import annotations

import re

_TELLING = re.compile(
    r"(error|exception|warning)s?\b|\b(traceback|fail(ed|ures?)?|assert\w*|panic|fatal)\b|^E  ",
    re.IGNORECASE,
)
_ESCAPES = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b\n]*(\x07|\x1b\\)|\x1b[=>()][A-Z0-9]?"
)
_LINE_CHARS = 500
_HEAD, _TELLING_SHARE = 0.25, 0.25


def clip(text: str, limit: int) -> str:
    """Shorten a text to about `limit` characters."""
    # split at "\n" only, as line numbers are counted
    lines = [_short(line) for line in plain(text).removesuffix("\n").split("\n")]
    if sum(len(line) + 1 for line in lines) <= limit:
        return "\n".join(lines)
    head = _taken(lines, limit * _HEAD)
    tail = _taken(lines[head:][::-1], limit * (1 - _HEAD - _TELLING_SHARE))
    middle = range(head, len(lines) - tail)
    telling = [f"{n + 1}: {lines[n]}" for n in middle if _TELLING.search(lines[n])]
    telling = telling[: _taken(telling, limit * _TELLING_SHARE)]
    note = f"... {len(middle)} of {len(lines)} lines left out ..."
    if telling:
        note = f"... {len(middle)} of {len(lines)} lines left out; among them: ..."
    return "\n".join([*lines[:head], note, *telling, *(["..."] if telling else []),
                      *lines[len(lines) - tail :]])  # fmt: skip


def plain(text: str) -> str:
    """The text without terminal control: no colours, and no lines that a progress bar overwrote."""
    text = _ESCAPES.sub("", text).replace("\r\n", "\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _short(line: str) -> str:
    if len(line) <= _LINE_CHARS:
        return line
    half = _LINE_CHARS // 2
    return f"{line[:half]} ... {len(line) - 2 * half} characters ... {line[-half:]}"


def _taken(lines: list[str], room: float) -> int:
    """Number of lines from the beginning that fit, and at least one."""
    for count, line in enumerate(lines):
        room -= len(line) + 1
        if room < 0:
            return max(count, 1)
    return len(lines)
