"""The wire format of the core's dataclasses.

MessagePack for what only programs read (groups, batches), JSON for what people read too. A *record*
is one line of a log: a dataclass with its time and the name of its type, `{"t": 12.5, "kind":
"Trained", "step": 3}`, so that entries of different types can share a log. Types are checked on the
way in: what is decoded is what was promised.

Types do not notice a changed digit. So every object ends with the digest of what stands before, as
a line of JSON, whatever it holds: text stays readable, and a log gets one line more. What has its
hash in its name needs none.
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
"""What the decoder raises at data that is something else, or that was made to hurt it."""


class Damaged(EtudeError):
    """An object does not hold what was written, or was never written by us."""


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(data: bytes, type: type[T], where: str) -> T:
    """`where` names the data if it turns out to be something else."""
    try:
        return decode_msgpack(data, type)
    except _REFUSALS as e:
        raise Damaged(_damaged(where, type.__name__, e)) from e


def seal(data: bytes) -> bytes:
    """With its digest behind it."""
    return data + _digest(data)


def unseal(data: bytes, where: str) -> bytes:
    """`where` names the data if it is not what was sealed."""
    inner, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if digest == (found := _digest(inner)):
        return inner
    if not re.fullmatch(rb'\{"blake3": "[0-9a-f]{64}"\}\n', digest):
        raise Damaged(
            f"{where} does not end with its digest: it is damaged, or the run is of an older "
            f"format, which this "
            f"version of etude does not read. Bring it back from a copy, or begin anew with "
            f"--fresh"
        )
    raise Damaged(
        f"{where} is damaged: its digest is {digest[12:28].decode()}..., and that of its bytes "
        f"{found[12:28].decode()}...; bring it back from a copy, or begin anew with --fresh"
    )


def _digest(data: bytes) -> bytes:
    return _DIGEST % blake3(data).hexdigest().encode()


def to_json(value: object) -> bytes:
    """Indented. A NaN is an error here: JSON cannot say it, and a reader would find null in its
    place."""
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
    """What a line says beside the fields of its record."""

    t: float
    kind: str


def to_line(t: float, record: object) -> bytes:
    fields = msgspec.to_builtins(record)
    assert not fields.keys() & {"t", "kind"}, (
        f"{type(record).__name__} uses a name that the log needs"
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
    article = "an" if expected[0] in "AEIOU" else "a"
    return (
        f"{where} does not hold {article} {expected} ({e}): it is damaged, or another version of "
        f"etude wrote it"
    )
