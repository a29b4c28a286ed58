"""Operating curve of gate and canary: planted updates, good and bad, and 10,000 simulated users.

A bad update is worse by 1 to 5 margins in one of six ways (`bench._planted`), a harmless one is as
good as the live version or better by up to one margin. "Stopped" means refused by the gate, or
rolled back by the canary before 5 % of all users have had a session with it.

    bad.stopped, bad.by_gate, bad.by_canary      shares of 100 bad updates
    bad.at_first_stage                           of those, by the gate or at the first 1 %
    bad.seen_max                                 largest share of users who saw one of them
    harmless.refused                             share of 100 harmless ones that were stopped
    harmless.days                                median time until all users have one
    curve.M.stopped                              share stopped of the updates that are worse by M
                                                 margins; from 1 on, those of the 100 bad ones from
                                                 M to M + 1
    kind.K.stopped                               share stopped of the 100 bad ones, by kind
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from etude.bench._planted import KINDS, Fate, Update, Users, fate
from etude.realtime.canary import CanaryPlan, Metric
from etude.realtime.gate import SUITES
from etude.realtime.population import Population

USERS = 10_000
SABOTEURS = 0.05
UPDATES = 100
SMALL = (0.25, 0.5, 0.75, 1.0)
PER_SMALL = 24
SEEN_LIMIT = 0.05
PLAN = CanaryPlan(
    metrics=(
        Metric(name="kept", margin=0.03),
        Metric(name="dissatisfied", margin=0.03, higher_is_better=False),
        Metric(name="latency", margin=0.02, higher_is_better=False),
    )
)


def run() -> dict[str, float]:
    users = Users(Population.of(USERS, seed=0, saboteurs=SABOTEURS))

    def fates(updates: Sequence[Update]) -> list[Fate]:
        return [fate(update, users, SUITES, PLAN, seed) for seed, update in enumerate(updates)]

    sizes = [1 + 4 * number / (UPDATES - 1) for number in range(UPDATES)]
    planted = [Update(KINDS[n % len(KINDS)], size) for n, size in enumerate(sizes)]
    bad = list(zip(planted, fates(planted), strict=True))
    small = {
        size: fates([Update(KINDS[n % len(KINDS)], size) for n in range(PER_SMALL)])
        for size in SMALL
    }
    good = [
        Update("weaker", -n / UPDATES) if n % 2 else Update("harmless", n) for n in range(UPDATES)
    ]
    harmless = fates(good)
    buckets = {
        f"{low}": [f for u, f in bad if low <= u.size < low + 1 + (low == 4)]
        for low in (1, 2, 3, 4)
    }
    return {
        "users": float(USERS),
        "bad.updates": float(len(bad)),
        "bad.stopped": stopped([found for _, found in bad]),
        "bad.by_gate": statistics.mean(f.stopped_by == "gate" for _, f in bad),
        "bad.by_canary": statistics.mean(f.stopped_by == "canary" for _, f in bad),
        "bad.at_first_stage": statistics.mean(f.seen < 1.2 * PLAN.ramp[0] for _, f in bad),
        "bad.seen_max": max(found.seen for _, found in bad),
        "bad.canary_days": statistics.median(f.days for _, f in bad if f.stopped_by == "canary"),
        "harmless.updates": float(len(harmless)),
        "harmless.refused": statistics.mean(f.stopped_by != "deployed" for f in harmless),
        "harmless.by_gate": statistics.mean(f.stopped_by == "gate" for f in harmless),
        "harmless.days": statistics.median(f.days for f in harmless if f.stopped_by == "deployed"),
        **{f"curve.{size:g}.stopped": stopped(found) for size, found in small.items()},
        **{f"curve.{low}-{int(low) + 1}.stopped": stopped(found) for low, found in buckets.items()},
        **{
            f"kind.{kind}.stopped": stopped([f for u, f in bad if u.kind == kind]) for kind in KINDS
        },
    }


def stopped(fates: Sequence[Fate]) -> float:
    """Share of the updates that were stopped in time."""
    return statistics.mean(f.stopped_by != "deployed" and f.seen < SEEN_LIMIT for f in fates)
