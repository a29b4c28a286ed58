"""Route planning: the shortest path to a version by download size. Pure, except for reading
manifests."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection
from dataclasses import dataclass

from etude.core.types import Route, VersionRef
from etude.store.objects import Missing
from etude.weights.manifest import Chain
from etude.weights.signing import Corrupt


@dataclass(frozen=True, slots=True)
class RouteStep:
    """One step of a route: from the base to `target`."""

    target: VersionRef
    route: Route


def cheapest(
    steps: Collection[RouteStep], start: VersionRef | None, goal: VersionRef
) -> list[RouteStep] | None:
    """The steps from nothing, or from `start`, which is held, that cost the fewest bytes; None if
    there is no route."""
    leaving: dict[VersionRef | None, list[RouteStep]] = {}
    for step in steps:
        leaving.setdefault(step.route.base, []).append(step)
    done: set[VersionRef | None] = set()
    tickets = itertools.count()  # break ties: references have no order
    queue: list[tuple[int, int, VersionRef | None, list[RouteStep]]] = [
        (0, next(tickets), here, []) for here in (None, start)
    ]
    while queue:
        cost, _, here, path = heapq.heappop(queue)
        if here == goal:
            return path
        if here in done:
            continue
        done.add(here)
        for step in leaving.get(here, []):
            longer = cost + step.route.bytes, next(tickets), step.target, [*path, step]
            heapq.heappush(queue, longer)
    return None


def plan_route(
    chain: Chain, start: VersionRef | None, goal: VersionRef, broken: Collection[RouteStep] = ()
) -> list[RouteStep] | None:
    """The cheapest route from `start`, or from nothing, without broken steps. Looks at versions,
    newest first, until it reaches the start, or knows a route from a whole version and looking
    further cannot pay off."""
    direct = RouteStep(goal, chain.follow(goal).route)
    if start is not None and direct.route.base == start and direct not in broken:
        return [direct]  # one step behind, as nearly always: no need to look around
    steps: list[RouteStep] = []
    best: list[RouteStep] | None = None
    ahead, walked = {goal}, 0
    while ahead:
        at = max(ahead, key=lambda link: link.version)
        ahead.remove(at)
        found: list[RouteStep] = []
        if at != start:
            try:
                manifest = chain.follow(at)
            except (Missing, Corrupt):
                continue  # deleted as too old, or damaged: no route over it
            found = [
                step
                for route in (manifest.route, *chain.extra_routes(at))
                if (step := RouteStep(at, route)) not in broken
            ]
            walked += manifest.route.bytes
        steps += found
        bases = {step.route.base for step in found}
        # these are older: the chain guarantees that
        ahead |= {base for base in bases if base is not None}
        if at == start or None in bases:
            best = cheapest(steps, start, goal)
        if best is not None and (
            start is None
            or at.version <= start.version
            or walked > sum(step.route.bytes for step in best)
        ):
            break
    return best
