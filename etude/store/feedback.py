"""Feedback on trajectories that arrived after they were stored.

    feedback/{trajectory}/{digest}.json    one `Feedback`

A trajectory is never rewritten. Each feedback is a separate object, named by its content: any
number of writers may add some concurrently, and sending the same feedback twice adds it once.
"""

from __future__ import annotations

import math

from blake3 import blake3

from etude.core.types import Feedback
from etude.store.codec import Damaged, from_json, to_json
from etude.store.objects import Missing
from etude.store.runs import Run


def add_feedback(run: Run, trajectory: str, feedback: Feedback) -> None:
    """Store a feedback. `trajectory`: the id of one in a stored group."""
    if not math.isfinite(feedback.value) or not math.isfinite(feedback.time):
        raise ValueError(f"{feedback}: value and time must be finite numbers")
    group_id, dot, _ = trajectory.rpartition(".")
    if not dot or "/" in trajectory:
        raise ValueError(
            f"{trajectory!r} is not a trajectory id: it must be the id of a group and a number, "
            f"such as g000001.0"
        )
    group = run.group(group_id)
    if trajectory not in {t.id for t in group.trajectories}:
        raise Missing(f"{run.objects.url}: group {group.id} has no trajectory {trajectory!r}")
    data = to_json(feedback)
    run.objects.create(f"{_folder(trajectory)}/{_digest(data)}.json", data)


def read_feedback(run: Run, trajectory: str) -> list[Feedback]:
    """All feedback so far, oldest first."""
    keys = [key for key in run.objects.list(_folder(trajectory)) if key.endswith(".json")]
    found = [_read(run, key) for key in keys]
    return sorted(found, key=lambda feedback: feedback.time)


def _read(run: Run, key: str) -> Feedback:
    data = run.objects.get(key)
    where = f"{run.objects.url}: {key}"
    if not key.endswith(f"/{_digest(data)}.json"):
        raise Damaged(f"{where} is damaged: restore it from a backup, or delete it")
    return from_json(data, Feedback, where)


def _digest(data: bytes) -> str:
    return blake3(data).hexdigest(length=16)


def _folder(trajectory: str) -> str:
    return f"feedback/{trajectory}"
