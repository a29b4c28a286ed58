"""Lossless delta between two versions of a tensor, in a few thousandths of its bytes.

Between two steps of training few elements change, nearly always by one step to the next number of
the type, and elements with a small exponent change far more often. So a delta contains the
positions of the changes and the number of steps of each, both coded in *contexts* that the receiver
already knows: the exponents of the old elements.

A tensor is cut into independent chunks of `CHUNK` elements. A chunk that did not change has no
payload; any other starts with a byte that names its type: `RAW`, the new elements unchanged, or
`DELTA`:

    top           one byte: the exponent of context 0
    contexts      for each: count (varint); if count > 0: k (byte), large (varint); if large > 0:
                  kb, order (bytes)
    unary bytes   varint: the length of the next part
    unary bits    for each context: for each change, then twice for each large one
    plain bits    for each context: for each change, then for each large one

The context of an element is `top` minus the exponent of its old code, clamped between 0 and the
last context. `count` elements of the context changed. The *gap* before a change is the number of
unchanged elements of the same context since the last change. It is Rice coded: gap >> k in unary
(that many zeros, then a one), the low k bits plain. A *step* is the new number minus the old one,
counted in representable numbers of the type (integers: modulo 2^width). Its sign is the plain bit
after those k, 1 for down.

Steps of more than one are *large*. The number of changes of the context that were not large since
the last large one is Rice coded with `kb`; then comes the excess, which is size - 2, as excess +
2^order = 2^length + end: length - order in unary, the end in `length` plain bits.

Bits fill bytes from the lowest; each of the two parts is padded with zeros to a whole byte. A
varint has seven bits per byte, lowest first, and the highest bit set in all but its last byte.

`reference.py` codes deltas in numpy; `fast.py` is the same in C, byte for byte, and is used if it
is built. Every value in a payload is checked before it is used: `Damaged` is raised, and nothing is
read or allocated beyond the limits set by the number of elements, which the caller knows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np

from etude.weights import fast, reference
from etude.weights.delta_format import SAMPLE, Array, ContextHeader, Damaged, Kind, Reader

RAW, DELTA = 1, 2
MAX_DELTA_SHARE = 0.85
"""A delta is not tried if a sample predicts that it would exceed this share of the elements'
size."""

Encode = Callable[[Kind, Array, Array], bytes | None]
Apply = Callable[[Kind, Array, bytes | memoryview, Array], None]


def codes(kind: Kind, data: Array) -> Array:
    """The elements of a tensor from its bytes. A view, except for nibbles."""
    if kind.nibbles:
        return np.stack((data & 15, data >> 4), axis=-1).reshape(-1)
    return data.view(f"<u{kind.width}")


def stored(kind: Kind, elements: Array) -> Array:
    """The bytes of a tensor from its elements."""
    joined: Array = (
        elements[0::2] | elements[1::2] << 4 if kind.nibbles else elements.view(np.uint8)
    )
    return joined


def chunks(kind: Kind, num_elements: int) -> list[slice]:
    return [
        slice(at, min(at + kind.chunk, num_elements)) for at in range(0, num_elements, kind.chunk)
    ]


def encode(kind: Kind, old: Array | None, new: Array, by: Encode | None = None) -> bytes:
    """The payload of one chunk; empty if nothing changed. Without an old chunk the new one is
    stored unchanged."""
    if old is None:
        return _raw(kind, new)
    body = (
        (by or _coder().encode_delta)(kind, old, new) if is_worth_coding(kind, old, new) else None
    )
    if body is None:
        return _raw(kind, new)
    return bytes((DELTA,)) + body if body else b""


def apply(
    kind: Kind, old: Array | None, payload: bytes | memoryview, out: Array, by: Apply | None = None
) -> None:
    """Write the new chunk to `out`, which may be `old`."""
    if not len(payload):
        if old is None:
            raise Damaged("an unchanged chunk has no previous version")
        if out is not old:
            out[:] = old
    elif payload[0] == RAW:
        body = np.frombuffer(payload, np.uint8, offset=1)
        if len(body) != kind.size(len(out)):
            raise Damaged(f"a chunk of {len(out)} elements cannot have {len(body)} bytes")
        out[:] = codes(kind, body.copy())
    elif payload[0] == DELTA and old is not None:
        (by or _coder().apply_delta)(kind, old, memoryview(payload)[1:], out)
    else:
        raise Damaged(
            f"unknown chunk encoding {payload[0]}"
            if old is not None
            else "a difference needs an old chunk"
        )


def _coder() -> ModuleType:
    return fast if fast.LIBRARY else reference


def num_changed(kind: Kind, payload: bytes, num_bytes: int) -> int:
    """The number of elements that a payload changes, from its header."""
    if not payload or payload[0] == RAW:
        return kind.count(num_bytes) if payload else 0
    reader = Reader(payload[2:])
    return sum(
        ContextHeader.read(reader, kind.count(num_bytes)).count for _ in range(kind.contexts)
    )


def _raw(kind: Kind, new: Array) -> bytes:
    return bytes((RAW,)) + stored(kind, np.ascontiguousarray(new)).tobytes()


def is_worth_coding(kind: Kind, old: Array, new: Array) -> bool:
    """True if a sample predicts a small delta. Changes are spread evenly, so a few runs of elements
    are enough."""
    runs = 8
    if len(old) <= 2 * SAMPLE:
        return True
    starts = np.linspace(0, len(old) - SAMPLE // runs, runs).astype(np.int64)
    pick = (starts[:, None] + np.arange(SAMPLE // runs)).reshape(-1)
    changed = float((old[pick] != new[pick]).mean())
    if changed < 0.3:
        return True
    body = _coder().encode_delta(kind, old[pick], new[pick])
    return body is not None and len(body) < MAX_DELTA_SHARE * kind.size(SAMPLE)
