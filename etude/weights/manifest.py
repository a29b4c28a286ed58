"""Manifests: the weight versions in the store, and the routes to them. Imports no tensor library,
so controller and gateway can import it.

Versions and epochs form one log (defined in `records`), whose end is found by probing one key after
the other, because an existence check is never stale. A listing may be stale; it is only used to
choose the first key to probe, since old manifests are deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from etude.core.errors import EtudeError
from etude.core.types import Manifest, Route, VersionRef
from etude.store.codec import Damaged, from_json, to_json
from etude.store.objects import Missing, Objects, Unreachable
from etude.weights.records import (
    NO_EPOCH,
    Epoch,
    ExtraRoute,
    Lease,
    follows,
    hash_of,
    is_sound,
    leads_on,
    manifest_key,
    owner_of,
    route_key,
    shard_key,
)
from etude.weights.signing import Corrupt, Sealed, Trust, trust_from_environment

FIRST_POLL_S, LAST_POLL_S = 0.05, 0.2
TRIES, FIRST_RETRY_S = 4, 0.1

T = TypeVar("T")
R = TypeVar("R", bound=Sealed)


class VersionGone(EtudeError):
    """The version was published, but is no longer kept; newer ones are."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of the log of versions."""

    epochs: tuple[Epoch, ...] = (NO_EPOCH,)
    """All epochs, oldest first."""
    head: VersionRef | None = None
    """The newest version."""
    next: int = 0
    """The number of the next version in the last epoch."""

    @property
    def epoch(self) -> int:
        return self.epochs[-1].epoch

    @property
    def key(self) -> str:
        """The key of the next record, whoever writes it."""
        return manifest_key(self.epoch, self.next)

    def spans(self) -> list[tuple[int, range]]:
        """Pairs (epoch, numbers of all versions ever published in it), oldest first."""
        ends = [epoch.parent.version + 1 if epoch.parent else 0 for epoch in self.epochs[1:]]
        return [
            (epoch.epoch, range(epoch.first, end))
            for epoch, end in zip(self.epochs, [*ends, self.next], strict=True)
        ]


class Chain:
    """The versions in one store. Every method is synchronous; reads and writes are retried a few
    times."""

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
        self._end = End()
        self._manifests: dict[VersionRef, Manifest] = {}
        self.damaged: set[str] = set()
        """Keys that were found damaged, and have not been read whole since."""

    # The log of versions.

    def look(self) -> End:
        """The current end of the log."""
        return self._walk()

    def _walk(self, *, over_damage: bool = False) -> End:
        """Walk the log from its previously known end. `over_damage`: count unreadable records as
        versions."""
        end, whole = self._end, True
        listed = self._listed(after=manifest_key(end.epoch, end.next - 1) if end.next else None)
        while True:
            number = max([end.next, *listed.pop(end.epoch, ())])
            try:
                found = self._record_at(end.epochs[-1], number)
            except Corrupt:
                if not over_damage or max(listed, default=0) > end.epoch:
                    raise
                end, whole = replace(end, next=number + 1), False
                continue
            if isinstance(found, Epoch):
                end = End((*end.epochs, found), found.parent, found.first)
            elif found is not None:
                end = replace(end, head=found, next=number + 1)
            elif number == end.next:
                break
        if whole:
            self._end = end
        return end

    def _record_at(self, epoch: Epoch, number: int) -> Epoch | VersionRef | None:
        """The version of this number in the epoch, or the epoch that succeeded it there."""
        key = manifest_key(epoch.epoch, number)
        try:
            found: tuple[Manifest | Epoch, str] = self._record(key, Manifest, Epoch)
        except Missing:
            return None
        record, hash = found
        if isinstance(record, Manifest):
            return self._link(record, hash, epoch.epoch, number)
        if not record.succeeds(epoch, number):
            raise Corrupt(
                f"{self.objects.url}: {key} is the record of another epoch; restore it from a "
                f"backup, or delete it if no trainer wrote it"
            )
        return record

    def _listed(self, after: str | None = None) -> defaultdict[int, list[int]]:
        """Epoch -> numbers of its records in a listing."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for owner in map(owner_of, self.keys("weights/versions", after=after)):
            if owner is not None:
                found[owner[0]].append(owner[1])
        return found

    def epochs(self) -> list[Epoch]:
        """All epochs, oldest first."""
        return list(self.look().epochs[1:])

    def head(self) -> VersionRef | None:
        """The newest version."""
        return self.look().head

    def newest(self, after: int = -1) -> Manifest | None:
        """The newest version, if it is newer than `after`."""
        head = self.head()
        return self.follow(head) if head and head.version > after else None

    def lineage(self) -> dict[int, int]:
        """Version -> its epoch, for all versions from the oldest kept one on, oldest first."""
        spans, listed = self._walk(over_damage=True).spans(), self._listed()
        found: dict[int, int] = {}
        for epoch, versions in spans:
            oldest = versions.start
            if not found:
                # Deleted versions are older than all kept ones. A listing may miss the oldest kept
                # ones.
                oldest = min(
                    (version for version in listed[epoch] if version in versions),
                    default=versions.stop,
                )
                while oldest > versions.start and self.exists(manifest_key(epoch, oldest - 1)):
                    oldest -= 1
            found |= dict.fromkeys(range(oldest, versions.stop), epoch)
        return found

    def find(self, version: int) -> tuple[VersionRef, Manifest]:
        """The version of this number. Raises `Missing`, or `VersionGone` if only newer ones are
        kept."""
        for epoch, versions in reversed(self._walk(over_damage=True).spans()):
            if version in versions:
                with contextlib.suppress(Missing):
                    return self.at(epoch, version)
        kept = self.lineage()
        there = f"; versions {min(kept)} to {max(kept)} exist" if kept else ""
        if kept and 0 <= version < min(kept):
            raise VersionGone(
                f"{self.objects.url}: weight version {version} was deleted by `etude weights "
                f"gc`{there}"
            )
        raise Missing(f"{self.objects.url}: weight version {version} is not published{there}")

    def at(self, epoch: int, version: int) -> tuple[VersionRef, Manifest]:
        manifest, hash = self._record(manifest_key(epoch, version), Manifest)
        return self._link(manifest, hash, epoch, version), manifest

    def _link(self, manifest: Manifest, hash: str, epoch: int, version: int) -> VersionRef:
        key = manifest_key(epoch, version)
        if (manifest.epoch, manifest.version) != (epoch, version):
            raise Corrupt(f"{self.objects.url}: {key} is the manifest of another version")
        if not follows(manifest, epoch, version):
            raise Corrupt(f"{self.objects.url}: {key} does not follow an older version")
        link = VersionRef(epoch, version, hash)
        self._manifests[link] = manifest
        return link

    def follow(self, link: VersionRef) -> Manifest:
        """The manifest that a reference names, with exactly its hash."""
        if link not in self._manifests:
            found, _ = self.at(link.epoch, link.version)
            if found != link:
                raise Corrupt(
                    f"{self.objects.url}: the manifest of version {link.version} does not match "
                    f"the hash in its successor; restore "
                    f"{manifest_key(link.epoch, link.version)} from a backup"
                )
        return self._manifests[link]

    def extra_routes(self, target: VersionRef) -> list[Route]:
        """The extra routes to a version. They are optional, so damaged ones are left out."""
        return [
            route for route in self.check_extra_routes(target).values() if isinstance(route, Route)
        ]

    def check_extra_routes(self, target: VersionRef) -> dict[str, Route | Corrupt]:
        """Key -> the route, or the error that makes it invalid."""

        def read(key: str) -> Route:
            extra, _ = self._record(key, ExtraRoute)
            base = extra.route.base
            if (
                extra.target != target
                or route_key(target, base) != key
                or not leads_on(base, target.epoch, target.version)
            ):
                raise Corrupt(
                    f"{self.objects.url}: {key} does not contain the route of its name; delete it"
                )
            return extra.route

        keys = self.keys(f"weights/routes/{target.epoch:06d}/{target.version:06d}")
        return self._each(filter(owner_of, keys), read)

    def leases(self) -> dict[str, Lease | Corrupt]:
        """Key -> the lease, or the error that makes it invalid."""

        def read(key: str) -> Lease:
            try:
                return self.read(key, Lease)
            except Corrupt as e:
                raise Corrupt(f"{e}; delete it if that reader no longer exists") from e

        keys = self.keys("weights/leases")
        return self._each(
            (key for key in keys if re.fullmatch(r"weights/leases/[^./][^/]*\.json", key)), read
        )

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
        """Read a record that has no seal of its own, but the store's digest."""
        return self.retry(lambda: self._decode(key, self._unsealed(key), type))

    def _unsealed(self, key: str) -> bytes:
        try:
            return self.objects.get_sealed(key)
        except Damaged as e:
            raise Corrupt(str(e)) from e

    # Objects, by hash.

    def shard(self, target: VersionRef, hash: str) -> bytes:
        """The bytes of a shard, checked. A corrupted download is retried."""
        key = shard_key(target.epoch, target.version, hash)
        for _ in range(TRIES):
            data = self.get(key)
            if hash_of(data) == hash:
                self.damaged.discard(key)
                return data
        self.damaged.add(key)
        raise Corrupt(f"{self.objects.url}: {key} does not match the hash in its name")

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
        """Create a record; False if there is another record under the key. If only the reply was
        lost, ours is stored: then the result is True, even if the store needs a few attempts to
        return it."""
        data = to_json(record)
        return self.retry(lambda: self.objects.create(key, data)) or any(
            self.get(key) == data for _ in range(TRIES)
        )

    def retry(self, act: Callable[[], T]) -> T:
        """Retry after transient errors. A missing object is not retried, nor is an unreachable
        store, since the library has already retried it."""
        for delay_s in (FIRST_RETRY_S * 2**n for n in range(TRIES - 1)):
            try:
                return act()
            except (Missing, Unreachable):
                raise
            except EtudeError:
                self._sleep(delay_s)
        return act()

    def _record(self, key: str, *types: type[R]) -> tuple[R, str]:
        def read() -> tuple[R, str]:
            data = self.objects.get(key)
            record = self._decode(key, data, *types)
            self._trust.check(record, f"{self.objects.url}: {key}")
            if to_json(record) != data or not is_sound(record):
                raise Corrupt(
                    f"{self.objects.url}: {key} is not a valid {type(record).__name__}; restore "
                    f"it from a backup"
                )
            return record, hash_of(data)

        try:
            found = self.retry(read)
        except Corrupt:
            self.damaged.add(key)
            raise
        self.damaged.discard(key)
        return found

    def _decode(self, key: str, data: bytes, *types: type[T]) -> T:
        """Decode as the type whose fields match."""
        where = f"{self.objects.url}: {key}"
        names = set[str]()
        with contextlib.suppress(Damaged):
            names = set(from_json(data, dict[str, Any], where))
        try:
            fitting = (each for each in types if {field.name for field in fields(each)} == names)  # type: ignore[arg-type]
            return from_json(data, next(fitting, types[0]), where)
        except Damaged as e:
            raise Corrupt(str(e)) from e


class PublishedVersions:
    """The published versions of one run; a `core.protocols.WeightStore`."""

    def __init__(self, objects: Objects) -> None:
        self._chain = Chain(objects)

    async def wait(self, after: int) -> Manifest:
        """Wait for a version newer than `after`; return the newest."""
        # The store is the only link between clusters, and it cannot call us: this is the one place
        # that polls for weights. The delay grows because the next version is a whole training step
        # away.
        objects = self._chain.objects
        delay_s = FIRST_POLL_S
        while (manifest := await asyncio.to_thread(self._chain.newest, after)) is None:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, max(LAST_POLL_S, objects.poll_s))
        return manifest


def read_manifest(objects: Objects, version: int) -> Manifest:
    return Chain(objects).find(version)[1]


def find_newest(objects: Objects, after: int = -1) -> Manifest | None:
    return Chain(objects).newest(after)
