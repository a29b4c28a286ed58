"""Typed decoding with msgspec that is safe from concurrent first use.

msgspec inspects a class when it is first used, and stores the result before it is complete. A
thread that uses the class meanwhile reads half of the fields, and the process dies with a
segmentation fault. So one thread at a time prepares a type, with all types within it; prepared
types may be used concurrently.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_preparing = threading.Lock()
_prepared = set[object]()


def decode_json(data: bytes | str, type: type[T]) -> T:
    _prepare(type)
    return msgspec.json.decode(data, type=type)


def decode_known(data: bytes | str, type: type[T]) -> T:
    """Decode JSON. A field that a dataclass does not have is refused, whereas `decode_json` ignores
    it: most likely it is a misspelt one."""
    found = decode_json(data, type)
    _refuse_unknown(msgspec.json.decode(data), msgspec.to_builtins(found), "$")
    return found


def schemas_of(types: Iterable[type], ref_template: str) -> dict[str, dict[str, Any]]:
    """The JSON schemas of the types that `decode_json` reads, and of all types within them, by
    name."""
    _, schemas = msgspec.json.schema_components(types, ref_template=ref_template)
    for schema in schemas.values():
        if "description" in schema:
            schema["description"] = _unwrapped(schema["description"])
    return schemas


def _unwrapped(docstring: str) -> str:
    """A docstring without its indentation, each paragraph on one line."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def known_schemas(types: Iterable[type], ref_template: str) -> dict[str, dict[str, Any]]:
    """The JSON schemas of the types that `decode_known` reads, and of all types within them, by
    name."""
    return {
        name: {**schema, "additionalProperties": False}
        for name, schema in schemas_of(types, ref_template).items()
    }


def decode_msgpack(data: bytes | bytearray, type: type[T]) -> T:
    _prepare(type)
    return msgspec.msgpack.decode(data, type=type)


def convert(value: object, type: type[T]) -> T:
    """Convert from the untyped result of decoding JSON or MessagePack."""
    _prepare(type)
    return msgspec.convert(value, type)


def _refuse_unknown(said: Any, known: Any, place: str) -> None:
    """Refuse fields that were not read. `known`: the fields that were."""
    if isinstance(known, dict):
        for name, value in said.items():
            if name not in known:
                at = "" if place == "$" else f" - at `{place}`"
                raise msgspec.ValidationError(
                    f"Object contains unknown field `{name[:200]}`{at}; known fields: "
                    f"{', '.join(known)}"
                )
            _refuse_unknown(value, known[name], f"{place}.{name}")
    elif isinstance(known, list | tuple):
        for number, (value, read) in enumerate(zip(said, known, strict=True)):
            _refuse_unknown(value, read, f"{place}[{number}]")


def _prepare(type: Any) -> None:
    if type not in _prepared:
        with _preparing:
            msgspec.msgpack.Decoder(type)
        _prepared.add(type)
