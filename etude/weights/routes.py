"""Which way to take to a version: a shortest path over what must be downloaded. Pure, but for reading manifests."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass

from etude.core.types import Link, Route
from etude.store.objects import Missing
from etude.weights.manifest import Chain
from etude.weights.signing import Corrupt


@dataclass(frozen=True, slots=True)
class Hop:
    """From the route's base to `target`."""

    target: Link
    route: Route


def cheapest(hops: Collection[Hop], start: Link | None, goal: Link) -> list[Hop] | None:
    """The hops from nothing, or from `start`, which is at hand, that cost the fewest bytes; None if there is no way."""
    leaving: dict[Link | None, list[Hop]] = {}
    for hop in hops:
        leaving.setdefault(hop.route.base, []).append(hop)
    done: set[Link | None] = set()
    ways: list[tuple[int, int, Link | None, list[Hop]]] = [(0, 0, None, []), (0, 1, start, [])]
    ticket = len(ways)  # breaks ties: links have no order
    while ways:
        cost, _, here, way = heapq.heappop(ways)
        if here == goal:
            return way
        if here in done:
            continue
        done.add(here)
        for hop in leaving.get(here, []):
            ticket += 1
            heapq.heappush(ways, (cost + hop.route.bytes, ticket, hop.target, [*way, hop]))
    return None


def plan(chain: Chain, start: Link | None, goal: Link, broken: Collection[Hop] = ()) -> list[Hop] | None:
    """The cheapest way from `start`, or from nothing, over no broken hop. Looks at versions, newest first, until it
    meets the start, or knows a way from a whole version and going on cannot pay."""
    direct = Hop(goal, chain.follow(goal).route)
    if start is not None and direct.route.base == start and direct not in broken:
        return [direct]  # one step behind, as nearly always: no need to look around
    hops: list[Hop] = []
    best: list[Hop] | None = None
    ahead, walked = {goal}, 0
    while ahead:
        at = max(ahead, key=lambda link: link.version)
        ahead.remove(at)
        found: list[Hop] = []
        if at != start:
            try:
                manifest = chain.follow(at)
            except (Missing, Corrupt):
                continue  # deleted as too old, or damaged: no way leads over it
            found = [
                hop for route in (manifest.route, *chain.extra_routes(at)) if (hop := Hop(at, route)) not in broken
            ]
            walked += manifest.route.bytes
        hops += found
        bases = {hop.route.base for hop in found}
        ahead |= {base for base in bases if base is not None}  # these are older: the chain sees to that
        if at == start or None in bases:
            best = cheapest(hops, start, goal)
        if best is not None and (
            start is None or at.version <= start.version or walked > sum(hop.route.bytes for hop in best)
        ):
            break
    return best
