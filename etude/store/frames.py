"""Records one after the other in a growing file: each with its size, which is stored twice, and its
digest. So an end that a killed writer left half-written is distinguished from damage."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

_HEAD = struct.Struct(">II16s")
"""The size, the same with all bits inverted, and the digest."""
_ALL_BITS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class DamagedFrame:
    """The position of data that cannot be read."""

    place: int


def to_frame(record: bytes) -> bytes:
    return _HEAD.pack(len(record), len(record) ^ _ALL_BITS, _digest(record)) + record


def read_frames(data: bytes) -> Iterator[bytes | DamagedFrame]:
    """The records in order. A last one that is cut off is left out."""
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
