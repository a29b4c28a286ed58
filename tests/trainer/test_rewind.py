"""A step that begins with an older version: what was refused since leaves no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.types import Batch
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
