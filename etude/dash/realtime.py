"""The loop of real-time RL, read from its store: the current state, the decisions with their
reasons, the contents of the updates, the dropped sessions, and the deleted users."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from etude.core.traffic import Change, decided
from etude.core.updates import CreditedAnswer, UpdateRecord, versions_that_saw
from etude.dash.recorded import RecordedRun
from etude.store.realtime import TrafficLog, UpdateLog
from etude.weights.manifest import find_newest

NEWEST = 200
"""Number of decisions that are shown."""
CONTEXTS = 20
"""Number of kinds of requests that are shown."""
CONTEXT_CHARS = 80


class RealtimePage:
    """The view of the loop. Changes of traffic are immutable, so each is read once; so are updates,
    until a user is deleted."""

    def __init__(self, recorded: RecordedRun) -> None:
        self._recorded = recorded
        self._log = TrafficLog(recorded.run.objects)
        self._updates = UpdateLog(recorded.run)

    def page(self) -> dict[str, Any]:
        ledger = self._recorded.ledger
        changes, records = self._log.changes(), self._updates.records()
        bases = {step: record.base for step, record in records.items()}
        return {
            "state": self._state(changes, max(records, default=-1)),
            "changes": [_told(change) for change in changes[: -NEWEST - 1 : -1]],
            "updates": [_update(record, changes) for record in records.values()][::-1],
            "contexts": _contexts([one for each in records.values() for one in each.answers]),
            "ledger": {
                "issued": ledger.issued,
                "trained": ledger.trained,
                "dropped": dict(ledger.dropped.most_common()),
                "pending": ledger.in_flight,
            },
            "deleted": [
                {
                    "user": each.user,
                    "time": each.time,
                    "versions": versions_that_saw(each.steps, bases),
                }
                for each in self._updates.forgotten()
            ],
        }

    def _state(self, changes: Sequence[Change], batched: int) -> dict[str, Any] | None:
        """The current state; None if no version was deployed to users yet."""
        if not changes:
            return None
        last = changes[-1]
        traffic = last.traffic
        ends = Counter(change.action for change in changes)
        return {
            "doing": self._doing(last, batched, decided(changes)),
            "since": last.time,
            "live": traffic.version,
            "beside": None if traffic.beside is None else traffic.pools[traffic.beside],
            "share": traffic.share,
            "heldout_share": traffic.heldout_share,
            "pools": traffic.pools,
            "why": last.why,
            "deployed": ends["settle"],
            "refused": ends["refuse"],
            "rolled_back": ends["roll_back"],
        }

    def _doing(self, last: Change, batched: int, ended: int) -> str:
        if last.held:
            return "held"
        if last.action in ("canary", "promote"):
            return "canary" if last.action == "canary" else "watch"
        if batched <= ended:
            return "collect"
        newest = find_newest(self._recorded.run.objects)
        return "train" if newest is None or newest.version < batched else "evaluate"


def _told(change: Change) -> dict[str, Any]:
    traffic = change.traffic
    return {
        "number": change.number,
        "time": change.time,
        "action": change.action,
        "version": change.version,
        "live": traffic.version,
        "share": traffic.share,
        "held": change.held,
        "why": change.why,
        "evidence": change.evidence,
    }


def _update(record: UpdateRecord, changes: Sequence[Change]) -> dict[str, Any]:
    about = [change for change in changes if change.version == record.step]
    return {
        "version": record.step,
        "base": record.base,
        "time": record.time,
        "sessions": len({one.sample for one in record.answers}),
        "users": len({one.sample.partition(".")[0] for one in record.answers}),
        "answers": len(record.answers),
        "worth": _mean(record.answers),
        "dropped": {each.label: len(each.samples) for each in record.dropped},
        "became": about[-1].action if about else None,
    }


def _contexts(answers: Sequence[CreditedAnswer]) -> list[dict[str, Any]]:
    """Mean worth of the answers by kind of request: the differences that a baseline has to
    explain."""
    found: defaultdict[str, list[CreditedAnswer]] = defaultdict(list)
    for one in answers:
        found[one.context].append(one)
    most = sorted(found.items(), key=lambda item: -len(item[1]))[:CONTEXTS]
    return [
        {"context": name[:CONTEXT_CHARS], "answers": len(each), "worth": _mean(each)}
        for name, each in most
    ]


def _mean(answers: Sequence[CreditedAnswer]) -> float | None:
    return fmean(one.worth for one in answers) if answers else None
