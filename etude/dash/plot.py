"""Curves drawn with Braille characters, each of two columns and four rows of dots."""

from __future__ import annotations

from collections.abc import Sequence

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""[column][row] of a Braille character -> its bit."""
_BRAILLE = 0x2800


def plot(
    values: Sequence[float],
    *,
    width: int,
    height: int,
    low: float,
    high: float,
    first: int = 1,
    form: str = ".2f",
) -> list[str]:
    """Draw a curve with its axes, as `height` lines of at most `width` characters. `first` is the
    position of the first value on the horizontal axis; `form` is the number format of the other
    axis."""
    top, bottom = format(high, form), format(low, form)
    margin = max(len(top), len(bottom))
    columns, rows = max(4, width - margin - 2), max(1, height - 1)
    cells = [[0] * columns for _ in range(rows)]
    heights = [_share(value, low, high) for value in _stretched(values, 2 * columns)]
    before: int | None = None
    for x, share in enumerate(heights):
        y = round((1.0 - share) * (4 * rows - 1))
        # joined with the previous dot, so that a jump is drawn as a line and not as a gap
        between = range(y, y + 1) if before is None else _towards(before, y)
        for dot in between:
            cells[dot // 4][x // 2] |= _DOTS[x % 2][dot % 4]
        before = y
    labels = {0: top, rows - 1: bottom}
    lines = [
        f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}"
        + "".join(chr(_BRAILLE + bits) if bits else " " for bits in cells[row])
        for row in range(rows)
    ]
    begin, end = str(first), str(first + len(values) - 1)
    steps = begin if len(values) < 2 else f"{begin}{end:>{columns - len(begin)}}"
    return [*lines, " " * (margin + 2) + steps]


def _towards(before: int, y: int) -> range:
    if y > before:
        return range(before + 1, y + 1)
    return range(y, max(before, y + 1))


def _share(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5


def _stretched(values: Sequence[float], count: int) -> list[float]:
    """Resample values to `count` columns, by means of several values or by linear interpolation."""
    size = len(values)
    if size < 2:
        return list(values)
    if size > count:
        edges = [place * size // count for place in range(count + 1)]
        return [
            sum(values[begin:end]) / (end - begin)
            for begin, end in zip(edges, edges[1:], strict=False)
        ]
    found = []
    for place in range(count):
        at = place * (size - 1) / (count - 1)
        left = min(int(at), size - 2)
        found.append(values[left] + (at - left) * (values[left + 1] - values[left]))
    return found
