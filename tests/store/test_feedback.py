"""Later feedback: added once, however often it is sent, and never into the trajectory."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from etude.core.types import Feedback, Group, Score, Trajectory
from etude.store.codec import Damaged
from etude.store.feedback import add_feedback, read_feedback
from etude.store.objects import Missing
from etude.store.runs import Run

MERGED = Feedback(kind="merged", value=1.0, time=20.0)
THUMB = Feedback(kind="thumb", value=-1.0, time=10.0, text="it broke the build")


@pytest.fixture
def run() -> Run:
    run = Run.open("memory:")
    attempts = tuple(
        Trajectory(
            id=f"g000001.{n}",
            task="t",
            group="g000001",
            segments=(),
            score=Score(1.0),
            status="done",
        )
        for n in range(2)
    )
    run.put_group(Group(id="g000001", task="t", slot=1, admitted=0, trajectories=attempts))
    return run


def test_feedback_is_kept_beside_its_trajectory(run: Run) -> None:
    before = run.objects.get("groups/g000001")
    assert read_feedback(run, "g000001.0") == []
    for _ in range(2):  # a sender without a reply sends it again
        add_feedback(run, "g000001.0", MERGED)
        add_feedback(run, "g000001.0", THUMB)
    assert read_feedback(run, "g000001.0") == [THUMB, MERGED]
    assert read_feedback(run, "g000001.1") == []
    assert run.objects.get("groups/g000001") == before


def test_many_writers_lose_nothing(run: Run) -> None:
    said = [Feedback(kind="thumb", value=1.0, time=float(n)) for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda feedback: add_feedback(run, "g000001.1", feedback), said))
    assert read_feedback(run, "g000001.1") == said


def test_feedback_needs_a_trajectory_and_a_number(run: Run) -> None:
    with pytest.raises(Missing, match="has no trajectory 'g000001.2'"):
        add_feedback(run, "g000001.2", MERGED)
    with pytest.raises(Missing, match="groups/g000002"):
        add_feedback(run, "g000002.0", MERGED)
    for wrong in ("g000001", "groups/g000001.0"):
        with pytest.raises(
            ValueError, match=f"'{wrong}' is not a trajectory id.* such as g000001.0"
        ):
            add_feedback(run, wrong, MERGED)
    with pytest.raises(ValueError, match="must be finite"):
        add_feedback(run, "g000001.0", Feedback(kind="thumb", value=math.nan, time=1.0))
    assert run.objects.list("feedback") == []


def test_a_flipped_bit_is_found(run: Run) -> None:
    add_feedback(run, "g000001.0", THUMB)
    (key,) = run.objects.list("feedback")
    run.objects.put(key, run.objects.get(key).replace(b"-1.0", b"-2.0"))
    with pytest.raises(Damaged, match=key):
        read_feedback(run, "g000001.0")
