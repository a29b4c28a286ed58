"""The wire format of the core's dataclasses.

MessagePack for objects that only programs read (groups, batches), JSON for those that people read
too. A *record* is one line of a log: a dataclass with its time and the name of its type, `{"t":
12.5, "kind": "Trained", "step": 3}`, so that entries of different types can share a log. Types are
checked during decoding.

A type check does not notice a changed digit. So every object ends with the digest of its preceding
bytes, as a line of JSON, whatever its content: text stays readable, and a log gets one more line.
Objects that have their hash in their name need none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from blake3 import blake3

from etude.core.errors import EtudeError
from etude.store.decoding import decode_json, decode_msgpack

T = TypeVar("T")

_DIGEST = b'{"blake3": "%b"}\n'
_DIGEST_BYTES = len(_DIGEST % bytes(64))

_REFUSALS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of the decoder for data of another type, or for malicious data."""


class Damaged(EtudeError):
    """An object does not contain what was written, or was not written by us."""


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(data: bytes, type: type[T], where: str) -> T:
    """Decode MessagePack. `where` names the data in an error."""
    try:
        return decode_msgpack(data, type)
    except _REFUSALS as e:
        raise Damaged(_damaged(where, type.__name__, e)) from e


def seal(data: bytes) -> bytes:
    """Append the digest of the data."""
    return data + _digest(data)


def unseal(data: bytes, where: str) -> bytes:
    """Remove and check the digest. `where` names the data in an error."""
    inner, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if digest == (found := _digest(inner)):
        return inner
    if not re.fullmatch(rb'\{"blake3": "[0-9a-f]{64}"\}\n', digest):
        raise Damaged(
            f"{where} does not end with its digest: it is damaged, or an older version of etude "
            f"wrote it. Restore it from a backup, or start over with --fresh"
        )
    raise Damaged(
        f"{where} is damaged: its digest is {digest[12:28].decode()}..., but its content has "
        f"{found[12:28].decode()}...; restore it from a backup, or start over with --fresh"
    )


def _digest(data: bytes) -> bytes:
    return _DIGEST % blake3(data).hexdigest().encode()


def to_json(value: object) -> bytes:
    """Encode as indented JSON. A NaN is an error here: JSON has no NaN, and a reader would find
    null instead."""
    return (json.dumps(msgspec.to_builtins(value), indent=1, allow_nan=False) + "\n").encode()


def from_json(data: bytes, type: type[T], where: str) -> T:
    try:
        return decode_json(data, type)
    except _REFUSALS as e:
        raise Damaged(_damaged(where, getattr(type, "__name__", str(type)), e)) from e


@dataclass(frozen=True, slots=True)
class Stamped(Generic[T]):
    t: float
    """Seconds since the epoch."""
    record: T


class _Header(msgspec.Struct):
    """The fields of a line in addition to those of its record."""

    t: float
    kind: str


def to_line(t: float, record: object) -> bytes:
    fields = msgspec.to_builtins(record)
    assert not fields.keys() & {"t", "kind"}, (
        f"{type(record).__name__} uses a field name that is reserved for the log"
    )
    return (
        json.dumps({"t": t, "kind": type(record).__name__} | fields, allow_nan=False) + "\n"
    ).encode()


def from_line(line: bytes, kinds: Mapping[str, type[T]], where: str) -> Stamped[T]:
    try:
        header = decode_json(line, _Header)
        return Stamped(header.t, decode_json(line, kinds[header.kind]))
    except (*_REFUSALS, KeyError) as e:
        raise Damaged(_damaged(where, f"record ({', '.join(kinds)})", e)) from e


def _damaged(where: str, expected: str, e: Exception) -> str:
    return (
        f"{where} is not a valid {expected} ({e}): it is damaged, or another version of etude "
        f"wrote it"
    )
