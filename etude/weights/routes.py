"""Which way to take to a version: a shortest path over what must be downloaded. Pure, but for reading manifests."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass

from etude.core.types import Link, Route
from etude.store.objects import Missing
from etude.weights.manifest import Chain


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


def known_hops(chain: Chain, start: Link | None, goal: Link) -> list[Hop]:
    """The hops that a way to `goal` may need. Walks back over parents until it meets the start, or until a whole
    version was met and going on cannot pay."""
    hops: list[Hop] = []
    at: Link | None = goal
    whole, walked = float("inf"), 0
    while at is not None and at != start:
        try:
            manifest = chain.follow(at)
        except Missing:
            break  # deleted as too old
        routes = [manifest.route, *chain.extra_routes(at)]
        hops += [Hop(at, route) for route in routes]
        whole = min([whole, *(walked + route.bytes for route in routes if route.base is None)])
        walked += manifest.route.bytes
        if whole < float("inf") and (start is None or at.version <= start.version or walked > whole):
            break
        at = manifest.parent
    return hops


def plan(chain: Chain, start: Link | None, goal: Link, broken: Collection[Hop] = ()) -> list[Hop] | None:
    direct = Hop(goal, chain.follow(goal).route)
    if start is not None and direct.route.base == start and direct not in broken:
        return [direct]  # one step behind, as nearly always: no need to look around
    return cheapest([hop for hop in known_hops(chain, start, goal) if hop not in broken], start, goal)
