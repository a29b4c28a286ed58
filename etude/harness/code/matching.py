"""Search for a text in a file, even if the text was quoted from memory.

There are three ways, from the strictest to the most forgiving: exactly; with different white space;
and, for several lines, with mistakes in a few of them. A more forgiving way is tried only if the
stricter ones find nothing. None of them ever chooses between two places, except that a model that
has read only one of them must mean that one (`ReadLines`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from operator import eq
from typing import Literal

How = Literal["exact", "white space", "fuzzy"]

ALIKE = 0.9
"""Minimum similarity of a fuzzy match."""
_MIN_CHARS = 24
"""A shorter text is similar to too many others."""
_SHOWN_LINES = 12
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_SPACE = re.compile(r'("[^"]*"|\'[^\']*\')|\s+')


class NoMatch(ValueError):
    """The text was not found, or found in several places. The message tells the model what to
    do."""


class Ambiguous(NoMatch):
    """The text was found in several places, all by the same way."""

    def __init__(self, lines: Sequence[int], how: How) -> None:
        super().__init__(_ambiguous(lines, "old"))
        self.count = len(lines)
        self.how = how


@dataclass(frozen=True, slots=True)
class Place:
    """Lines `start` to `stop` of a file, counted from 0, without `stop` itself."""

    start: int
    stop: int
    how: How


@dataclass(frozen=True, slots=True)
class ReadLines:
    """Lines `start` to `stop` of a file at the time of reading, counted from 0, without `stop`
    itself."""

    lines: Sequence[str]
    start: int
    stop: int

    def parts_of(self, text: str) -> tuple[str, str, str]:
        """The file's present text above these lines, at them, and below. All changes since count as
        one block, which belongs to these lines if one of its lines did."""
        now = lines_of(text)
        same = num_alike(self.lines, now)
        end = len(self.lines) - num_alike(self.lines[same:][::-1], now[same:][::-1])
        more = len(now) - len(self.lines)
        start, stop = self.start, self.stop
        if start >= end:
            start, stop = start + more, stop + more
        elif stop > same:
            start, stop = min(start, same), max(stop, end) + more
        return "".join(now[:start]), "".join(now[start:stop]), "".join(now[stop:])


def lines_of(text: str) -> list[str]:
    """The lines of a text, each with its end, as counted by Python and editors. `str.splitlines`
    would also split at a form feed."""
    return _LINE.findall(text)


def is_crlf(text: str) -> bool:
    """True if all lines end in CRLF. If only some do, each keeps its own end."""
    return 0 < text.count("\n") == text.count("\r\n")


def num_alike(one: Sequence[str], other: Sequence[str]) -> int:
    """Number of equal items at the beginning of both."""
    return [*map(eq, one, other), False].index(False)


def places(lines: Sequence[str], wanted: Sequence[str]) -> list[Place]:
    """All places of whole lines, by the strictest way that finds any."""
    count = len(wanted)
    starts = range(len(lines) - count + 1) if count else range(0)
    exact = [n for n in starts if lines[n : n + count] == wanted]
    if exact:
        return [Place(n, n + count, "exact") for n in exact]
    plain, plainly_wanted = [squeeze(line) for line in lines], [squeeze(line) for line in wanted]
    if not any(plainly_wanted):
        return []
    spaced = [n for n in starts if plain[n : n + count] == plainly_wanted]
    if spaced:
        return [Place(n, n + count, "white space") for n in spaced]
    if sum(map(bool, plainly_wanted)) == 1:
        return []  # a similar single line is often another one, such as `f(2)` for `f(1)`
    return [Place(n, n + count, "fuzzy") for n in _alike(plain, plainly_wanted, ALIKE)]


def replace(text: str, old: str, new: str, *, everywhere: bool = False) -> tuple[str, How]:
    """Replace `old` with `new`, and return how `old` was found. Raises NoMatch if the place is not
    clear."""
    if not old:
        raise NoMatch("old is empty: say which text to replace, or write the whole file")
    if old == new:
        raise NoMatch("old and new are the same: nothing would change")
    if found := text.count(old):
        if found > 1 and not everywhere:
            raise Ambiguous(_line_numbers(text, old), "exact")
        return text.replace(old, new), "exact"
    lines, wanted = text.split("\n"), old.strip("\n").split("\n")
    found_places = places(lines, wanted)
    if not found_places:
        raise NoMatch(f"old stands nowhere in the file{nearest(lines, wanted)}")
    if len(found_places) > 1 and not everywhere:
        raise Ambiguous([place.start + 1 for place in found_places], found_places[0].how)
    written = new.strip("\n").split("\n") if new.strip("\n") else []
    for place in reversed(_apart(found_places)):
        lines[place.start : place.stop] = shifted(written, wanted, lines[place.start : place.stop])
    return "\n".join(lines), found_places[0].how


def _apart(found: Sequence[Place]) -> list[Place]:
    """Places that do not overlap, preferring the first, as `str.replace` does."""
    apart: list[Place] = []
    for place in found:
        if not apart or place.start >= apart[-1].stop:
            apart.append(place)
    return apart


def shifted(new: Sequence[str], wanted: Sequence[str], found: Sequence[str]) -> list[str]:
    """The new lines, indented like the lines that they replace, even if the model quoted those with
    another indentation."""
    pairs = [(a, b) for a, b in zip(wanted, found, strict=False) if a.strip() and b.strip()]
    if not pairs:
        return list(new)
    said, there = indent(pairs[0][0]), indent(pairs[0][1])
    if said == there:
        return list(new)
    return [
        there + line[len(said) :] if line.strip() and line.startswith(said) else line
        for line in new
    ]


def squeeze(line: str) -> str:
    """A line without white space, except inside quotation marks, where it matters."""
    return _SPACE.sub(lambda found: found[1] or "", line)


def indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def nearest(lines: Sequence[str], wanted: Sequence[str]) -> str:
    """The most similar lines as a hint for the model, which has to quote again."""
    plain, plainly_wanted = [squeeze(line) for line in lines], [squeeze(line) for line in wanted]
    near = _alike(plain, plainly_wanted, 0.5)
    if not near:
        return ": read it again, and copy the lines as they are"
    start = near[0]
    stop = start + min(len(wanted), _SHOWN_LINES)
    shown = "\n".join(f"{n + 1:6}\t{line}" for n, line in enumerate(lines[start:stop], start))
    return f"; most like it are these lines, copy what you mean from them:\n{shown}"


def _alike(lines: Sequence[str], wanted: Sequence[str], enough: float) -> list[int]:
    """Start lines of the most similar places, if those are similar enough."""
    if len("".join(wanted)) < _MIN_CHARS:
        return []
    scores = {start: _likeness(lines, start, wanted) for start in _candidates(lines, wanted)}
    best = max(scores.values(), default=0.0)
    return sorted(n for n, score in scores.items() if score >= max(enough, best - 1e-9))


def _candidates(lines: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Start lines at which half of the wanted lines match. If there are none and only a few lines
    are wanted, those whose first line is similar."""
    last = len(lines) - len(wanted)
    at: dict[str, list[int]] = {}
    for n, line in enumerate(lines):
        at.setdefault(line, []).append(n)
    votes = Counter(
        n - offset
        for offset, line in enumerate(wanted)
        if line
        for n in at.get(line, ())
        if 0 <= n - offset <= last
    )
    needed = len([line for line in wanted if line]) / 2
    if chosen := [n for n, count in votes.items() if count >= needed]:
        return chosen
    if len(wanted) > 3:
        return []
    matcher = SequenceMatcher(autojunk=False)
    matcher.set_seq2(wanted[0])
    found = []
    for n in range(last + 1):
        matcher.set_seq1(lines[n])
        if matcher.real_quick_ratio() > 0.6 and matcher.quick_ratio() > 0.6:
            found.append(n)
    return found


def _likeness(lines: Sequence[str], start: int, wanted: Sequence[str]) -> float:
    there = "\n".join(lines[start : start + len(wanted)])
    return SequenceMatcher(None, there, "\n".join(wanted), autojunk=False).ratio()


def _line_numbers(text: str, old: str) -> list[int]:
    numbers = []
    number = 1
    *before, _ = text.split(old)
    for part in before:
        number += part.count("\n")
        numbers.append(number)
        number += old.count("\n")
    return numbers


def _ambiguous(numbers: Sequence[int], what: str) -> str:
    some = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return (
        f"{what} stands in {len(numbers)} places (lines {some}): add lines around it until it "
        f"names one, or set all to true"
    )
