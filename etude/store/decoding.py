"""Typed decoding with msgspec, from whichever thread comes first.

msgspec learns the fields of a class when it first meets it, and writes them down before it is
done. A thread that comes meanwhile reads half of them, and the process dies of a segmentation
fault. So one thread at a time prepares a type, with all types within it; what is prepared may be
used by all of them at once.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_preparing = threading.Lock()
_prepared = set[object]()


def decode_json(data: bytes | str, type: type[T]) -> T:
    _prepare(type)
    return msgspec.json.decode(data, type=type)


def decode_msgpack(data: bytes | bytearray, type: type[T]) -> T:
    _prepare(type)
    return msgspec.msgpack.decode(data, type=type)


def convert(value: object, type: type[T]) -> T:
    """From what JSON or MessagePack decode to without a type."""
    _prepare(type)
    return msgspec.convert(value, type)


def _prepare(type: Any) -> None:
    if type not in _prepared:
        with _preparing:
            msgspec.msgpack.Decoder(type)
        _prepared.add(type)
