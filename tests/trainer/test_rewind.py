"""A step that begins with an older version: refused versions leave no trace."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.events import Event, StepDone, StepPassedOver
from etude.core.lineage import stage_spans
from etude.core.types import Batch
from etude.core.updates import Forgotten, UpdateRecord
from etude.store.realtime import UpdateLog, create_update, forget_user
from etude.store.runs import Run
from etude.train.distributed import World
from etude.trainer.prepare import store_files
from etude.trainer.trainer import Trainer
from etude.weights.manifest import read_manifest
from tests.small_model import small_files
from tests.train.together import together
from tests.trainer.lives import batch, of_version_1

TOML = """
name = "rewind"
deterministic = true
engine = {regions = ["here"]}
trainer = {checkpoint_every_s = 0}
[[stage]]
kind = "rl"
steps = STEPS
max_lag = 0
warmup_steps = 0
"""


def run_with(*batches: Batch, steps: int) -> Run:
    run = Run.open("memory:")
    store_files(run, small_files())
    for number, made in enumerate(batches, start=1):
        run.put_batch(replace(made, step=number))
    train(run, steps)
    return run


def train(run: Run, steps: int) -> None:
    config = parse(TOML.replace("STEPS", str(steps)))
    Trainer(run, config, emit=lambda event: None).train()


def test_what_was_refused_is_not_built_on() -> None:
    """Versions 2 and 3 are refused; 4 is made from 1, as if they had never existed."""
    back = of_version_1(batch(4))
    refused = run_with(batch(1), batch(2), of_version_1(batch(3)), back, steps=4)
    plain = run_with(batch(1), replace(back, base=None), steps=2)
    assert read_manifest(refused.objects, 4).root == read_manifest(plain.objects, 2).root
    assert read_manifest(refused.objects, 2).root != read_manifest(plain.objects, 2).root
    parent = read_manifest(refused.objects, 4).parent
    assert parent is not None and parent.version == 3, "a delta from what workers have"
    assert "000001.000000" in refused.checkpoints(), "its base stays, however old"


USER = "a" * 32
REALTIME = """
[realtime]
production = "production.toml"
"""


def test_users_may_go_back_to_the_version_before_the_live_one() -> None:
    """Version 2 went live, 3 and 4 were made from it and refused; then 2 is withdrawn."""
    of_version_2 = replace(batch(4), oldest=1, base=2)
    batches = (batch(1), batch(2), batch(3), of_version_2, of_version_1(batch(5)))
    run = Run.open("memory:")
    store_files(run, small_files())
    for made in batches:
        run.put_batch(made)
        config = parse(TOML.replace("STEPS", str(made.step)) + REALTIME)
        Trainer(run, config, emit=lambda event: None).train()
    plain = run_with(batch(1), replace(of_version_1(batch(5)), base=None), steps=2)
    assert read_manifest(run.objects, 5).root == read_manifest(plain.objects, 2).root


def test_a_batch_of_deleted_users_is_passed_over() -> None:
    run, told = Run.open("memory:"), list[Event]()
    store_files(run, small_files())
    empty = replace(batch(2), rows=())
    for made in (batch(1), empty, batch(3)):
        run.put_batch(made)
    Trainer(run, parse(TOML.replace("STEPS", "3") + REALTIME), emit=told.append).train()
    roots = [read_manifest(run.objects, version).root for version in (1, 2, 3)]
    assert roots[0] == roots[1] != roots[2]
    assert [e.step for e in told if isinstance(e, StepPassedOver)] == [2]
    assert [e.step for e in told if isinstance(e, StepDone)] == [1, 3]


def test_updates_are_in_the_order_of_their_steps() -> None:
    run = Run.open("memory:")
    for step in (1_000_000, 2, 999_999):
        create_update(run, UpdateRecord(step=step, base=step - 1, time=0.0, answers=()))
    assert [*UpdateLog(run).records()] == [2, 999_999, 1_000_000]


def test_nothing_of_a_user_who_is_deleted_during_a_step_stays() -> None:
    """The trainer's values for each token nearly reveal the user's text."""
    run = Run.open("memory:")
    store_files(run, small_files())
    user, other = USER, "b" * 32
    for step in (1, 2):
        first, *rest = batch(step).rows
        owner = user if step == 1 else other
        rows = (replace(first, sample=f"{owner}.{0:013d}-{'c' * 32}"), *rest)
        run.put_batch(replace(batch(step), rows=rows))
        create_update(run, UpdateRecord(step=step, base=step - 1, time=0.0, answers=()))

    def emit(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 1:
            forget_user(run, Forgotten(user=user, time=1.0, steps=(1,)))

    Trainer(run, parse(TOML.replace("STEPS", "2") + REALTIME), emit).train()
    assert run.objects.list("recomputed") == ["recomputed/000002"]
    forget_user(run, Forgotten(user=other, time=1.0, steps=(2,)))
    assert run.objects.list("recomputed") == []


def read_by_rank(world: World, store: str) -> tuple[list[str], str]:
    """The samples that a rank learns from, and the description of the batch in its lineage. A user
    is deleted after the first rank has read the batch, and before the second reads it for the first
    time."""

    class Deleting(Run):
        is_deleted = False

        def wait_batch(self, step: int) -> tuple[Batch, bytes]:
            if world.rank == 1 and not self.is_deleted:
                while not self.objects.exists("read by rank 0"):
                    time.sleep(0.01)
                forget_user(self, Forgotten(user=USER, time=1.0, steps=(1,)))
                self.is_deleted = True
            found = super().wait_batch(step)
            self.objects.put(f"read by rank {world.rank}", b"")
            return found

    config = parse(TOML.replace("STEPS", "1") + REALTIME)
    (span,) = stage_spans(config.stage)
    trainer = Trainer(Deleting.open(store), config, lambda event: None, world)
    trainer.enter_stage(span)
    batch = trainer.read_batch(1, span)
    return [row.sample for row in batch.rows], trainer.lineage[-1].data


def test_all_ranks_learn_from_the_same_rows_although_a_user_is_deleted(tmp_path: Path) -> None:
    store = f"file:{tmp_path}"
    run, made = Run.open(store), batch(1)
    store_files(run, small_files())
    first, *rest = made.rows
    run.put_batch(replace(made, rows=(replace(first, sample=f"{USER}.x"), *rest)))
    create_update(run, UpdateRecord(step=1, base=0, time=0.0, answers=()))
    one, two = together(2, read_by_rank, store)
    assert one == two and one[0] == [row.sample for row in rest]


def test_a_trainer_that_is_started_again_goes_back_too() -> None:
    run = run_with(batch(1), batch(2), steps=2)
    back = of_version_1(batch(3))
    run.put_batch(back)
    train(run, 3)
    plain = run_with(batch(1), replace(back, base=None), steps=2)
    assert read_manifest(run.objects, 3).root == read_manifest(plain.objects, 2).root


def test_a_base_that_is_gone_is_named() -> None:
    run = run_with(batch(1), batch(2), batch(3), steps=3)
    run.put_batch(of_version_1(batch(4)))
    with pytest.raises(EtudeError, match="starts from version 1, but checkpoints"):
        train(run, 4)
