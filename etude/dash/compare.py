"""Blind comparison by a person of two versions of the policy at the same tasks.

A pair is identified by a key that reveals nothing. Its sessions are shown without ids, versions and
scores, in an order that follows from a hash.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from etude.core.types import Trajectory
from etude.dash import detail
from etude.dash.recorded import RecordedRun
from etude.dash.table import Filter, RolloutTable
from etude.store.codec import Damaged, Stamped
from etude.store.objects import Missing
from etude.store.rollouts import RolloutRow
from etude.store.verdicts import Preference


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A judgement of one pair, as the page sends it."""

    before: int
    after: int
    pair: str
    verdict: Literal["left", "right", "tie"]
    who: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    task: str
    left: str
    right: str
    key: str


def pairs(table: RolloutTable, before: int, after: int) -> list[Pair]:
    """Pair each session of one version with a session of the other at the same task, as far as
    there are enough, in an order that reveals nothing."""
    sides: tuple[defaultdict[str, list[str]], ...] = (defaultdict(list), defaultdict(list))
    for row in _readable(table):
        for side, version in zip(sides, (before, after), strict=True):
            if row.versions[-1] == version:
                side[row.task].append(row.id)
    found = [
        _pair(task, *two)
        for task in sides[0].keys() & sides[1].keys()
        for two in zip(sides[0][task], sides[1][task], strict=False)
        if before != after
    ]
    return sorted(found, key=lambda pair: pair.key)


def _readable(table: RolloutTable) -> list[RolloutRow]:
    rows = (table.rows[place] for place in table.find(Filter()))
    return [row for row in rows if row.versions and row.object]


def _pair(task: str, first: str, second: str) -> Pair:
    digest = hashlib.sha256("\n".join(sorted((first, second))).encode()).digest()[:9]
    left, right = sorted((first, second), reverse=bool(digest[0] & 1))
    return Pair(task, left, right, digest[1:].hex())


def page(
    recorded: RecordedRun,
    told: Sequence[Stamped[Preference]],
    *,
    before: int,
    after: int,
    who: str,
) -> dict[str, Any]:
    """The first pair that this person has not judged, with the number of pairs. Pairs of identical
    sessions are skipped."""
    found = pairs(recorded.table, before, after)
    newest = {(p.left, p.right, p.who): p for p in (each.record for each in told)}
    left = [pair for pair in found if (pair.left, pair.right, who) not in newest]
    return {
        "versions": _versions(recorded.table),
        "pairs": len(found),
        "left": len(left),
        "next": next(filter(None, (_shown(recorded, pair) for pair in left)), None),
        "result": _result(recorded.table, found, list(newest.values()), after),
    }


def _versions(table: RolloutTable) -> list[dict[str, int]]:
    counts = Counter(row.versions[-1] for row in _readable(table))
    return [{"version": version, "sessions": counts[version]} for version in sorted(counts)]


def _shown(recorded: RecordedRun, pair: Pair) -> dict[str, Any] | None:
    """A pair as the page shows it. None if there is nothing to choose: both sessions are identical,
    or one cannot be read."""
    passed_over: set[str] = recorded.memo("passed over", set)
    if pair.key in passed_over:
        return None
    try:
        left, right = (_turns(recorded.conversation(id)) for id in (pair.left, pair.right))
    except (Damaged, Missing):
        left = right = []
    if left == right:
        passed_over.add(pair.key)
        return None
    return {"pair": pair.key, "task": pair.task, "left": left, "right": right}


def _turns(t: Trajectory) -> list[dict[str, Any]]:
    """The turns of a session with the ids of its calls, which link answers to calls, replaced by
    numbers: the form of the ids depends on the server, and would reveal it."""
    turns = detail.conversation(t)["turns"]
    called = (call["id"] for turn in turns for call in turn["calls"])
    answered = (turn["call_id"] for turn in turns)
    ids = dict.fromkeys(filter(None, (*called, *answered)))
    numbers = {"": ""} | {id: str(n) for n, id in enumerate(ids, 1)}
    return [
        {
            **turn,
            "calls": [{**call, "id": numbers[call["id"]]} for call in turn["calls"]],
            "call_id": numbers[turn["call_id"]],
        }
        for turn in turns
    ]


def _result(
    table: RolloutTable, found: Sequence[Pair], told: Sequence[Preference], after: int
) -> dict[str, int]:
    """The number of judgements for each version, and of ties."""
    ours = {(pair.left, pair.right) for pair in found}
    counts: Counter[str] = Counter(before=0, after=0, tie=0)
    for each in told:
        if (each.left, each.right) in ours:
            row = table.get(each.chosen) if each.chosen else None
            name = "after" if row and row.versions[-1] == after else "before"
            counts[name if row else "tie"] += 1
    return dict(counts)


def preference(table: RolloutTable, choice: Choice) -> Preference:
    """The choice as a record, with the session ids that the person did not see."""
    for pair in pairs(table, choice.before, choice.after):
        if pair.key == choice.pair:
            return Preference(
                left=pair.left,
                right=pair.right,
                verdict=choice.verdict,
                who=choice.who,
                note=choice.note,
            )
    raise Missing(f"there is no pair {choice.pair!r} of {choice.before} and {choice.after}")
