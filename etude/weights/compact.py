"""Ways over several versions at once, for readers that fell behind. Made by anyone who may write, beside the trainer.

Eight steps change fewer weights than the sum of what each changes, so one way over all of them costs about half of the
eight. Whoever makes it builds both ends from the store, checked like any reader; two who make the same one write the
same bytes under the same keys.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from etude.core.types import Link, Route, Shard
from etude.weights.follow import Follower, Image
from etude.weights.manifest import Chain
from etude.weights.records import ExtraRoute, route_key
from etude.weights.shards import Census, pack
from etude.weights.signing import Signer, signer_from_environment

SKIP = 8
RECENT = 64
"""Versions to look back over: the trainer stores a whole one at least as often."""


def wanted(versions: Collection[int], skip: int) -> list[tuple[int, int]]:
    """(base, target) of the ways that there should be, oldest first: from each multiple of `skip` to the next."""
    recent = sorted(versions)[-RECENT:]
    return [(target - skip, target) for target in recent if target % skip == 0 and target - skip in recent]


def compact(chain: Chain, *, skip: int = SKIP, signer: Signer | None = None, threads: int = 1) -> list[ExtraRoute]:
    """Makes the ways that are missing, and returns them."""
    follower, made = Follower(chain, threads=threads), []
    lineage = chain.lineage()
    for start, end in wanted(lineage, skip):
        base, target = (chain.at(lineage[version], version)[0] for version in (start, end))
        if not chain.exists(route_key(target, base)):
            way = ExtraRoute(target=target, route=_route(chain, follower.reach(base), follower.reach(target), threads))
            way = (signer or signer_from_environment())(way)
            if chain.create(route_key(target, base), way):
                made.append(way)
    return made


def _route(chain: Chain, base: Image, target: Image, threads: int) -> Route:
    link: Link = target.link
    with ThreadPoolExecutor(threads) as pool:
        packed = pack(target.state, target.held, base.state, base.held, pool, Census())
        put = chain.put_shard
        shards = [Shard(put(link.epoch, link.version, p.data), len(p.data), p.first, p.last) for p in packed]
    return Route(base.link, tuple(shards))
