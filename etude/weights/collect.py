"""Garbage collection of weight versions.

These are kept: the newest `keep` versions, the versions that are `served`, those that a reader with
a lease still needs, the base versions of adapters among these, and everything since the last whole
version before them, so that every kept version can be built. Older versions are deleted, together
with the remains of trainers that died or were succeeded. This takes two rounds: the first records
the keys to delete; a later one, after a grace period, checks again and deletes those that are still
not needed. Manifests are deleted before their shards, so that no route is found whose shards are
gone.

Objects of a version that the living trainer has not committed yet are never touched: they are the
next version.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from etude.core.types import Manifest, Route, VersionRef
from etude.store.codec import to_json
from etude.weights.manifest import Chain
from etude.weights.records import owner_of, shard_key
from etude.weights.routes import RouteStep
from etude.weights.signing import Corrupt

SKEW_S = 120.0
"""The largest difference between the clocks of readers and ours."""
KEEP, GRACE_S = 16, 3600.0


@dataclass(frozen=True, slots=True)
class Tombstone:
    time: float
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Collected:
    deleted: tuple[str, ...]
    pending: tuple[str, ...]
    """Keys that a later round will delete."""


def collect(
    chain: Chain,
    *,
    keep: int = KEEP,
    served: Collection[int] = (),
    grace_s: float = GRACE_S,
    now: Callable[[], float] = time.time,
) -> Collected:
    doomed = find_garbage(chain, keep=keep, served=served, now=now())
    deleted: list[str] = []
    pending: set[str] = set()
    for key in filter(
        re.compile(r"weights/gc/[0-9]{12,}-[0-9a-f]{8}\.json").fullmatch, chain.keys("weights/gc")
    ):
        stone = _tombstone(chain, key)
        if now() < stone.time + grace_s:
            pending |= set(stone.keys)
            continue
        still = set(doomed)
        for name in stone.keys:
            if name in still:
                chain.delete(name)
                deleted.append(name)
        chain.delete(key)
    left = tuple(key for key in doomed if key not in deleted)
    if fresh := [key for key in left if key not in pending]:
        stone = Tombstone(now(), tuple(fresh))
        name = f"weights/gc/{int(stone.time):012d}-{secrets.token_hex(4)}.json"
        chain.retry(lambda: chain.objects.put_sealed(name, to_json(stone)))
    return Collected(tuple(deleted), left)


def _tombstone(chain: Chain, key: str) -> Tombstone:
    try:
        return chain.read(key, Tombstone)
    except Corrupt as e:
        raise Corrupt(f"{e}; delete it: garbage collection will find its objects again") from e


def find_garbage(chain: Chain, *, keep: int, served: Collection[int] = (), now: float) -> list[str]:
    """Keys that are no longer needed, in the order in which they may be deleted."""
    lineage = chain.lineage()
    if not lineage:
        return []
    newest_epoch = chain.epochs()[-1].epoch
    wanted = min([*sorted(lineage)[-keep:], *(v for v in served if v in lineage)])
    floor = _floor(chain, lineage, wanted=wanted, now=now)
    kept = {(epoch, version) for version, epoch in lineage.items() if version >= floor}
    needed = {key for epoch, version in kept for key in _shards(chain, *chain.at(epoch, version))}
    newest = max(lineage)

    def is_doomed(key: str) -> bool:
        owner = owner_of(key)
        if (
            owner is None
            or owner[0] > newest_epoch
            or (owner[0] == newest_epoch and owner[1] > newest)
        ):
            return False
        if key.startswith("weights/versions/"):
            # Epoch records among them are kept: a trainer that wakes up late must find its
            # successor there.
            return lineage.get(owner[1]) == owner[0] and owner not in kept
        return key not in needed if key.startswith("weights/shards/") else owner not in kept

    return [
        key
        for folder in ("versions", "routes", "shards")
        for key in chain.keys(f"weights/{folder}")
        if is_doomed(key)
    ]


def _floor(chain: Chain, lineage: dict[int, int], *, wanted: int, now: float) -> int:
    """The oldest version to keep. It is not newer than `wanted` or anything else that is needed,
    and all wanted versions can be built from the kept objects. If an object that they need is lost,
    everything is kept."""
    for lease in chain.leases().values():
        if isinstance(lease, Corrupt):
            raise lease  # its writer may need any version
        if now < lease.until + SKEW_S:
            wanted = min(wanted, lease.version)
    for version in [v for v in lineage if v >= wanted]:
        base = chain.at(lineage[version], version)[1].adapter_of
        wanted = wanted if base is None else min(wanted, base.version)
    there = set(chain.keys("weights/shards"))
    steps: list[RouteStep] = []
    for version in sorted(lineage, reverse=True):
        link, manifest = chain.at(lineage[version], version)
        steps += [
            RouteStep(link, route)
            for route in (manifest.route, *chain.extra_routes(link))
            if _named(link, manifest, route) <= there
        ]
        if version <= wanted and _buildable(steps) >= {v for v in lineage if v >= wanted}:
            return version
    return min(lineage)


def _buildable(steps: Sequence[RouteStep]) -> set[int]:
    """The versions that these steps, newest first, lead to from nothing."""
    built: dict[VersionRef | None, int] = {None: -1}
    for step in reversed(steps):
        if step.route.base in built:
            built[step.target] = step.target.version
    return set(built.values())


def _named(link: VersionRef, manifest: Manifest, *routes: Route) -> set[str]:
    hashes = {manifest.root, *(shard.hash for route in routes for shard in route.shards)}
    return {shard_key(link.epoch, link.version, hash) for hash in hashes}


def _shards(chain: Chain, link: VersionRef, manifest: Manifest) -> set[str]:
    further = chain.check_extra_routes(link).values()
    # it may be restored, and then needs the shards that it names
    if any(isinstance(route, Corrupt) for route in further):
        return set(chain.keys(f"weights/shards/{link.epoch:06d}/{link.version:06d}"))
    return _named(
        link, manifest, manifest.route, *(route for route in further if isinstance(route, Route))
    )
