"""A step that begins with an older version: what was refused since leaves no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.events import Event, StepDone, StepPassedOver
from etude.core.types import Batch
from etude.core.updates import Forgotten, UpdateRecord
from etude.store.realtime import create_update, forget_user
from etude.store.runs import Run
from etude.trainer.prepare import store_files
from etude.trainer.trainer import Trainer
from etude.weights.manifest import read_manifest
from tests.small_model import small_files
from tests.trainer.lives import batch, of_version_1

TOML = """
name = "rewind"
deterministic = true
engine = {regions = ["here"]}
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
    """Versions 2 and 3 are refused; 4 is made from 1, as if they had never been."""
    back = of_version_1(batch(4))
    refused = run_with(batch(1), batch(2), of_version_1(batch(3)), back, steps=4)
    plain = run_with(batch(1), replace(back, base=None), steps=2)
    assert read_manifest(refused.objects, 4).root == read_manifest(plain.objects, 2).root
    assert read_manifest(refused.objects, 2).root != read_manifest(plain.objects, 2).root
    parent = read_manifest(refused.objects, 4).parent
    assert parent is not None and parent.version == 3, "a delta from what workers have"
    assert "000001.000000" in refused.checkpoints(), "its base stays, however old"


REALTIME = """
[realtime]
production = "production.toml"
"""


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


def test_nothing_of_a_user_who_is_deleted_during_a_step_stays() -> None:
    """What the trainer found for each token is nearly what the user said."""
    run = Run.open("memory:")
    store_files(run, small_files())
    user, other = "a" * 32, "b" * 32
    for step in (1, 2):
        first, *rest = batch(step).rows
        owner = user if step == 1 else other
        rows = (replace(first, sample=f"{owner}.{0:013d}-{'c' * 32}"), *rest)
        run.put_batch(replace(batch(step), rows=rows))
        create_update(run, UpdateRecord(step=step, base=step - 1, time=0.0, answers=()))

    def emit(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 1:
            forget_user(run, Forgotten(user=user, time=1.0, steps=(1,)), [1])

    Trainer(run, parse(TOML.replace("STEPS", "2") + REALTIME), emit).train()
    assert run.objects.list("recomputed") == ["recomputed/000002"]
    forget_user(run, Forgotten(user=other, time=1.0, steps=(2,)), [2])
    assert run.objects.list("recomputed") == []


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
    with pytest.raises(EtudeError, match="begins with version 1, and there is no checkpoints"):
        train(run, 4)
