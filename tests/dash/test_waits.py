"""Reasons for which unfinished rollouts wait, from entries and events written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.cli import main
from etude.core.events import EvalDone, GroupDone, Launched, RunDone
from etude.core.ledger import Batched, Dropped, Issued, Trained
from etude.dash.waits import STOPPED_S, Waits, summed_up
from etude.store.runs import Run
from tests.dash.recorded_store import attempt, write_run


def issued(group: str) -> Issued:
    return Issued(group=group, task="t", samples=(f"{group}.0", f"{group}.1"), version=0)


def test_every_reason_in_turn() -> None:
    waits = Waits()

    def reasons(now: float) -> dict[str, str]:
        return {each.id: each.waits_for for each in waits.waiting(now)}

    waits.enter(10.0, issued("a"))
    waits.apply(10.0, Launched(resumed=False))
    assert set(reasons(11.0).values()) == {"its own session, which is still running"}
    waits.apply(12.0, attempt("a.0"))
    assert reasons(13.0)["a.0"] == "other attempts of its group, which are still running"
    waits.apply(14.0, attempt("a.1"))
    waits.apply(
        15.0,
        GroupDone(group="a", task="t", admitted=0, rewards=(1, 0), failed=0, kept=True, seconds=1),
    )
    assert set(reasons(16.0).values()) == {"a batch: enough finished groups with signal"}
    assert [each.seconds for each in waits.waiting(18.0)] == [3.0, 3.0]
    waits.enter(20.0, Batched(step=7, samples=("a.0", "a.1")))
    assert summed_up(waits.waiting(23.0)) == [("the trainer, for step 7", 2, 3.0)]
    waits.enter(30.0, Trained(step=7))
    assert waits.waiting(31.0) == []


def test_finished_groups_wait_for_an_older_one_unless_they_may_overtake_it() -> None:
    waits = Waits()
    for group in "abcd":
        waits.enter(1.0, issued(group))
    waits.apply(2.0, Launched(resumed=False))
    for sample in ("a.0", "a.1", "b.0", "c.0", "c.1", "d.0", "d.1"):
        waits.apply(2.0, attempt(sample))

    def reasons(reorder_window: int) -> list[str]:
        told = {each.id: each.waits_for for each in waits.waiting(3.0, reorder_window)}
        return [told[f"{group}.0"] for group in "acd"]

    behind = "the older group b, which is still running (reorder_window)"
    batch = "a batch: enough finished groups with signal"
    assert reasons(1) == [batch, behind, behind]
    assert reasons(2) == [batch, batch, behind]
    assert reasons(3) == [batch, batch, batch]


def test_what_is_dropped_waits_no_more() -> None:
    waits = Waits()
    waits.enter(1.0, issued("a"))
    waits.enter(2.0, Dropped(samples=("a.0",), reason="failed"))
    assert [each.id for each in waits.waiting(3.0)] == ["a.1"]


def test_sessions_of_users_wait_for_their_users_however_long() -> None:
    """Real-time RL may write no events for hours between two updates."""
    waits, user = Waits(), "0" * 32
    session = f"{user}.1794930978127-{user}"
    waits.enter(1.0, Issued(group=user, task="", samples=(session,), version=0))
    waits.apply(1.0, Launched(resumed=False))
    late = 3600.0
    assert waits.advice(late) is None
    (found,) = waits.waiting(late)
    assert found.waits_for.startswith("feedback from its user")
    waits.enter(late, Batched(step=1, samples=(session,)))
    (found,) = waits.waiting(late)
    assert found.waits_for == "the trainer, for step 1"


def test_a_run_that_has_stopped_says_so() -> None:
    waits = Waits()
    waits.enter(1.0, issued("a"))
    waits.apply(1.0, Launched(resumed=False))
    assert waits.advice(1.0 + STOPPED_S) is None
    late = 2.0 + STOPPED_S
    assert "no events for 1:01" in (waits.advice(late) or "")
    again = "the run to resume, which issues its task again"
    assert [each.waits_for for each in waits.waiting(late)] == [again, again]
    for sample in ("a.0", "a.1"):
        waits.apply(1.0, attempt(sample))
    assert {each.waits_for for each in waits.waiting(late)} == {"the run to resume"}
    waits.apply(1.0, RunDone(version=3))
    assert waits.advice(late) is None
    result = EvalDone(stage="rl", split="heldout", version=3, solved=1, total=2, low=0.1, high=0.9)
    waits.apply(1.0, Launched(resumed=True))
    assert waits.advice(late) is not None
    waits.apply(1.0, result)
    assert waits.finished and waits.advice(late) is None, "`etude eval` after its end"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Run.open(f"file:{tmp_path}/x"))
    assert main(["doctor", f"{tmp_path}/x"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("alarm: step 2: k3 is 0.5")
    assert any(line.startswith("1 wait for other attempts of its group") for line in lines)
    assert any(line.startswith("1 wait for a batch: enough") for line in lines)
    assert main(["doctor", f"{tmp_path}/x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 3
    assert main(["doctor", f"{tmp_path}/none"]) == 2


def test_a_step_settles_its_own_batch_and_those_before() -> None:
    waits = Waits()
    for step, group in enumerate("abc", start=7):
        waits.enter(1.0, issued(group))
        waits.enter(2.0, Batched(step=step, samples=(f"{group}.0",)))
    waits.enter(3.0, Trained(step=8))
    left = {each.id: each.waits_for for each in waits.waiting(3.0)}
    assert left.keys() == {"a.1", "b.1", "c.0", "c.1"}, "one that is in no batch is not trained"
    assert left["c.0"] == "the trainer, for step 9"
    waits.enter(4.0, Batched(step=8, samples=("a.1",)))
    waits.enter(5.0, Trained(step=7))
    assert "a.1" not in {each.id for each in waits.waiting(5.0)}, "step 8 was trained before"
