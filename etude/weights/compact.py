"""Compaction: routes over several versions at once, for readers that fell behind. Any process with
write access may create them, in parallel with the trainer.

A delta over eight steps changes fewer weights than the sum of the eight deltas, so one route over
all of them costs about half. The compactor builds both ends from the store, checked like any
reader; two compactors of the same route write the same bytes under the same keys.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from etude.core.types import Route, Shard
from etude.weights.follow import Follower, Image
from etude.weights.manifest import Chain
from etude.weights.records import ExtraRoute, route_key
from etude.weights.shards import ChangeStats, pack
from etude.weights.signing import signer_from_environment

RECENT = 64
"""Versions to look back over: the trainer stores a whole one at least this often."""


def wanted_routes(versions: Collection[int], skip: int) -> list[tuple[int, int]]:
    """Pairs (base, target) of the routes that should exist, oldest first: from each multiple of
    `skip` to the next."""
    recent = sorted(versions)[-RECENT:]
    return [
        (target - skip, target)
        for target in recent
        if target % skip == 0 and target - skip in recent
    ]


def compact(chain: Chain, *, skip: int) -> list[ExtraRoute]:
    """Create the missing routes, and return them."""
    follower, made = Follower(chain), []
    lineage = chain.lineage()
    for start, end in wanted_routes(lineage, skip):
        base, target = (chain.at(lineage[version], version)[0] for version in (start, end))
        if not chain.exists(route_key(target, base)):
            route = _route(chain, follower.move_to(base), follower.move_to(target))
            extra = signer_from_environment()(ExtraRoute(target=target, route=route))
            if chain.create(route_key(target, base), extra):
                made.append(extra)
    return made


def _route(chain: Chain, base: Image, target: Image) -> Route:
    link = target.link
    with ThreadPoolExecutor(1) as pool:
        packed = pack(target.state, target.held, base.state, base.held, pool, ChangeStats())
        put = chain.put_shard
        shards = [
            Shard(put(link.epoch, link.version, p.data), len(p.data), p.first, p.last)
            for p in packed
        ]
    return Route(base.link, tuple(shards))
