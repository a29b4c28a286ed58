"""A whole lineage in one process, from files: text, sessions, preferences. If it is killed after
any checkpoint, it ends with the same bits."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from etude.core.config import RunConfig, parse
from etude.core.errors import EtudeError
from etude.core.events import Event, FitStep, StageDone
from etude.store.checkpoints import read
from etude.store.runs import Run
from etude.trainer.prepare import store_files
from etude.trainer.trainer import Trainer
from etude.weights.manifest import read_manifest
from tests.small_model import TEXTS, small_files
from tests.trainer.lives import live_briefly

TOML = """
name = "files"
[trainer]
checkpoint_every_s = 0
[[stage]]
kind = "midtrain"
steps = 4
batch_tokens = 96
seq_len = 32
heldout_frac = 0.3
heldout_every = 2
[[stage.sources]]
path = "HERE/text.jsonl"
weight = 2.0
[[stage.sources]]
path = "HERE/*.py"

[[stage]]
kind = "sft"
path = "HERE/sessions.jsonl"
max_epochs = 2
batch_tokens = 200

[[stage]]
kind = "dpo"
path = "HERE/pairs.jsonl"
epochs = 2
batch_pairs = 4
lr = 1e-3

[[stage]]
kind = "sft"
name = "polish"
path = "HERE/sessions.jsonl"
max_epochs = 1
lr = 1e-4
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def lines(name: str, records: list[object]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    asks = [{"role": "user", "content": f"edit {number}"} for number in range(12)]
    lines("text.jsonl", [{"text": f"{text} {number}"} for number, text in enumerate(TEXTS)])
    (tmp_path / "code.py").write_text(TEXTS[0])
    lines(
        "sessions.jsonl",
        [{"messages": [ask, {"role": "assistant", "content": "test"}]} for ask in asks],
    )
    lines(
        "pairs.jsonl", [{"prompt": [ask], "chosen": "submit", "rejected": "test"} for ask in asks]
    )
    return parse(TOML.replace("HERE", str(tmp_path)))


def new_run() -> Run:
    run = Run.open("memory:")
    store_files(run, small_files())
    return run


def digest(trainer: Trainer) -> str:
    state = sorted(trainer.learner.state().items())
    return hashlib.sha256(
        b"".join(t.to(torch.float32).numpy().tobytes() for _, t in state)
    ).hexdigest()


def test_the_lineage_from_files(config: RunConfig) -> None:
    events: list[Event] = []
    run = new_run()
    Trainer(run, config, emit=events.append).train()
    stages = [event.stage for event in events if isinstance(event, StageDone)]
    assert stages == ["midtrain", "sft", "dpo", "polish"]
    assert [read_manifest(run.objects, version).stage for version in range(1, 5)] == stages
    steps = [event for event in events if isinstance(event, FitStep)]
    assert [event.step for event in steps if "heldout" in event.metrics] == [2, 4]
    preferred = [event.metrics for event in steps if event.stage == "dpo"]
    assert preferred[0]["accuracy"] == 0.0 and preferred[-1]["accuracy"] > 0.5

    origins = read(run, run.checkpoints()[-1]).lineage
    parents = ("seed 0", "version 1", "version 2", "version 3")
    assert [(origin.stage, origin.parent) for origin in origins] == list(
        zip(stages, parents, strict=True)
    )
    assert origins[1].data == origins[3].data != origins[2].data


def test_killed_after_any_step_it_ends_with_the_same_bits(config: RunConfig) -> None:
    steps: list[Event] = []
    straight = Trainer(new_run(), config, emit=steps.append)
    straight.train()
    num_steps = sum(isinstance(event, FitStep) for event in steps)
    for kill in range(1, num_steps, 3):
        run = new_run()
        live_briefly(run, config, steps=kill)
        resumed = Trainer(run, config, emit=lambda event: None)
        resumed.train()
        assert digest(resumed) == digest(straight), f"killed after step {kill} of {num_steps}"


def test_data_that_changed_under_a_stopped_stage_is_named(
    config: RunConfig, tmp_path: Path
) -> None:
    run = new_run()
    live_briefly(run, config, steps=3)
    (tmp_path / "more.py").write_text("def more():\n    return 1\n")
    with pytest.raises(
        EtudeError, match="the data of stage midtrain has changed since it was stopped"
    ):
        Trainer(run, config, emit=lambda event: None).train()
