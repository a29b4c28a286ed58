"""Elements and headers of the delta format that `codec` documents, shared by its two coders.

A `Kind` defines how the numbers of a dtype are read; `Reader` and `ContextHeader` read the headers
of a payload.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.core.errors import EtudeError

Array = NDArray[Any]

CHUNK = 1 << 20
MAX_CONTEXTS = 16
SAMPLE = 4096
"""Elements used to choose `top_exponent` and to predict a delta's size."""


class Damaged(EtudeError):
    """A payload that no encoder would produce."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The coding of a dtype's elements: unsigned integers of `width` bytes."""

    width: int
    shift: int = 0
    exponent: int = 0
    """Mask of the exponent after the shift; 0 for types without an exponent, which have one
    context."""
    ordered: bool = False
    """The code is a sign and a magnitude, so that stepping down changes it in opposite directions
    above and below zero."""
    nibbles: bool = False
    """Two codes to the byte, low half first."""

    @property
    def contexts(self) -> int:
        return min(MAX_CONTEXTS, self.exponent + 1)

    def size(self, num_elements: int) -> int:
        """Bytes that this many elements take."""
        return num_elements // 2 if self.nibbles else num_elements * self.width

    def count(self, num_bytes: int) -> int:
        """Elements in this many bytes."""
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
"""By torch's name of the dtype. Any other dtype is coded as bytes, which is correct but less
compact."""


def kind_of(dtype: str) -> Kind:
    return KINDS.get(dtype, BYTES)


def top_exponent(kind: Kind, old: Array) -> int:
    """An exponent that about one in a hundred elements reaches: outliers must not push all others
    into few contexts."""
    if kind.exponent == 0:
        return 0
    sample = old[:: max(1, len(old) // SAMPLE)]
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
    """A reader of bytes that checks against their end."""

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
        raise Damaged("a count in the payload is out of range")


@dataclass(frozen=True, slots=True)
class ContextHeader:
    """The header of one context."""

    count: int
    k: int
    large: int
    kb: int
    order: int

    @classmethod
    def read(cls, reader: Reader, most: int) -> ContextHeader:
        count = reader.varint(most)
        k, large = (reader.byte(), reader.varint(count)) if count else (0, 0)
        kb, order = (reader.byte(), reader.byte()) if large else (0, 0)
        if max(k, kb, order) > 31:
            raise Damaged("a payload has an impossible bit width")
        return cls(count, k, large, kb, order)
