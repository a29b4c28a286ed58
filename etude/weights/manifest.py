"""Which weight versions there are, and by which ways. Knows no tensors, so controller and gateway can import it.

    weights/epochs/{epoch}.json                 who publishes now, and from which version on
    weights/versions/{epoch}/{version}.json     manifests
    weights/routes/{epoch}/{version}/{base}.json  further ways to a version: `whole`, or from an older base
    weights/shards/{epoch}/{version}/{hash}     what manifests and routes name, by the hash of its bytes
    weights/leases/{reader}.json                what a reader still needs
    weights/gc/{id}.json                        what will be deleted, after a time of grace

Everything but a lease is created once and never changed. A version exists when, and only when, its manifest does; that
is created last.

A trainer that starts to publish takes the next epoch and names the version that it goes on from. Readers follow the
newest epoch back through its parents, so whatever an older trainer publishes after it was succeeded is seen by nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar

from blake3 import blake3

from etude.core.errors import EtudeError
from etude.core.types import Link, Manifest, Route
from etude.store.codec import from_json, to_json
from etude.store.objects import Missing, Objects
from etude.weights.signing import Corrupt, Sealed, Trust, trust_from_environment

FIRST_POLL_S, LAST_POLL_S = 0.05, 0.2
TRIES, FIRST_RETRY_S = 4, 0.1

T = TypeVar("T")
R = TypeVar("R", bound=Sealed)


class Gone(EtudeError):
    """The version was published, and is not kept any more: newer ones are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    epoch: int
    parent: Link | None
    publisher: str
    seal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraRoute:
    """A way that was made after the version was published."""

    target: Link
    route: Route
    seal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """`reader` serves `version` and may need all that leads on from it, until that time."""

    reader: str
    version: int
    until: float


def hash_of(data: bytes | memoryview) -> str:
    return blake3(data).hexdigest()


def epoch_key(epoch: int) -> str:
    return f"weights/epochs/{epoch:06d}.json"


def manifest_key(epoch: int, version: int) -> str:
    return f"weights/versions/{epoch:06d}/{version:06d}.json"


def route_key(target: Link, base: Link | None) -> str:
    start = "whole" if base is None else f"{base.epoch:06d}-{base.version:06d}"
    return f"weights/routes/{target.epoch:06d}/{target.version:06d}/{start}.json"


def shard_key(epoch: int, version: int, hash: str) -> str:
    return f"weights/shards/{epoch:06d}/{version:06d}/{hash}"


def lease_key(reader: str) -> str:
    return f"weights/leases/{reader}.json"


_HASH, _NUMBER = "[0-9a-f]{64}", "([0-9]{6}|[1-9][0-9]{6,})"
_FORMS = {"hash": _HASH, "root": _HASH, "seal": rf"{_HASH}(?: [0-9a-f]{{128}})?"}
_EPOCH = re.compile(rf"weights/epochs/{_NUMBER}\.json")
_OF_VERSION = [
    re.compile(rf"weights/versions/{_NUMBER}/{_NUMBER}\.json"),
    re.compile(rf"weights/routes/{_NUMBER}/{_NUMBER}/(?:whole|{_NUMBER}-{_NUMBER})\.json"),
    re.compile(rf"weights/shards/{_NUMBER}/{_NUMBER}/{_HASH}"),
]


def owner_of(key: str) -> tuple[int, int] | None:
    """The epoch and version that an object belongs to; None if it is nothing that a trainer puts there."""
    match = next((match for form in _OF_VERSION if (match := form.fullmatch(key))), None)
    return (int(match[1]), int(match[2])) if match else None


class Chain:
    """The versions in one store. Every method is synchronous; reads and writes are tried again a few times."""

    def __init__(
        self,
        objects: Objects,
        *,
        trust: Trust | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.objects = objects
        self._trust = trust or trust_from_environment()
        self._sleep = sleep
        self._epochs: dict[int, Epoch] = {}
        self._manifests: dict[Link, Manifest] = {}

    # What there is.

    def epochs(self) -> list[Epoch]:
        """Oldest first."""
        for match in map(_EPOCH.fullmatch, self.keys("weights/epochs")):
            if match and (number := int(match[1])) not in self._epochs:
                self._epochs[number] = self._epoch(number)
        return [self._epochs[number] for number in sorted(self._epochs)]

    def refresh(self) -> None:
        """Epochs count up by one, and whether a key exists is never late, as a listing may be."""
        number = max(self._epochs, default=0) + 1
        while self.exists(epoch_key(number)):
            self._epochs[number] = self._epoch(number)
            number += 1

    def _epoch(self, number: int) -> Epoch:
        epoch, _ = self._record(epoch_key(number), Epoch)
        if epoch.epoch != number or (epoch.parent is not None and epoch.parent.epoch >= number):
            raise Corrupt(
                f"{self.objects.url}: {epoch_key(number)} is the record of another epoch; restore it from a copy, "
                "or delete it if no trainer wrote it"
            )
        return epoch

    def newest(self, after: int = -1) -> Manifest | None:
        """The newest version of the lineage, if it is newer than `after`."""
        link = self.head(after)
        return self.follow(link) if link else None

    def head(self, after: int = -1, before_epoch: int | None = None) -> Link | None:
        """The newest version, as all saw it before an epoch, or as it is."""
        epochs = [e for e in self.epochs() if before_epoch is None or e.epoch < before_epoch]
        if not epochs:
            return None
        parent = epochs[-1].parent
        if versions := self.listed(epochs[-1].epoch, max(after, parent.version if parent else -1)):
            return self.at(epochs[-1].epoch, versions[-1])[0]
        return parent if parent and parent.version > after else None

    def lineage(self) -> dict[int, int]:
        """Version -> the epoch that it counts in, oldest version first."""
        found: dict[int, int] = {}
        most: float = float("inf")
        known = {epoch.epoch: epoch for epoch in self.epochs()}
        epoch = known[max(known)] if known else None
        while epoch is not None:
            least = epoch.parent.version if epoch.parent else -1
            found |= {v: epoch.epoch for v in self.listed(epoch.epoch, least) if v <= most}
            most = least
            epoch = known.get(epoch.parent.epoch) if epoch.parent else None
        return dict(sorted(found.items()))

    def listed(self, epoch: int, after: int = -1) -> list[int]:
        """Versions of one epoch, whether or not they count."""
        folder = f"weights/versions/{epoch:06d}"
        start = manifest_key(epoch, after) if after >= 0 else None
        owners = map(owner_of, self.keys(folder, after=start))
        return sorted(owner[1] for owner in owners if owner is not None)

    def find(self, version: int) -> tuple[Link, Manifest]:
        """The version of that number in the lineage. Raises `Missing`, or `Gone` if newer ones are kept only."""
        for epoch in reversed(self.epochs()):
            if epoch.parent is None or version > epoch.parent.version:
                if self.exists(manifest_key(epoch.epoch, version)):
                    return self.at(epoch.epoch, version)
                break
            if version == epoch.parent.version:
                return self.at(epoch.parent.epoch, version)
        kept = self.lineage()
        if version in kept:
            return self.at(kept[version], version)
        there = f"; versions {min(kept)} to {max(kept)} are there" if kept else ""
        if kept and 0 <= version < min(kept):
            raise Gone(f"{self.objects.url}: weight version {version} was deleted by `etude weights gc`{there}")
        raise Missing(f"{self.objects.url}: weight version {version} is not published{there}")

    def at(self, epoch: int, version: int) -> tuple[Link, Manifest]:
        manifest, hash = self._record(manifest_key(epoch, version), Manifest)
        if (manifest.epoch, manifest.version) != (epoch, version):
            raise Corrupt(f"{self.objects.url}: {manifest_key(epoch, version)} is the manifest of another version")
        if manifest.route.base != manifest.parent or not _leads_on(manifest.parent, epoch, version):
            raise Corrupt(f"{self.objects.url}: {manifest_key(epoch, version)} does not follow an older version")
        link = Link(epoch, version, hash)
        self._manifests[link] = manifest
        return link, manifest

    def follow(self, link: Link) -> Manifest:
        """The manifest that a link names, and no other."""
        if link not in self._manifests:
            found, _ = self.at(link.epoch, link.version)
            if found != link:
                raise Corrupt(
                    f"{self.objects.url}: the manifest of version {link.version} is not the one that its successor was "
                    f"made from; restore {manifest_key(link.epoch, link.version)} from a copy"
                )
        return self._manifests[link]

    def extra_routes(self, target: Link) -> list[Route]:
        """The further ways to a version. Nobody depends on them, so what is damaged is left out."""
        return [way for way in self.further_ways(target).values() if isinstance(way, Route)]

    def further_ways(self, target: Link) -> dict[str, Route | Corrupt]:
        """Key -> the way, or why it is none."""

        def read(key: str) -> Route:
            extra, _ = self._record(key, ExtraRoute)
            base = extra.route.base
            if (
                extra.target != target
                or route_key(target, base) != key
                or not _leads_on(base, target.epoch, target.version)
            ):
                raise Corrupt(f"{self.objects.url}: {key} is not the way that its name says; delete it")
            return extra.route

        keys = self.keys(f"weights/routes/{target.epoch:06d}/{target.version:06d}")
        return self._each(filter(owner_of, keys), read)

    def leases(self) -> dict[str, Lease | Corrupt]:
        """Key -> the lease, or why it is none."""

        def read(key: str) -> Lease:
            try:
                return self.read(key, Lease)
            except Corrupt as e:
                raise Corrupt(f"{e}; delete it if that reader is gone") from e

        return self._each((key for key in self.keys("weights/leases") if key.endswith(".json")), read)

    def _each(self, keys: Iterable[str], read: Callable[[str], T]) -> dict[str, T | Corrupt]:
        found: dict[str, T | Corrupt] = {}
        for key in keys:
            with contextlib.suppress(Missing):  # deleted since it was listed
                try:
                    found[key] = read(key)
                except Corrupt as e:
                    found[key] = e
        return found

    def read(self, key: str, type: type[T]) -> T:
        """A record that has no seal."""
        return self.retry(lambda: self._decode(key, self.objects.get(key), type))

    # Objects, by hash.

    def shard(self, target: Link, hash: str) -> bytes:
        """Its bytes, checked. A download that went wrong is tried again."""
        key = shard_key(target.epoch, target.version, hash)
        for _ in range(TRIES):
            data = self.get(key)
            if hash_of(data) == hash:
                return data
        raise Corrupt(f"{self.objects.url}: {key} does not hold the bytes that it is named after")

    def put_shard(self, epoch: int, version: int, data: bytes) -> str:
        hash = hash_of(data)
        self.retry(lambda: self.objects.put(shard_key(epoch, version, hash), data))
        return hash

    def get(self, key: str) -> bytes:
        return self.retry(lambda: self.objects.get(key))

    def exists(self, key: str) -> bool:
        return self.retry(lambda: self.objects.exists(key))

    def keys(self, prefix: str, *, after: str | None = None) -> list[str]:
        return self.retry(lambda: self.objects.list(prefix, after=after))

    def delete(self, key: str) -> None:
        self.retry(lambda: self.objects.delete(key))

    def create(self, key: str, record: object) -> bool:
        """False if there is another record under the key. If only the answer was lost, ours is there: that is True."""
        data = to_json(record)
        return self.retry(lambda: self.objects.create(key, data)) or self.get(key) == data

    def retry(self, act: Callable[[], T]) -> T:
        """Stores have bad moments. What is missing is missing, though."""
        for delay_s in (FIRST_RETRY_S * 2**n for n in range(TRIES - 1)):
            try:
                return act()
            except Missing:
                raise
            except EtudeError:
                self._sleep(delay_s)
        return act()

    def _record(self, key: str, type: type[R]) -> tuple[R, str]:
        def read() -> tuple[R, str]:
            data = self.objects.get(key)
            record = self._decode(key, data, type)
            self._trust.check(record, f"{self.objects.url}: {key}")
            if to_json(record) != data or not all(_is_sound(*field) for field in _fields(record)):
                raise Corrupt(
                    f"{self.objects.url}: {key} is no {type.__name__} that etude writes; restore it from a copy"
                )
            return record, hash_of(data)

        return self.retry(read)

    def _decode(self, key: str, data: bytes, type: type[T]) -> T:
        try:
            return from_json(data, type, f"{self.objects.url}: {key}")
        except EtudeError as e:
            raise Corrupt(str(e)) from e


class Versions:
    """The published versions of one run; a `core.seams.WeightStore`."""

    def __init__(self, objects: Objects) -> None:
        self._chain = Chain(objects)

    async def newest(self) -> Manifest | None:
        return await asyncio.to_thread(self._chain.newest)

    async def wait(self, after: int) -> Manifest:
        """The newest version, as soon as it is newer than `after`."""
        # The store is the only link between clusters, and it cannot call us: this is the one place that polls for
        # weights. The delay grows because a version that is not there now is a whole training step away.
        delay_s = FIRST_POLL_S
        while (manifest := await asyncio.to_thread(self._chain.newest, after)) is None:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_POLL_S)
        return manifest

    async def get(self, version: int) -> Manifest:
        """Raises `Missing` if it is not published."""
        return (await asyncio.to_thread(self._chain.find, version))[1]


def read_manifest(objects: Objects, version: int) -> Manifest:
    return Chain(objects).find(version)[1]


def find_newest(objects: Objects, after: int = -1) -> Manifest | None:
    return Chain(objects).newest(after)


def _leads_on(base: Link | None, epoch: int, version: int) -> bool:
    return base is None or (base.epoch <= epoch and base.version < version)


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
    """Hashes become names of files, numbers become keys, and sizes are added up: a record that anybody may have written
    must hold nothing else there."""
    if form := _FORMS.get(name):
        return isinstance(value, str) and re.fullmatch(form, value) is not None
    return name not in ("epoch", "version", "bytes") or (isinstance(value, int) and 0 <= value < 1 << 63)
