"""The delta codec in numpy: a direct implementation of the format that `codec.py` documents."""

from __future__ import annotations

import numpy as np

from etude.weights.delta_format import (
    Array,
    ContextHeader,
    Damaged,
    Kind,
    Reader,
    top_exponent,
    varint,
)

_GOLOMB_SAMPLE = 256


def encode_delta(kind: Kind, old: Array, new: Array) -> bytes | None:
    """The body of a `DELTA`: empty if nothing changed, None if it would not be smaller than the
    elements."""
    top = top_exponent(kind, old)
    order, starts = _by_context(kind, old, top)
    changed = np.flatnonzero((old != new)[order])  # positions in the order of contexts
    bounds = np.searchsorted(changed, starts)
    if not len(changed):
        return b""
    steps = _steps(kind, old[order[changed]], new[order[changed]])
    head = bytearray((top,))
    unary = _Bits()
    plain = _Bits()
    for c in range(kind.contexts):
        places, mine = changed[bounds[c] : bounds[c + 1]], steps[bounds[c] : bounds[c + 1]]
        gaps = np.diff(places, prepend=starts[c] - 1) - 1
        head += varint(len(gaps))
        if len(gaps):
            _pack_context(head, unary, plain, gaps, mine, 8 * kind.width)
    parts = unary.packed(), plain.packed()
    body = bytes(head) + varint(len(parts[0])) + b"".join(parts)
    return body if len(body) < kind.size(len(old)) else None


def apply_delta(kind: Kind, old: Array, body: bytes | memoryview, out: Array) -> None:
    """Apply a `DELTA` body. Raises `Damaged`; then the content of `out` is undefined."""
    reader = Reader(bytes(body))
    top = reader.byte()
    lines = [ContextHeader.read(reader, len(old)) for _ in range(kind.contexts)]
    size = reader.varint(reader.left)
    ones, plain = _ones(reader.take(size)), _Plain(reader.take(reader.left))
    order, starts = _by_context(kind, old, top)
    places = []
    steps = []
    read = 0
    for c, line in enumerate(lines):
        quotients = ones[read : (read := read + line.count + 2 * line.large)]
        if len(quotients) < line.count + 2 * line.large:
            raise Damaged("a payload ends before its last change")
        gaps, mine = _unpack_context(line, quotients, plain, len(old), 8 * kind.width)
        places.append(starts[c] + np.cumsum(gaps + 1) - 1)
        if line.count and places[-1][-1] >= starts[c + 1]:
            raise Damaged("a payload changes elements beyond the end of its chunk")
        steps.append(mine)
    if read != len(ones):
        raise Damaged("a payload continues after its last change")
    plain.end()
    where = order[np.concatenate(places)]
    value = _stepped(kind, old[where], np.concatenate(steps))
    if out is not old:
        out[:] = old
    out[where] = value


def _by_context(kind: Kind, old: Array, top: int) -> tuple[Array, Array]:
    """Element numbers sorted by context, and the start of each context among them (and the end of
    the last one)."""
    exponents = ((old >> kind.shift) & kind.exponent).astype(np.int16)
    contexts = np.clip(top - exponents, 0, kind.contexts - 1).astype(np.uint8)
    starts = np.concatenate(([0], np.cumsum(np.bincount(contexts, minlength=kind.contexts))))
    return np.argsort(contexts, kind="stable"), starts


def ranks(kind: Kind, code: Array) -> Array:
    """Codes as numbers that increase with the values; -0 comes right before 0."""
    if not kind.ordered:
        return code
    sign = code.dtype.type(1 << (8 * kind.width - 1))
    return np.where(code & sign, ~code, code | sign)


def _steps(kind: Kind, old: Array, new: Array) -> Array:
    with np.errstate(over="ignore"):
        return (ranks(kind, new) - ranks(kind, old)).view(f"<i{kind.width}").astype(np.int64)


def _stepped(kind: Kind, old: Array, steps: Array) -> Array:
    with np.errstate(over="ignore"):
        moved: Array = ranks(kind, old) + steps.astype(f"<i{kind.width}").view(old.dtype)
    if not kind.ordered:
        return moved
    sign = old.dtype.type(1 << (8 * kind.width - 1))
    return np.where(moved & sign, moved ^ sign, ~moved)


def _pack_context(
    head: bytearray, unary: _Bits, plain: _Bits, gaps: Array, steps: Array, bits: int
) -> None:
    sizes = np.abs(steps)
    large = np.flatnonzero(sizes > 1)
    k = _rice(gaps)
    head += bytes((k,)) + varint(len(large))
    unary.unary(gaps >> k)
    plain.fixed(gaps & ((1 << k) - 1) | (steps < 0).astype(np.int64) << k, k + 1)
    if len(large):
        large_gaps, excess = np.diff(large, prepend=-1) - 1, sizes[large] - 2
        kb, order = _rice(large_gaps), _golomb(excess, bits)
        head += bytes((kb, order))
        lengths = _bit_length(excess + (1 << order)) - 1
        unary.unary(np.stack((large_gaps >> kb, lengths - order), axis=-1).reshape(-1))
        ends = excess + (1 << order)  # without its highest bit, which the length implies
        plain.each(large_gaps & ((1 << kb) - 1) | ends << kb, kb + lengths)


def _unpack_context(
    line: ContextHeader, quotients: Array, plain: _Plain, limit: int, bits: int
) -> tuple[Array, Array]:
    """Gaps and steps of one context."""
    first, rest = quotients[: line.count], quotients[line.count :]
    low = plain.fixed(line.count, line.k + 1)
    gaps = _rejoin(first, low & ((1 << line.k) - 1), line.k, limit)
    steps = 1 - 2 * (low >> line.k)
    if line.large:
        lengths = rest[1::2] + line.order
        if int(lengths.max()) > 32:
            raise Damaged("a payload steps beyond the range of the type")
        ends = plain.each(line.kb + lengths)
        where = np.cumsum(_rejoin(rest[0::2], ends & ((1 << line.kb) - 1), line.kb, limit) + 1) - 1
        sizes = (ends >> line.kb) + (np.int64(1) << lengths) - (1 << line.order) + 2
        if where[-1] >= line.count or int(sizes.max()) > 1 << (bits - 1):
            raise Damaged(
                "a payload has more large steps than steps, or larger ones than the type allows"
            )
        steps[where] *= sizes
    return gaps, steps


def _rejoin(quotients: Array, remainders: Array, k: int, limit: int) -> Array:
    values: Array = quotients << k | remainders
    if len(values) and (int(quotients.max()) > limit or int(values.max()) >= limit):
        raise Damaged("a payload skips beyond the end of its chunk")
    return values


def _rice(values: Array) -> int:
    """The best parameter for a geometric distribution with this mean, in integers: both codecs must
    agree on it."""
    return min(31, (int(values.sum()) * 123 // (len(values) * 256)).bit_length())


def _golomb(excess: Array, bits: int) -> int:
    sample = excess[:_GOLOMB_SAMPLE]
    costs = [int((2 * _bit_length(sample + (1 << order)) - order).sum()) for order in range(bits)]
    return costs.index(min(costs))


def _bit_length(values: Array) -> Array:
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)


class _Bits:
    """Bits to be written, as arrays of 0 and 1."""

    def __init__(self) -> None:
        self._parts: list[Array] = []

    def unary(self, zeros: Array) -> None:
        bits = np.zeros(int(zeros.sum()) + len(zeros), np.uint8)
        bits[np.cumsum(zeros + 1) - 1] = 1
        self._parts.append(bits)

    def fixed(self, values: Array, width: int) -> None:
        self._parts.append(((values[:, None] >> np.arange(width)) & 1).astype(np.uint8).reshape(-1))

    def each(self, values: Array, widths: Array) -> None:
        column = np.arange(int(widths.max()) if len(widths) else 0)
        bits = ((values[:, None] >> column) & 1).astype(np.uint8)
        self._parts.append(bits[column < widths[:, None]])

    def packed(self) -> bytes:
        return (
            np.packbits(np.concatenate(self._parts), bitorder="little").tobytes()
            if self._parts
            else b""
        )


class _Plain:
    """Plain bits to be read."""

    def __init__(self, data: bytes) -> None:
        self._bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        self._at = 0

    def fixed(self, count: int, width: int) -> Array:
        return self._take(count * width).reshape(count, width).astype(np.int64) @ (
            1 << np.arange(width, dtype=np.int64)
        )

    def each(self, widths: Array) -> Array:
        column = np.arange(int(widths.max()))
        mine = column < widths[:, None]
        bits = np.zeros(mine.shape, np.int64)
        bits[mine] = self._take(int(widths.sum()))
        return bits @ (1 << column)

    def end(self) -> None:
        rest = self._bits[self._at :]
        if len(rest) >= 8 or rest.any():
            raise Damaged("a payload continues after its last bit")

    def _take(self, count: int) -> Array:
        if count > len(self._bits) - self._at:
            raise Damaged("a payload ends before its last bit")
        self._at += count
        return self._bits[self._at - count : self._at]


def _ones(data: bytes) -> Array:
    """The number of zeros before each one."""
    at = np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little"))
    if 8 * len(data) - (int(at[-1]) + 1 if len(at) else 0) >= 8:
        raise Damaged("a payload has empty bytes among its unary bits")
    return np.diff(at, prepend=-1) - 1
