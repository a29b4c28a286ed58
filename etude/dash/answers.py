"""The answers of the dashboard: each function makes the JSON of one view from a run's state."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from etude.core.errors import error_line
from etude.core.lineage import stage_spans
from etude.dash.page import describe
from etude.dash.recorded import RecordedRun, clusters
from etude.dash.table import BATCHED, TRAINED, WAITS, Filter, RolloutTable
from etude.dash.waits import summed_up
from etude.store.codec import Stamped
from etude.store.rollouts import RolloutRow
from etude.store.verdicts import Verdict

MOST_ROWS = 500
LISTED_ALARMS = 30
LISTED_WAITING = 500
LOOKED_INTO = 400
"""Sessions whose evidence is read for clusters."""
LOOK_S = 0.8
LENGTH_BINS = 8
SMALL_POINT = 0.25
"""Fraction of the median number of attempts: a point with fewer is mostly chance."""
OPEN = (WAITS, BATCHED)
"""Rollouts in flight: the ledger does not know their fate yet."""
SHOWN = (
    *("id", "task", "kind", "group", "stage", "step", "status", "error", "reward", "parts"),
    *("flags", "length", "turns", "versions", "sampled_tokens", "seconds", "source"),
)
"""Columns of a rollout that the page shows."""


def summary(recorded: RecordedRun) -> dict[str, Any]:
    """A run in the list of runs."""
    page = describe(recorded.view, recorded.lag_bound)
    return {
        "name": recorded.name,
        "url": recorded.run.objects.url,
        "headline": asdict(page.headline),
        "finished": recorded.view.finished,
        "rollouts": len(recorded.table),
        "told": recorded.waits.told,
        "alarms": len(page.alarms) + bool(page.advice),
        "realtime": recorded.config is not None and recorded.config.realtime is not None,
    }


def overview(recorded: RecordedRun) -> dict[str, Any]:
    view, history, bound = recorded.view, recorded.history, recorded.lag_bound
    page = describe(view, bound)
    return summary(recorded) | {
        "alarms": [asdict(alarm) for alarm in view.alarms.active.values()],
        "past_alarms": [
            {"t": begun.t, **asdict(begun.alarm)} for begun in history.alarms[-LISTED_ALARMS:]
        ][::-1],
        "missing": recorded.missing(),
        "advice": recorded.waits.advice(recorded.now()),
        "progress": [asdict(each) for each in page.progress],
        "lines": [asdict(line) for line in page.lines],
        "legend": page.legend,
        "lag_bound": bound,
        "lag_split": recorded.memo("lag_split", lambda: lag_split(recorded.table)),
        "stages": _stages(recorded),
        "steps": history.steps | {"ess": history.ess},
        "fits": history.fits,
        "evals": [asdict(each) for each in recorded.evaluations()],
        "solve": recorded.memo("solve", lambda: solve_rates(recorded.table)),
        "cost": _cost(recorded.table),
    }


def _stages(recorded: RecordedRun) -> list[dict[str, Any]]:
    """The lineage: each stage with the versions that it spans, and its state."""
    config = recorded.config
    done = {each["stage"]: each for each in recorded.history.stages if "ended" in each}
    began = {each["stage"]: each for each in recorded.history.stages if "began" in each}
    spans = stage_spans(config.stage) if config else []
    return [
        {
            "stage": span.name,
            "kind": span.stage.kind,
            "start": span.start,
            "end": span.end,
            "state": "done" if span.name in done else "under way" if span.name in began else "",
            "seconds": done.get(span.name, {}).get("seconds"),
        }
        for span in spans
    ]


def _cost(table: RolloutTable) -> dict[str, float]:
    every = table.find(Filter())
    return {
        name: float(np.nansum(table.numbers(name, every))) for name in ("sampled_tokens", "seconds")
    } | {"rollouts": len(every)}


def solve_rates(table: RolloutTable) -> dict[str, dict[str, list[float]]]:
    """Share of solved attempts by the newest version that sampled them, for each kind of task. If a
    version was replaced early, its few attempts are counted with those of the next version."""
    found: defaultdict[str, defaultdict[int, list[int]]] = defaultdict(
        lambda: defaultdict(lambda: [0, 0])
    )
    for row in (table.rows[place] for place in table.find(Filter())):
        if row.reward is None or not row.versions:
            continue
        name = _curve_of(row)
        counts = found[name][row.versions[-1]]
        counts[0] += row.reward == 1.0
        counts[1] += 1
    points = {name: _gathered(counts) for name, counts in sorted(found.items())}
    return {
        name: {
            "version": [float(version) for version, _, _ in each],
            "rate": [solved / attempts for _, solved, attempts in each],
            "count": [float(attempts) for _, _, attempts in each],
        }
        for name, each in points.items()
    }


def _curve_of(row: RolloutRow) -> str:
    """The name of the curve of a rollout. Evaluations with several attempts at each task have a
    curve of their own, since they are sampled differently."""
    if row.kind == "train":
        return f"train {row.source}".strip()
    several = re.search(r"_x\d+$", row.group)
    return row.kind + (several[0].replace("_x", " ×") if several else "")


def _gathered(counts: Mapping[int, Sequence[int]]) -> list[tuple[int, int, int]]:
    """(version, solved, attempts) of each point, after merging points with far fewer attempts than
    most."""
    least = float(np.median([attempts for _, attempts in counts.values()])) * SMALL_POINT
    points: list[tuple[int, int, int]] = []
    solved, attempts = 0, 0
    for version in sorted(counts):
        solved, attempts = solved + counts[version][0], attempts + counts[version][1]
        if attempts >= least:
            points.append((version, solved, attempts))
            solved, attempts = 0, 0
    if attempts:
        version, before, among = points.pop()
        points.append((max(counts), before + solved, among + attempts))
    return points


def lag_split(table: RolloutTable) -> dict[str, dict[int, int]]:
    """Histograms over trained rollouts: number of versions published while they were sampled, and
    while they waited for their step."""
    in_flight: Counter[int] = Counter()
    queued: Counter[int] = Counter()
    for row in (table.rows[place] for place in table.find(Filter(became=TRAINED))):
        if row.step is not None and row.versions:
            in_flight[row.versions[-1] - row.versions[0]] += 1
            queued[row.step - 1 - row.versions[-1]] += 1
    return {"in_flight": dict(sorted(in_flight.items())), "queued": dict(sorted(queued.items()))}


def rollouts(
    recorded: RecordedRun, wanted: Filter, sort: str, *, offset: int, limit: int
) -> dict[str, Any]:
    table = recorded.table
    places = table.find(wanted)
    rows = table.page(places, sort, offset=offset, limit=min(limit, MOST_ROWS))
    return {
        "total": len(table),
        "matched": len(places),
        "rows": [short(table, row) for row in rows],
        "facets": table.facets(places),
        "rewards": table.histogram("reward", places),
        "lengths": table.histogram("length", places),
    }


def short(table: RolloutTable, row: RolloutRow) -> dict[str, Any]:
    error = row.error and error_line(row.error)
    shown = {name: getattr(row, name) for name in SHOWN}
    return shown | {"became": table.became(row), "error": error}


def failures(recorded: RecordedRun, wanted: Filter) -> dict[str, Any]:
    """Failures by cause, most frequent first. Errors are counted over all rows; the causes of the
    other failures come from as many conversations as can be read while a person waits."""
    table = recorded.table
    places = table.find(wanted)
    broken = table.count("cause", places)
    broken.pop("", None)
    rows = table.page(places, "new", offset=0, limit=len(places))
    unsolved = [row for row in rows if row.reward is None or row.reward < 1.0]
    looked = recorded.causes(unsolved[:LOOKED_INTO], LOOK_S)
    return {
        "broken": [{"cause": cause, "count": count} for cause, count in broken.items()],
        "unsolved": len(unsolved),
        "looked_into": len(looked),
        "clusters": [
            each | {"examples": _examples(looked, each)} for each in clusters([*looked.values()])
        ],
        "tasks": _worst_tasks(unsolved, rows),
    }


def _examples(looked: dict[str, tuple[str, str]], cluster: dict[str, str | int]) -> list[str]:
    same = (cluster["evidence"], cluster["tool"])
    return [id for id, causes in looked.items() if causes == same][:5]


def _worst_tasks(
    unsolved: Sequence[RolloutRow], rows: Sequence[RolloutRow]
) -> list[dict[str, Any]]:
    attempts, lost = Counter(row.task for row in rows), Counter(row.task for row in unsolved)
    worst = sorted(lost, key=lambda task: (-lost[task] / attempts[task], -lost[task]))[:20]
    return [{"task": task, "unsolved": lost[task], "attempts": attempts[task]} for task in worst]


def ledger(recorded: RecordedRun) -> dict[str, Any]:
    return recorded.memo("ledger", lambda: _ledger(recorded))


def _ledger(recorded: RecordedRun) -> dict[str, Any]:
    ledger, table = recorded.ledger, recorded.table
    places = table.find(Filter(kind="train"))
    known = (p for p in places if (row := table.rows[p]).object and table.became(row) not in OPEN)
    settled = np.fromiter(known, np.int64)
    return {
        "issued": ledger.issued,
        "trained": ledger.trained,
        "dropped": dict(ledger.dropped.most_common()),
        "in_flight": ledger.in_flight,
        "settled": len(settled),
        "by_length": _by_length(table, settled),
        "by_source": _by_name(table, settled, "source"),
        "by_status": _by_name(table, settled, "status"),
        "by_reward": _by_reward(table, settled),
    }


def _share(name: str, trained: np.ndarray[Any, Any], among: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"name": name, "dispatched": int(among.sum()), "trained": int((trained & among).sum())}


def _by_length(table: RolloutTable, places: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    if not len(places):
        return []
    lengths = table.numbers("length", places)
    trained = table.trained(places)
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, LENGTH_BINS + 1)).astype(int))
    if len(edges) < 2:
        return [_share(f"{edges[0]:,}", trained, np.ones(len(places), bool))]
    bins = np.clip(np.searchsorted(edges, lengths, "right") - 1, 0, len(edges) - 2)
    return [
        _share(f"{edges[n]:,} to {edges[n + 1]:,}", trained, bins == n)
        for n in range(len(edges) - 1)
    ]


def _by_name(table: RolloutTable, places: np.ndarray[Any, Any], name: str) -> list[dict[str, Any]]:
    if not len(places):
        return []
    names = np.array(table.names(name, places))
    trained = table.trained(places)
    return [_share(each or "(none)", trained, names == each) for each in table.count(name, places)]


def _by_reward(table: RolloutTable, places: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    if not len(places):
        return []
    rewards = table.numbers("reward", places)
    trained = table.trained(places)
    kinds = {
        "solved (1)": rewards == 1.0,
        "between": (rewards != 0.0) & (rewards != 1.0) & np.isfinite(rewards),
        "0": rewards == 0.0,
        "failed (no reward)": ~np.isfinite(rewards),
    }
    return [_share(name, trained, among) for name, among in kinds.items() if among.any()]


def doctor(recorded: RecordedRun) -> dict[str, Any]:
    now = recorded.now()
    waiting = recorded.waits.waiting(now, recorded.reorder_window)
    return {
        "finished": recorded.waits.finished,
        "stopped": recorded.waits.stopped(now),
        "told": recorded.waits.told,
        "advice": recorded.waits.advice(now),
        "alarms": [asdict(alarm) for alarm in recorded.view.alarms.active.values()],
        "missing": recorded.missing(),
        "reasons": [
            {"waits_for": reason, "count": count, "longest_s": longest}
            for reason, count, longest in summed_up(waiting)
        ],
        "waiting": [asdict(each) for each in waiting[:LISTED_WAITING]],
        "count": len(waiting),
    }


def review(recorded: RecordedRun, verdicts: Sequence[Stamped[Verdict]]) -> dict[str, Any]:
    """Sessions with a flag or a verdict, and each detector's precision and recall by the verdicts
    of people."""
    table = recorded.table
    told: defaultdict[str, dict[str, Stamped[Verdict]]] = defaultdict(dict)
    for each in verdicts:
        told[each.record.session][each.record.who] = each
    flagged = [row for place in table.find(Filter()) if (row := table.rows[place]).flags]
    judged = [row for id in told if (row := table.get(id)) is not None and not row.flags]
    cheats = {id: any(v.record.verdict == "cheat" for v in by.values()) for id, by in told.items()}
    return {
        "queue": [
            short(table, row)
            | {"verdicts": [{"t": v.t, **asdict(v.record)} for v in told[row.id].values()]}
            for row in [*reversed(flagged), *judged][:MOST_ROWS]
        ],
        "flagged": len(flagged),
        "judged": len(told),
        "detectors": _detectors(flagged, cheats),
    }


def _detectors(flagged: Sequence[RolloutRow], cheats: dict[str, bool]) -> list[dict[str, Any]]:
    counts = Counter(flag for row in flagged for flag in row.flags)
    found = []
    for flag, count in counts.most_common():
        judged = [cheats[row.id] for row in flagged if flag in row.flags and row.id in cheats]
        right, all_cheats = sum(judged), sum(cheats.values())
        found.append(
            {
                "flag": flag,
                "flagged": count,
                "judged": len(judged),
                "precision": right / len(judged) if judged else None,
                "recall": right / all_cheats if all_cheats else None,
            }
        )
    return found
