"""Keys and records of published weights, apart from the shards.

    weights/versions/{epoch}/{version}.json     a manifest; or, if the trainer was succeeded, the
                                                next epoch
    weights/routes/{epoch}/{version}/{base}.json  extra routes to a version: `whole`, or from an
                                                  older base
    weights/shards/{epoch}/{version}/{hash}     objects that manifests and routes name, by the hash
                                                of their bytes
    weights/leases/{reader}.json                versions that a reader still needs
    weights/gc/{id}.json                        keys to delete after a grace period

Everything except a lease is created once and never changed. A version exists if and only if its
manifest exists; the manifest is created last.

Manifests and epochs form one log. A trainer writes its versions under the number of its epoch, one
after the other. A trainer that wants to succeed it writes the record of the next epoch at exactly
the key that the next version would have: so only one of the two is written, and both trainers know
which. The first epoch is written at a key that no first version can have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

from blake3 import blake3

from etude.core.types import Manifest, Route, VersionRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """From here on, `publisher` alone publishes, until it is succeeded in turn."""

    epoch: int
    first: int
    """The number of its first version. They count up by one."""
    parent: VersionRef | None
    """The version that it continues from; None if there is none yet."""
    publisher: str
    seal: str = ""

    def succeeds(self, before: Epoch, at: int) -> bool:
        """True if it may be stored where version `at` of the previous epoch would be."""
        parent = self.parent
        if at == before.first:
            goes_on = parent == before.parent
        else:
            goes_on = parent is not None and (parent.epoch, parent.version) == (
                before.epoch,
                at - 1,
            )
        return (
            goes_on
            and self.epoch == before.epoch + 1
            and (parent is None or parent.version < self.first)
        )


NO_EPOCH = Epoch(epoch=0, first=0, parent=None, publisher="")
"""The epoch that the first trainer succeeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraRoute:
    """A route that was added after the version was published."""

    target: VersionRef
    route: Route
    seal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """`reader` serves `version`, and may need all routes onward from it until `until`."""

    reader: str
    version: int
    until: float


def hash_of(data: bytes | memoryview) -> str:
    return blake3(data).hexdigest()


def manifest_key(epoch: int, version: int) -> str:
    return f"weights/versions/{epoch:06d}/{version:06d}.json"


def route_key(target: VersionRef, base: VersionRef | None) -> str:
    start = "whole" if base is None else f"{base.epoch:06d}-{base.version:06d}"
    return f"weights/routes/{target.epoch:06d}/{target.version:06d}/{start}.json"


def shard_key(epoch: int, version: int, hash: str) -> str:
    return f"weights/shards/{epoch:06d}/{version:06d}/{hash}"


def lease_key(reader: str) -> str:
    return f"weights/leases/{reader}.json"


_HASH, _NUMBER = "[0-9a-f]{64}", "([0-9]{6}|[1-9][0-9]{6,})"
_FORMS = {"hash": _HASH, "root": _HASH, "seal": rf"{_HASH}(?: [0-9a-f]{{128}})?"}
_OF_VERSION = [
    re.compile(rf"weights/versions/{_NUMBER}/{_NUMBER}\.json"),
    re.compile(rf"weights/routes/{_NUMBER}/{_NUMBER}/(?:whole|{_NUMBER}-{_NUMBER})\.json"),
    re.compile(rf"weights/shards/{_NUMBER}/{_NUMBER}/{_HASH}"),
]


def owner_of(key: str) -> tuple[int, int] | None:
    """The epoch and version that an object belongs to; None if it is not an object of a trainer."""
    match = next((match for form in _OF_VERSION if (match := form.fullmatch(key))), None)
    return (int(match[1]), int(match[2])) if match else None


def follows(manifest: Manifest, epoch: int, version: int) -> bool:
    """True if it starts at an older version, by its own route; the base of an adapter must be an
    older version."""
    return (
        manifest.route.base == manifest.parent
        and leads_on(manifest.parent, epoch, version)
        and leads_on(manifest.adapter_of, epoch, version)
    )


def leads_on(base: VersionRef | None, epoch: int, version: int) -> bool:
    return base is None or (base.epoch <= epoch and base.version < version)


def is_sound(record: object) -> bool:
    """True if hashes and numbers in a record are well-formed. Hashes become file names, numbers
    become keys, and sizes are added up, so a record from an untrusted writer must contain nothing
    else there."""
    return all(_is_sound(name, value) for name, value in _fields(record))


def _fields(record: object) -> Iterator[tuple[str, object]]:
    """Names and values of all fields of a record, and of the records in it."""
    if isinstance(record, tuple):
        for each in record:
            yield from _fields(each)
    elif is_dataclass(record):
        for field in fields(record):
            value = getattr(record, field.name)
            yield field.name, value
            yield from _fields(value)


def _is_sound(name: str, value: object) -> bool:
    if form := _FORMS.get(name):
        return isinstance(value, str) and re.fullmatch(form, value) is not None
    numbers = ("epoch", "version", "first", "bytes")
    return name not in numbers or not isinstance(value, int) or 0 <= value < 1 << 63
