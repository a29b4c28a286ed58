"""Records one behind the other in a file that grows: each with its size, which is said twice, and
its digest. So the end that a killed writer left half-written is told apart from damage."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

_HEAD = struct.Struct(">II16s")
"""The size, the same with all bits turned over, and the digest."""
_ALL_BITS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class DamagedFrame:
    """Something stood here that cannot be read."""

    place: int


def to_frame(record: bytes) -> bytes:
    return _HEAD.pack(len(record), len(record) ^ _ALL_BITS, _digest(record)) + record


def read_frames(data: bytes) -> Iterator[bytes | DamagedFrame]:
    """The records in their order. A last one that is cut off is left out."""
    place = 0
    while place + _HEAD.size <= len(data):
        size, inverse, digest = _HEAD.unpack_from(data, place)
        if size != inverse ^ _ALL_BITS:
            yield DamagedFrame(place)
            return
        begin, end = place + _HEAD.size, place + _HEAD.size + size
        if end > len(data):
            return
        record = data[begin:end]
        yield record if _digest(record) == digest else DamagedFrame(place)
        place = end


def _digest(record: bytes) -> bytes:
    return blake3(record).digest(16)
