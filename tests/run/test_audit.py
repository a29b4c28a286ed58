"""The audit finds defects: each test breaks one promise in the store of a run that was in order."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest
import torch
from rich.console import Console

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.events import EVENTS, StageStarted, StepDone, StepPassedOver
from etude.core.ledger import Batched, Dropped, Issued
from etude.core.sampling import VersionSpan
from etude.core.types import Batch
from etude.launch.screen import watch
from etude.run.audit import _check_batches, audit, evaluated_versions, is_finished, lag_bounds
from etude.run.evaluate import report_name
from etude.store.objects import Objects
from etude.store.rollouts import RolloutLog
from etude.store.runs import Run
from etude.weights.publish import publish
from etude.weights.records import manifest_key
from tests.run.fake_stage import FIRST, stage

LAST = FIRST + 4
CONFIG = f"""
name = "books"
[[stage]]
kind = "midtrain"
steps = 1
[[stage]]
kind = "sft"
demonstrations = 1
[[stage]]
kind = "rl"
steps = {LAST - FIRST}
groups_per_step = 2
group_size = 3
max_lag = 1
"""


@pytest.fixture
async def run() -> Run:
    objects = Objects.open("memory:")
    run = Run(objects)
    run.put_config(parse(CONFIG))
    await stage(objects, seed=1, last=LAST, max_lag=1)
    run.put_checkpoint(f"{LAST:06d}.000000", b"")
    publish(objects, LAST, {"w": torch.zeros(1)}, stage="rl", step=LAST)
    for version in (1, FIRST, LAST):
        for split in ("heldout", "novel"):
            run.put_eval(report_name(version, split), {})
    return run


def test_what_a_run_was_given_is_evaluated_too(run: Run) -> None:
    fresh, given = parse(CONFIG), parse(CONFIG, ["model.path=base"])
    assert evaluated_versions(fresh) == [1, FIRST, LAST]
    assert evaluated_versions(given) == [0, 1, FIRST, LAST]
    again = parse(CONFIG, ["model.path=base", "eval.before=false"])
    assert evaluated_versions(again) == [1, FIRST, LAST]
    assert is_finished(run, fresh) and not is_finished(run, given)
    for split in ("heldout", "novel"):
        run.put_eval(report_name(0, split), {})
    assert is_finished(run, given)


async def test_a_run_in_order(run: Run) -> None:
    books = audit(run)
    assert books.violations == [] and books.finished
    assert " = " in books.equation and books.in_flight == 0 and books.batches == 4
    lags = [run.batch(step).lag for step in run.batches()]
    assert books.lag_max == max(lags) == books.lag_bound == 1


async def test_a_run_that_was_stopped_before_its_last_evaluation_is_in_order(run: Run) -> None:
    run.objects.delete(f"evals/{report_name(LAST, 'novel')}.json")
    leave_one_open(run)
    books = audit(run)
    assert books.violations == [] and not books.finished and books.in_flight == 1


async def test_a_version_that_the_controller_has_not_seen_does_not_end_a_run(run: Run) -> None:
    segments = run.objects.list("ledger")
    told = [key for key in segments if b"Trained" in run.objects.get(key)]
    for key in segments[segments.index(told[-1]) :]:
        run.objects.delete(key)
    assert not audit(run).finished


async def test_a_run_with_open_samples_is_not_at_its_end(run: Run) -> None:
    """Its controller was killed between the last step and the drop of the open samples; no later
    evaluation would cause a restart."""
    assert is_finished(run, run.config())
    leave_one_open(run)
    assert not is_finished(run, run.config())


async def test_what_was_alarming_is_told_and_breaks_nothing(run: Run) -> None:
    assert audit(run).alarms == []
    log = run.events("trainer", EVENTS)
    figures = {
        "loss": 0.0,
        "k1": 0.0,
        "k3_p99": 0.0,
        "entropy": 1.0,
        "grad_norm": 1.0,
        "seconds": 1.0,
        "wait_s": 0.0,
    }
    log.append(StepDone(step=4, lag=0, k3_mean=0.5, tokens=9, **figures))
    log.flush()
    (alarm,) = audit(run).alarms
    assert alarm.name == "k3" and audit(run).violations == []


async def test_damaged_events_are_told_and_the_others_count(run: Run) -> None:
    log = run.events("trainer", EVENTS)
    for n in range(3):
        log.append(StageStarted(stage="rl", steps=4, done=n))
        log.flush()
    key = "events/trainer/0000000001.jsonl"
    run.objects.put(key, run.objects.get(key).replace(b'"done": 1', b'"done": 3'))
    (alarm,) = audit(run).alarms
    assert (
        key in str(alarm)
        and str(alarm).endswith("its events are left out")
        and audit(run).violations == []
    )
    console = Console(record=True, width=400)
    watching = asyncio.create_task(watch(run, console, title="", lag_bound=0))
    while "left out" not in (told := console.export_text(clear=False)):
        await asyncio.sleep(0)
    watching.cancel()
    assert key in told


async def test_events_that_are_lost_are_told(run: Run) -> None:
    log = run.events("trainer", EVENTS)
    for step in (1, 2, 3):
        log.append(StepPassedOver(step=step))
        log.flush()
    run.objects.delete("events/trainer/0000000001.jsonl")
    (alarm,) = audit(run).alarms
    assert "events/trainer/0000000001.jsonl is missing, but later segments exist" in alarm.what


@pytest.mark.parametrize("place", [0, 3])
async def test_a_ledger_with_a_gap_is_not_read_as_if_it_ended_there(run: Run, place: int) -> None:
    """Resuming from it would interrupt samples that are finished, and write into the gap."""
    run.put_config(run.config())
    key = run.objects.list("ledger")[place]
    run.objects.delete(key)
    for reads in (audit, lambda run: run.put_config(run.config())):
        with pytest.raises(
            EtudeError, match=f"{key} is missing, but later segments exist: restore it"
        ):
            reads(run)


async def test_a_run_that_was_killed_before_its_last_rows_is_in_order(run: Run) -> None:
    run.objects.delete(f"evals/{report_name(LAST, 'novel')}.json")
    files = run.objects.list("rollouts")
    run.objects.delete(files[-1])
    assert audit(run).violations == []
    for key in files[-3:-1]:
        run.objects.delete(key)
    (violation,) = audit(run).violations
    assert "settled samples have no row" in violation


def lose_a_batch(run: Run) -> None:
    run.objects.delete("batches/000004")


def age_a_token(run: Run) -> None:
    batch = run.batch(LAST)
    old = dataclasses.replace(batch.rows[0], versions=(VersionSpan(1, 2),))
    _replace(run, dataclasses.replace(batch, rows=(old, *batch.rows[1:])))


def hide_the_age(run: Run) -> None:
    batch = run.batch(LAST)
    _replace(run, dataclasses.replace(batch, oldest=batch.oldest + 1))


def swap_a_sample(run: Run) -> None:
    batch = run.batch(LAST)
    _replace(run, dataclasses.replace(batch, rows=batch.rows[1:]))


def forget_a_group(run: Run) -> None:
    run.objects.delete(f"groups/{run.batch(LAST).rows[0].sample.rpartition('.')[0]}")


def leave_one_open(run: Run) -> None:
    run.ledger.append(Issued(group="g999999", task="t0", samples=("g999999.0",), version=LAST))


def settle_twice(run: Run) -> None:
    run.ledger.append(Dropped(samples=(run.batch(LAST).rows[0].sample,), reason="failed"))


def publish_too_much(run: Run) -> None:
    publish(run.objects, LAST + 1, {"w": torch.ones(1)}, stage="rl", step=LAST + 1)


def slip_in_a_group(run: Run) -> None:
    group = run.group(run.batch(LAST).rows[0].sample.rpartition(".")[0])
    attempts = tuple(
        dataclasses.replace(t, id=f"g999998.{n}", group="g999998")
        for n, t in enumerate(group.trajectories)
    )
    run.put_group(dataclasses.replace(group, id="g999998", trajectories=attempts))


def age_a_group(run: Run) -> None:
    group = run.group(run.batch(LAST).rows[0].sample.rpartition(".")[0])
    run.objects.delete(f"groups/{group.id}")
    run.put_group(dataclasses.replace(group, admitted=LAST + 1))


def interrupt_what_is_finished(run: Run) -> None:
    finished = run.batch(LAST).rows[0].sample
    run.ledger.append(Dropped(samples=(finished,), reason="interrupted"))


def lose_the_checkpoint(run: Run) -> None:
    run.delete_checkpoint(f"{LAST:06d}.000000")


def unpublish(run: Run) -> None:
    run.objects.delete(manifest_key(1, LAST))


def lose_the_rows(run: Run) -> None:
    for key in run.objects.list("rollouts"):
        run.objects.delete(key)


def repeat_a_row(run: Run) -> None:
    log = RolloutLog(run.objects)
    log.append(log.rows()[:1])


def invent_a_row(run: Run) -> None:
    log = RolloutLog(run.objects)
    log.append([dataclasses.replace(log.rows()[0], id="g999999.0")])


def contradict_the_ledger(run: Run) -> None:
    log = RolloutLog(run.objects)
    rows = [dataclasses.replace(row, step=None, dropped="failed") for row in log.rows()]
    lose_the_rows(run)
    RolloutLog(run.objects).append(rows)


def _replace(run: Run, batch: object) -> None:
    run.objects.delete(f"batches/{LAST:06d}")
    run.put_batch(batch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lose_a_batch, "the ledger has batch 4, but the store does not"),
        (age_a_token, "its lag is not between 0 and 1"),
        (hide_the_age, "says that its oldest token is from version"),
        (swap_a_sample, "has other samples than its ledger entry"),
        (forget_a_group, "which is in no stored group"),
        (leave_one_open, "the run is finished, but 1 samples are in flight"),
        (settle_twice, "cannot become 'failed'"),
        (publish_too_much, f"version {LAST + 1} is published, but the last stage ends with {LAST}"),
        (interrupt_what_is_finished, "was dropped as interrupted, but its group was finished"),
        (slip_in_a_group, "3 stored samples were never issued, for example g999998.0"),
        (age_a_group, "has a token that is older than its admission"),
        (lose_the_checkpoint, "the newest checkpoint is of version -1"),
        (unpublish, "but the newest published version is -1"),
        (lose_the_rows, "settled samples have no row, for example g000"),
        (repeat_a_row, " has 2 rows"),
        (invent_a_row, "g999999.0 has a row, but was never issued"),
        (contradict_the_ledger, " says 'failed', but the ledger 3"),
    ],
)
async def test_each_broken_promise_is_found(
    run: Run, damage: Callable[[Run], None], finding: str
) -> None:
    damage(run)
    assert any(finding in violation for violation in audit(run).violations), audit(run).violations


def test_every_loop_of_a_lineage_has_its_own_bound() -> None:
    more = (
        '[[stage]]\nkind = "sft"\nname = "again"\ndemonstrations = 1\n[[stage]]\nkind = '
        '"distill"\nsteps = 2\n'
    )
    bounds = lag_bounds(parse(CONFIG + more + 'teacher = "t"\nmax_lag = 3\n'))
    assert bounds == {3: 1, 4: 1, 5: 1, 6: 1, 8: 3, 9: 3}


def test_a_batch_that_nobody_is_left_of_breaks_no_promise() -> None:
    empty = Batch(step=1, rows=(), oldest=0)
    gone = Batched(step=1, samples=(f"{'a' * 32}.{1000:013d}-{'b' * 32}",))
    assert list(_check_batches([gone], {1: empty}, {}, {1: 0})) == []
