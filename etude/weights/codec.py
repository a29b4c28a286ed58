"""The difference between two versions of a tensor, losslessly, in a few thousandths of its bytes.

Between two steps of training few elements change, nearly always by one step to the next number that
the type can say, and those with a small exponent far more often. So a delta says where the changes
are and how many steps each is, and both in *contexts* that the receiver already holds: the exponent
of the old element.

A tensor is cut into independent chunks of `CHUNK` elements. A chunk that did not change has no
payload; any other one starts with a byte that says what follows: `RAW`, the new elements as they
are, or `DELTA`:

    top           one byte: the exponent of context 0
    contexts      for each: count (varint); if count > 0: k (byte), large (varint); if large > 0:
                  kb, order (bytes)
    unary bytes   varint: how long the next part is
    unary bits    for each context: for each change, then twice for each large one
    plain bits    for each context: for each change, then for each large one

The context of an element is `top` minus the exponent of its old code, held between 0 and the last
context. `count` elements of the context changed. The *gap* before a change is the number of
elements of the same context that did not change since the last one. It is Rice coded: gap >> k in
unary (that many zeros, then a one), the low k bits plain. A *step* is the new number minus the old
one, counted in numbers that the type can say (integers: modulo 2^width). Its sign is the plain bit
after those k, 1 for down.

Steps of more than one are *large*. The number of changes of the context that were not large since
the last large one is Rice coded with `kb`; then comes the excess, which is size - 2, as excess +
2^order = 2^length + end: length - order in unary, the end in `length` plain bits.

Bits fill bytes from the lowest; each of the two parts is filled up with zeros to a whole byte. A
varint has seven bits a byte, lowest first, and the highest bit set in all but its last byte.

`reference.py` codes deltas in numpy; `fast.py` is the same in C, byte for byte, and is taken where
it is built. All that a payload says is checked before it is used: `Damaged` is raised, and nothing
is read or allocated beyond what the number of elements, which the caller knows, allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.core.errors import EtudeError

Array = NDArray[Any]

RAW, DELTA = 1, 2
CHUNK = 1 << 20
MAX_CONTEXTS = 16
MAX_DELTA_SHARE = 0.85
"""A delta that a sample says would be larger than this share of the elements is not tried."""

_SAMPLE = 4096  # elements that the choice of `top` and the forecast look at


Encode = Callable[["Kind", Array, Array], bytes | None]
Apply = Callable[["Kind", Array, bytes | memoryview, Array], None]


class Damaged(EtudeError):
    """A payload that no encoder made."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The coding of a dtype's elements: unsigned integers of `width` bytes."""

    width: int
    shift: int = 0
    exponent: int = 0
    """Its mask after the shift; 0 for types without one: they have one context."""
    ordered: bool = False
    """The code is a sign and a magnitude, so that down is another direction above zero than
    below."""
    nibbles: bool = False
    """Two codes to the byte, low half first."""

    @property
    def contexts(self) -> int:
        return min(MAX_CONTEXTS, self.exponent + 1)

    def size(self, num_elements: int) -> int:
        """Bytes that so many elements take."""
        return num_elements // 2 if self.nibbles else num_elements * self.width

    def count(self, num_bytes: int) -> int:
        """Elements in so many bytes."""
        return num_bytes * 2 if self.nibbles else num_bytes // self.width

    @property
    def chunk(self) -> int:
        """Elements of a chunk. Narrow types change so rarely that more of them share the fixed
        bytes."""
        return CHUNK * 4 if self.width == 1 else CHUNK


BYTES = Kind(1)
KINDS = {
    "bfloat16": Kind(2, 7, 0xFF, ordered=True),
    "float16": Kind(2, 10, 0x1F, ordered=True),
    "float32": Kind(4, 23, 0xFF, ordered=True),
    "float8_e4m3fn": Kind(1, 3, 0xF, ordered=True),
    "float8_e4m3fnuz": Kind(1, 3, 0xF, ordered=True),
    "float8_e5m2": Kind(1, 2, 0x1F, ordered=True),
    "float8_e5m2fnuz": Kind(1, 2, 0x1F, ordered=True),
    "float4_e2m1fn_x2": Kind(1, nibbles=True),
    "int16": Kind(2),
    "int32": Kind(4),
}
"""By the name that torch gives the dtype. Any other one is read as bytes: right, if not as
small."""


def kind_of(dtype: str) -> Kind:
    return KINDS.get(dtype, BYTES)


def codes(kind: Kind, data: Array) -> Array:
    """The elements of a tensor from its bytes. A view, except of nibbles."""
    if kind.nibbles:
        return np.stack((data & 15, data >> 4), axis=-1).reshape(-1)
    return data.view(f"<u{kind.width}")


def stored(kind: Kind, elements: Array) -> Array:
    """The bytes of a tensor, back from its elements."""
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
    stored as it is."""
    if old is None:
        return _raw(kind, new)
    body = (by or _best().encode_delta)(kind, old, new) if is_worth_coding(kind, old, new) else None
    if body is None:
        return _raw(kind, new)
    return bytes((DELTA,)) + body if body else b""


def apply(
    kind: Kind, old: Array | None, payload: bytes | memoryview, out: Array, by: Apply | None = None
) -> None:
    """Writes the new chunk to `out`, which may be `old`."""
    if not len(payload):
        if old is None:
            raise Damaged(
                "a chunk says that it did not change, but there is nothing that it could be equal "
                "to"
            )
        if out is not old:
            out[:] = old
    elif payload[0] == RAW:
        body = np.frombuffer(payload, np.uint8, offset=1)
        if len(body) != kind.size(len(out)):
            raise Damaged(f"a chunk of {len(out)} elements cannot have {len(body)} bytes")
        out[:] = codes(kind, body.copy())
    elif payload[0] == DELTA and old is not None:
        (by or _best().apply_delta)(kind, old, memoryview(payload)[1:], out)
    else:
        raise Damaged(
            f"a chunk starts with {payload[0]}"
            if old is not None
            else "a difference needs an old chunk"
        )


def _best() -> ModuleType:
    from etude.weights import fast, reference

    return fast if fast.LIBRARY else reference


def num_changed(kind: Kind, payload: bytes, num_bytes: int) -> int:
    """Elements that a payload changes, from its head."""
    if not payload or payload[0] == RAW:
        return kind.count(num_bytes) if payload else 0
    reader = Reader(payload[2:])
    return sum(
        ContextHeader.read(reader, kind.count(num_bytes)).count for _ in range(kind.contexts)
    )


def _raw(kind: Kind, new: Array) -> bytes:
    return bytes((RAW,)) + stored(kind, np.ascontiguousarray(new)).tobytes()


def is_worth_coding(kind: Kind, old: Array, new: Array) -> bool:
    """Whether a sample promises a small delta. Changes are spread evenly, so a few runs of elements
    are enough."""
    runs = 8
    if len(old) <= 2 * _SAMPLE:
        return True
    starts = np.linspace(0, len(old) - _SAMPLE // runs, runs).astype(np.int64)
    pick = (starts[:, None] + np.arange(_SAMPLE // runs)).reshape(-1)
    changed = float((old[pick] != new[pick]).mean())
    if changed < 0.3:
        return True
    body = _best().encode_delta(kind, old[pick], new[pick])
    return body is not None and len(body) < MAX_DELTA_SHARE * kind.size(_SAMPLE)


def top_exponent(kind: Kind, old: Array) -> int:
    """An exponent that about one in a hundred elements reaches: outliers must not push all others
    into few contexts."""
    if kind.exponent == 0:
        return 0
    sample = old[:: max(1, len(old) // _SAMPLE)]
    exponents = np.sort((sample >> kind.shift) & kind.exponent)
    return int(exponents[len(exponents) - 1 - len(exponents) // 128])


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class Reader:
    """Bytes to be read, with the end in sight."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise Damaged("a payload ends too early")
        self._at += count
        return self._data[self._at - count : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self, most: int) -> int:
        value = 0
        for shift in range(0, 63, 7):
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                if value > most:
                    break
                return value
        raise Damaged("a payload counts further than it can")


@dataclass(frozen=True, slots=True)
class ContextHeader:
    """The header of one context."""

    count: int
    k: int = 0
    large: int = 0
    kb: int = 0
    order: int = 0

    @classmethod
    def read(cls, reader: Reader, most: int) -> ContextHeader:
        count = reader.varint(most)
        if not count:
            return cls(0)
        k, large = reader.byte(), reader.varint(count)
        kb, order = (reader.byte(), reader.byte()) if large else (0, 0)
        if max(k, kb, order) > 31:
            raise Damaged("a payload names widths that no number has")
        return cls(count, k, large, kb, order)
