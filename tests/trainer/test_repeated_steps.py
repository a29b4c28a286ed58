"""A trainer that dies has published more than its newest checkpoint holds: the next life repeats
these steps from their batches."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

import pytest
import torch

from etude.core.config import RunConfig, parse
from etude.core.events import Event, StageStarted, StepDone
from etude.run.audit import audit
from etude.store.runs import Run
from etude.trainer.prepare import store_files
from etude.trainer.trainer import Trainer
from etude.weights.follow import fetch
from etude.weights.manifest import read_manifest
from tests.small_model import small_files
from tests.trainer.lives import COMMON, batch, fingerprint, live_briefly, prepared, spawn

RARELY = "trainer.checkpoint_every_s=1e9"
STEPS = 6


def config(*overrides: str) -> RunConfig:
    text = COMMON + f'[[stage]]\nkind = "rl"\nsteps = {STEPS}\nmax_lag = 0\nwarmup_steps = 0\n'
    return parse(text, [RARELY, *overrides])


def new_run() -> Run:
    run = Run.open("memory:")
    store_files(run, small_files())
    run.put_config(config())
    for step in range(1, STEPS + 1):
        run.put_batch(batch(step))
    return run


def train(run: Run, told: RunConfig) -> list[Event]:
    events: list[Event] = []
    Trainer(run, told, emit=events.append).train()
    return events


def weights(run: Run, version: int) -> str:
    tensors = fetch(run.objects, version)
    bits = (tensors[name].contiguous().view(torch.uint8) for name in sorted(tensors))
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in bits)).hexdigest()


def test_a_step_is_published_without_its_checkpoint_and_the_last_one_has_one() -> None:
    run = new_run()
    train(run, config())
    assert run.checkpoints() == ["000000.000000", f"{STEPS:06d}.000000"]
    assert [read_manifest(run.objects, version).step for version in range(STEPS + 1)] == [
        *range(STEPS + 1)
    ]


def test_repeated_steps_are_reported_once_and_end_with_the_same_bits() -> None:
    straight, stopped = new_run(), new_run()
    train(straight, config())
    live_briefly(stopped, config(), steps=4)
    assert stopped.checkpoints() == ["000000.000000"]
    published = [read_manifest(stopped.objects, version) for version in range(5)]
    events = train(stopped, config())
    started = [event for event in events if isinstance(event, StageStarted)]
    assert [(event.done, event.repeated) for event in started] == [(3, 4)]
    done = [event.step for event in events if isinstance(event, StepDone)]
    assert done == [4, 5, 6], "the report of the last published step may have been lost"
    assert [read_manifest(stopped.objects, version) for version in range(5)] == published
    assert fingerprint(stopped) == fingerprint(straight)


def test_published_versions_stay_where_repeated_steps_have_other_bits() -> None:
    """As on a device or with other threads; so that it shows, here by another learning rate."""
    run = new_run()
    live_briefly(run, config("deterministic=false"), steps=4)
    before = [weights(run, version) for version in range(5)]
    train(run, config("deterministic=false", "stage.rl.lr=0.01"))
    assert [weights(run, version) for version in range(5)] == before
    parent = read_manifest(run.objects, 5).parent
    assert parent is not None and parent.version == 4
    assert len({weights(run, version) for version in range(STEPS + 1)}) == STEPS + 1


def test_a_life_that_begins_with_the_newest_version_repeats_nothing() -> None:
    run = new_run()
    often = config("trainer.checkpoint_every_s=0")
    live_briefly(run, often, steps=4)
    (started,) = [event for event in train(run, often) if isinstance(event, StageStarted)]
    assert (started.done, started.repeated) == (4, 0)


def test_the_audit_asks_for_the_batches_to_repeat() -> None:
    run = new_run()
    live_briefly(run, config(), steps=4)
    assert not any("to repeat" in problem for problem in audit(run).violations)
    run.objects.delete("batches/000003")
    (problem,) = [problem for problem in audit(run).violations if "to repeat" in problem]
    assert "version 4 is published, but the newest checkpoint is of version 0" in problem
    assert "no batch of step 3" in problem


@pytest.mark.parametrize("kind", ["rl", "distill"])
def test_a_killed_loop_repeats_its_steps_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    straight, killed = prepared(tmp_path / "straight", kind), prepared(tmp_path / "killed", kind)
    assert spawn(straight, apart=True) == 0
    rarely = killed.config().trainer.model_copy(update={"checkpoint_every_s": 1e9})
    killed.put_config(killed.config().model_copy(update={"trainer": rarely}))
    for step in (3, 10, 19):
        assert spawn(killed, step, "told") == -signal.SIGKILL
        assert killed.checkpoints() == ["000000.000000"]
    assert spawn(killed) == 0
    assert fingerprint(killed) == fingerprint(straight)
