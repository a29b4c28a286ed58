"""The loop against fakes: it ends, it balances, its data is never too old, and it survives the loss
of its store at any write. Seeds are part of the test ids, so one command repeats a failing test."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from etude.core.advantage import ADVANTAGE, AdvantageEstimator, GroupOutcome
from etude.core.curriculum import AskedTask, Curriculum
from etude.core.errors import EtudeError
from etude.core.ledger import Dropped, Entry, Issued, Ledger
from etude.core.sampling import SamplingParams, SamplingSpan, VersionSpan
from etude.core.types import Group, Manifest, Score, Segment, Trajectory
from etude.run import journal
from etude.run.loop import FailureMonitor, SignalMonitor, assemble_batch
from etude.run.process import error_message
from etude.store.objects import Objects
from etude.store.rollouts import RolloutLog
from etude.store.runs import Run
from tests.run.fake_stage import FIRST, TASKS, Versions, manifest, stage

LAST = FIRST + 6


def check_finished(objects: Objects, *, max_lag: int) -> Ledger:
    run = Run(objects)
    ledger = Ledger(run.ledger.records())
    assert run.batches() == list(range(FIRST + 1, LAST + 1))
    batches = [run.batch(step) for step in run.batches()]
    assert max(batch.lag for batch in batches) <= max_lag
    assert all(batch.lag == batch.step - 1 - batch.oldest >= 0 for batch in batches)
    assert ledger.in_flight == 0
    assert ledger.trained == sum(len({row.sample for row in batch.rows}) for batch in batches)
    assert all(len({journal.group_of(row.sample) for row in batch.rows}) == 2 for batch in batches)
    rows = RolloutLog(objects).rows()
    stored = [t.id for name in run.groups() for t in run.group(name).trajectories]
    assert sorted(row.id for row in rows) == sorted(stored), "one row for every rollout"
    assert all(ledger.fate(row.id) == (row.step or row.dropped) for row in rows)
    return ledger


@pytest.mark.parametrize(("max_lag", "reorder_window"), [(0, 1), (1, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("seed", range(4))
async def test_a_run_ends_and_balances(seed: int, max_lag: int, reorder_window: int) -> None:
    objects = Objects.open("memory:")
    await stage(objects, seed=seed, last=LAST, max_lag=max_lag, reorder_window=reorder_window)
    ledger = check_finished(objects, max_lag=max_lag)
    assert ledger.dropped["interrupted"] == 0


@pytest.mark.parametrize("writes", range(0, 60, 3))
async def test_a_store_that_dies_at_any_write_loses_nothing_that_was_finished(writes: int) -> None:
    objects = Objects.open("memory:")
    survivors: Counter[str] = Counter()
    for life, budget in enumerate([writes, writes // 2 + 3, None]):
        try:
            await stage(
                objects,
                seed=writes * 3 + life,
                last=LAST,
                max_lag=2,
                reorder_window=2,
                writes=budget,
            )
        except* EtudeError as e:
            assert "the store is gone" in (error_message(e) or "")
        survivors.update(Run(objects).groups())
    check_finished(objects, max_lag=2)
    entries = Run(objects).ledger.records()
    interrupted = {
        journal.group_of(sample)
        for entry in entries
        if isinstance(entry, Dropped) and entry.reason == "interrupted"
        for sample in entry.samples
    }
    assert not interrupted & survivors.keys(), "a finished group was thrown away"


async def test_rows_that_are_lost_are_written_again() -> None:
    objects = Objects.open("memory:")
    await stage(objects, seed=3, last=LAST, max_lag=1)
    assert len(objects.list("rollouts")) <= LAST - FIRST + 1, "one for each batch, and the end"
    before = RolloutLog(objects).rows()
    assert {row.stage for row in before} == {"rl"}
    assert {row.object for row in before} == {f"groups/{name}" for name in Run(objects).groups()}
    for key in objects.list("rollouts"):
        objects.delete(key)
    await stage(objects, seed=3, last=LAST, max_lag=1)
    again = RolloutLog(objects).rows()
    assert sorted(again, key=lambda row: row.id) == sorted(before, key=lambda row: row.id)
    files = objects.list("rollouts")
    await stage(objects, seed=3, last=LAST, max_lag=1)
    assert objects.list("rollouts") == files, "and what is there is not written again"


async def test_what_the_curriculum_knows_follows_from_rows_as_from_groups() -> None:
    objects, estimator = Objects.open("memory:"), AdvantageEstimator(max_tokens=3, max_lag=1)
    await stage(objects, seed=4, last=LAST, max_lag=1)
    _, from_rows = journal.load(Run(objects), estimator)
    for key in objects.list("rollouts"):
        objects.delete(key)
    _, from_groups = journal.load(Run(objects), estimator)
    assert from_rows.past == from_groups.past
    assert {True, False} == {asked.kept for asked in from_rows.past}
    assert {0, 1} <= {asked.epoch for asked in from_rows.past}


async def test_an_interrupted_task_is_issued_again_with_the_same_seeds() -> None:
    whole, broken = Objects.open("memory:"), Objects.open("memory:")
    first = await stage(whole, seed=5, last=LAST, max_lag=0, failures=0.0)
    with pytest.raises(ExceptionGroup):
        await stage(broken, seed=5, last=LAST, max_lag=0, writes=2, failures=0.0)
    second = await stage(broken, seed=6, last=LAST, max_lag=0, failures=0.0)
    assert set(first.seeds[:6]) == set(second.seeds[:6])
    issued = [entry.task for entry in Run(broken).ledger.records() if isinstance(entry, Issued)]
    curriculum = Curriculum(
        dict.fromkeys((t.id for t in TASKS), ""), seed=1, fresh_frac=0.5, max_lag=0
    )
    order = [curriculum.choose(FIRST)[0] for _ in range(2)]
    assert issued[:4] == order * 2


async def test_what_a_later_stage_publishes_is_not_loaded_in_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stage after the loop may be done before the loop's last version was seen; the evaluation
    still needs that version."""
    wait = Versions.wait

    async def ahead(self: Versions, after: int) -> Manifest:
        newest = (await wait(self, after)).version
        return manifest(newest + 2 if newest == FIRST + 3 else newest)

    monkeypatch.setattr(Versions, "wait", ahead)
    objects = Objects.open("memory:")
    engine = await stage(objects, seed=1, last=FIRST + 3, max_lag=1)
    assert engine.version == FIRST + 3
    assert Ledger(Run(objects).ledger.records()).trained_step == FIRST + 3


async def test_half_of_the_sessions_failing_stops_the_run_with_the_newest_error() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await stage(Objects.open("memory:"), seed=0, last=LAST, max_lag=1, failures=0.9)
    assert "sessions failed, most recently with: agent: gone" in (error_message(caught.value) or "")


def with_segment(trajectory: Trajectory, **changes: Any) -> Trajectory:
    return replace(trajectory, segments=(replace(trajectory.segments[0], **changes),))


BAD: dict[str, tuple[str, Callable[[Trajectory], Trajectory]]] = {
    "reward that is no number": ("malformed", lambda t: replace(t, score=Score(math.nan))),
    "over-long row": ("malformed", lambda t: with_segment(t, prompt=(1, 1))),
    "unknown version": ("malformed", lambda t: with_segment(t, versions=(VersionSpan(99, 2),))),
    "version from before admission": (
        "malformed",
        lambda t: with_segment(t, versions=(VersionSpan(0, 2),)),
    ),
    "token without a version": (
        "malformed",
        lambda t: with_segment(t, versions=t.segments[0].versions[:1][:0]),
    ),
    "log-prob that is no number": (
        "malformed",
        lambda t: with_segment(t, logprobs=(math.nan, -1.0)),
    ),
    "fields of different length": ("malformed", lambda t: with_segment(t, mask=(True,))),
    "mask without a sampled token": (
        "failed",
        lambda t: with_segment(t, mask=(False, False), versions=()),
    ),
    "tokens drawn with top_p": (
        "sampling (top_p)",
        lambda t: with_segment(t, sampling=(SamplingSpan(SamplingParams(top_p=0.9), 2),)),
    ),
    "sampling parameters of too few tokens": (
        "malformed",
        lambda t: with_segment(t, sampling=(SamplingSpan(SamplingParams(), 1),)),
    ),
    "suspected of a trick": (
        "quarantined (bytecode)",
        lambda t: replace(t, score=Score(1.0, flags=("odd", "cheat:bytecode"))),
    ),
    "segment without a sampled token": (
        "malformed",
        lambda t: replace(
            t, segments=(*t.segments, replace(t.segments[0], mask=(False, False), versions=()))
        ),
    ),
}


@pytest.mark.parametrize("kind", BAD)
async def test_bad_data_is_dropped_by_name_and_never_trained_on(kind: str) -> None:
    """Every third attempt is bad; the run goes on without them, and its books balance."""
    reason, spoil = BAD[kind]
    objects, spoilt = Objects.open("memory:"), set()

    def sometimes(trajectory: Trajectory) -> Trajectory:
        if not trajectory.id.endswith(".1"):
            return trajectory
        spoilt.add(trajectory.id)
        return spoil(trajectory)

    await stage(objects, seed=3, last=LAST, max_lag=1, failures=0.0, solves=0.5, spoil=sometimes)
    ledger = check_finished(objects, max_lag=1)
    run = Run(objects)
    entries = [entry for entry in run.ledger.records() if isinstance(entry, Dropped)]
    fates = {sample: entry.label for entry in entries for sample in entry.samples}
    settled = {sample for sample in spoilt if fates.get(sample) not in ("cancelled", "interrupted")}
    assert len(settled) >= 6 and all(fates.get(sample) == reason for sample in settled)
    assert not spoilt & {row.sample for step in run.batches() for row in run.batch(step).rows}
    assert ledger.dropped[reason] == len(settled)


async def test_what_jumps_is_set_aside_and_never_trained_on() -> None:
    class Jumps:
        def look(self, asked: AskedTask) -> str | None:
            return "from 0 to 1" if asked.task == "t3" else None

        def learn(self, asked: AskedTask) -> None: ...

    objects, jumps = Objects.open("memory:"), Jumps()
    await stage(
        objects, seed=3, last=LAST, max_lag=1, failures=0.0, solves=0.5,
        jumps=jumps,  # type: ignore[arg-type]
    )  # fmt: skip
    ledger, run = check_finished(objects, max_lag=1), Run(objects)
    whole = [run.group(name) for name in run.groups()]
    earned = {
        t.id: t.score for g in whole if g.task == "t3" for t in g.trajectories if t.reward > 0
    }
    assert earned and all("cheat:reward_jump" in score.flags for score in earned.values() if score)
    assert not earned.keys() & {s.sample for n in run.batches() for s in run.batch(n).rows}
    assert not any(ledger.fate(sample) in (None, "zero_signal") for sample in earned)
    others = [t for g in whole if g.task != "t3" for t in g.trajectories]
    assert not any(t.score and t.score.flags for t in others)


async def test_groups_of_which_every_attempt_fails_are_dropped_and_the_run_says_why() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await stage(Objects.open("memory:"), seed=0, last=LAST, max_lag=1, failures=1.0)
    assert "sessions failed" in (error_message(caught.value) or "")


def test_the_advantages_of_a_batch_get_one_scale() -> None:
    def group(slot: int, *rewards: float) -> Group:
        segment = Segment(
            prompt=(1,), tokens=(2,), mask=(True,), logprobs=(-1.0,), versions=(VersionSpan(0, 1),)
        )
        attempts = [
            Trajectory(
                id=f"{slot}.{n}",
                task="t",
                group="g",
                segments=(segment,),
                score=Score(r),
                status="done",
            )
            for n, r in enumerate(rewards)
        ]
        return Group(id=str(slot), task="t", slot=slot, admitted=0, trajectories=tuple(attempts))

    batch, samples = assemble_batch(
        1, [group(1, 0.5, 0.0), group(0, 1.0, 0.0, 0.5)], ADVANTAGE["reinforce_plus_plus_baseline"]
    )
    assert samples == ("0.0", "0.1", "1.0", "1.1"), (
        "by slot, and without the attempt that stood at the mean"
    )
    assert batch.reward == pytest.approx(0.4), "over all attempts"
    size = ((0.25 + 0.25 + 0.0625 + 0.0625) / 4) ** 0.5
    assert [row.advantages[1] for row in batch.rows] == pytest.approx(
        [0.5 / size, -0.5 / size, 0.25 / size, -0.25 / size]
    )


def test_health_counts_only_the_recent_past() -> None:
    health = FailureMonitor(recent=4, limit=0.5)
    bad = Trajectory(
        id="a",
        task="t",
        group="g",
        segments=(),
        score=None,
        status="failed",
        error="world: no disk",
    )
    good = Trajectory(id="a", task="t", group="g", segments=(), score=Score(0.0), status="done")
    for trajectory in (bad, good, good, good, bad, good):
        health.add(trajectory)
    with pytest.raises(EtudeError, match="2 of the last 4 .* world: no disk"):
        health.add(bad)


async def test_failures_while_a_process_is_silent_do_not_end_the_run() -> None:
    """The screen shows their cause, which will pass."""
    objects = Objects.open("memory:")
    with pytest.raises(ExceptionGroup) as caught:
        await stage(objects, seed=0, last=LAST, max_lag=1, failures=0.7)
    assert "sessions failed" in (error_message(caught.value) or "")
    await stage(objects, seed=0, last=LAST, max_lag=1, failures=0.7, troubled=time.monotonic)
    assert Run(objects).batches()[-1] == LAST


@pytest.mark.parametrize(
    ("solves", "told"), [(0.0, "all 0: the tasks are too hard"), (1.0, "all 1: the tasks are so")]
)
async def test_a_run_that_can_learn_nothing_stops_and_says_so(solves: float, told: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await stage(
            Objects.open("memory:"), seed=0, last=LAST, max_lag=1, failures=0.0, solves=solves
        )
    said = error_message(caught.value) or ""
    assert said.startswith("100 groups in a row have nothing to learn from") and told in said


def test_a_group_with_signal_starts_the_count_again() -> None:
    signal = SignalMonitor(groups_per_step=10)
    group = Group(id="g", task="t", slot=0, admitted=0, trajectories=())
    for _ in range(2):
        for _ in range(199):
            signal.add(group, GroupOutcome(advantages={}))
        signal.add(group, GroupOutcome(advantages={"g.0": 1.0}))
    with pytest.raises(EtudeError, match="200 groups in a row"):
        for _ in range(200):
            signal.add(group, GroupOutcome(advantages={}))
    one = Trajectory(id="g.0", task="t", group="g", segments=(), score=Score(1.0), status="done")
    caught = GroupOutcome(advantages={}, quarantined={"g.0": "bytecode"})
    with pytest.raises(EtudeError, match="suspected of bytecode: review them in etude dash"):
        signal.add(replace(group, trajectories=(one,)), caught)
    with pytest.raises(EtudeError, match="all attempts at a task earn the same reward"):
        signal.add(replace(group, trajectories=(one, replace(one, id="g.1"))), caught)


def test_a_run_that_had_learnt_and_then_earns_nothing_is_told_so() -> None:
    signal = SignalMonitor(groups_per_step=1)
    one = Trajectory(id="g.0", task="t", group="g", segments=(), score=Score(0.0), status="done")
    group = Group(id="g", task="t", slot=0, admitted=0, trajectories=(one,))
    signal.add(group, GroupOutcome(advantages={"g.0": 1.0}))
    with pytest.raises(
        EtudeError, match=r"\(all 0: either the tasks have become harder or the policy has"
    ):
        for _ in range(100):
            signal.add(group, GroupOutcome(advantages={}))


def test_recovery_settles_what_a_crash_left_open() -> None:
    entries: list[Entry] = [
        Issued(group="g000000", task="t0", samples=("g000000.0", "g000000.1"), version=2)
    ]
    recovered = journal.recover(entries, {}, {}, AdvantageEstimator())
    assert recovered.entries == [Dropped(samples=("g000000.0", "g000000.1"), reason="interrupted")]
    assert (recovered.slots, recovered.batched, recovered.past, recovered.waiting) == (
        1,
        0,
        [],
        [],
    )
