"""Where a piece of text stands in a file, though it was quoted from memory.

Three ways, from the strictest to the most forgiving: as it is; with other white space; with slips
in a few lines of several. A more forgiving way is only taken where the stricter ones find nothing,
and none of them ever chooses between two places: who has only read one of them means that one
(`ReadLines`).
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
"""So alike must a place and the text be, of which some lines differ."""
_MIN_CHARS = 24
"""A shorter text is alike to too much."""
_SHOWN_LINES = 12
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_SPACE = re.compile(r'("[^"]*"|\'[^\']*\')|\s+')


class NoMatch(ValueError):
    """The text stands nowhere, or in several places. Says what to do."""


class Ambiguous(NoMatch):
    """It stands in several places, all found in one way."""

    def __init__(self, lines: Sequence[int], how: How) -> None:
        super().__init__(_ambiguous(lines, "old"))
        self.count = len(lines)
        self.how = how


@dataclass(frozen=True, slots=True)
class Place:
    """Lines `start` to `stop` of a file, counted from 0, the last one not included."""

    start: int
    stop: int
    how: How


@dataclass(frozen=True, slots=True)
class ReadLines:
    """Lines `start` to `stop` of a file as it was, counted from 0, the last one not included."""

    lines: Sequence[str]
    start: int
    stop: int

    def parts_of(self, text: str) -> tuple[str, str, str]:
        """The file as it is now: what stands above these lines, they themselves, what is below. All
        that has changed since counts as one piece, which is among them if one of its lines was."""
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
    """Each with its end, as Python and editors count them: to `str.splitlines` a form feed ends
    one, too."""
    return _LINE.findall(text)


def is_crlf(text: str) -> bool:
    """Whether all of its lines end so. Where only some do, each stays as it is."""
    return 0 < text.count("\n") == text.count("\r\n")


def num_alike(one: Sequence[str], other: Sequence[str]) -> int:
    """At the beginning of both."""
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
        return []  # a line that is alike is as often another one, `f(2)` for `f(1)`
    return [Place(n, n + count, "fuzzy") for n in _alike(plain, plainly_wanted, ALIKE)]


def replace(text: str, old: str, new: str, *, everywhere: bool = False) -> tuple[str, How]:
    """The text with `new` for `old`, and how it was found. NoMatch if that is not clear."""
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
    """Those that do not overlap, the first ones first, as `str.replace` has it."""
    apart: list[Place] = []
    for place in found:
        if not apart or place.start >= apart[-1].stop:
            apart.append(place)
    return apart


def shifted(new: Sequence[str], wanted: Sequence[str], found: Sequence[str]) -> list[str]:
    """The new lines, indented as the lines that they replace are, where the text that stands for
    those was indented otherwise."""
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
    """A line without its white space, but for that between quotation marks, where it says
    something."""
    return _SPACE.sub(lambda found: found[1] or "", line)


def indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def nearest(lines: Sequence[str], wanted: Sequence[str]) -> str:
    """What is most like it, for whoever has to say it better."""
    plain, plainly_wanted = [squeeze(line) for line in lines], [squeeze(line) for line in wanted]
    near = _alike(plain, plainly_wanted, 0.5)
    if not near:
        return ": read it again, and copy the lines as they are"
    start = near[0]
    stop = start + min(len(wanted), _SHOWN_LINES)
    shown = "\n".join(f"{n + 1:6}\t{line}" for n, line in enumerate(lines[start:stop], start))
    return f"; most like it are these lines, copy what you mean from them:\n{shown}"


def _alike(lines: Sequence[str], wanted: Sequence[str], enough: float) -> list[int]:
    """Where lines begin that are alike enough; the most alike ones only."""
    if len("".join(wanted)) < _MIN_CHARS:
        return []
    scores = {start: _likeness(lines, start, wanted) for start in _candidates(lines, wanted)}
    best = max(scores.values(), default=0.0)
    return sorted(n for n, score in scores.items() if score >= max(enough, best - 1e-9))


def _candidates(lines: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Where half of the lines stand that are wanted; where these are few, wherever one is alike."""
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
