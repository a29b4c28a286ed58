"""`etude doctor RUN`: what every unfinished rollout is waiting for, as on the dashboard."""

from __future__ import annotations

import json

from etude.commands.dash import open_runs
from etude.dash.answers import doctor
from etude.dash.page import clock

LISTED = 20


def waiting(url: str, *, as_json: bool) -> int:
    """Print the report. Returns 1 if the run has stopped without being finished, or if a part of it
    is missing."""
    recorded = open_runs([url])[0]
    recorded.refresh()
    found = doctor(recorded)
    if as_json:
        print(json.dumps(found))
    else:
        print("\n".join(_lines(found)))
    return 1 if found["stopped"] or found["missing"] else 0


def _lines(found: dict[str, object]) -> list[str]:
    lines = [f"missing: {each}" for each in _list(found["missing"])]
    lines += [f"alarm: {each['what']}: {each['advice']}" for each in _list(found["alarms"])]
    if found["advice"]:
        lines.append(f"stopped: {found['advice']}")
    if not found["count"]:
        state = "the run is finished: " if found["finished"] else ""
        return [*lines, f"{state}no rollout is waiting"]
    lines += [
        f"{each['count']} wait for {each['waits_for']}, the longest for {clock(each['longest_s'])}"
        for each in _list(found["reasons"])
    ]
    shown = _list(found["waiting"])[:LISTED]
    assert isinstance(found["count"], int)
    left_out = found["count"] - len(shown)
    lines += [f"  {e['id']}  {clock(e['seconds'])}  {e['waits_for']}" for e in shown]
    return [*lines, f"  and {left_out} more"] if left_out else lines


def _list(value: object) -> list[dict[str, float]]:
    assert isinstance(value, list)
    return value
