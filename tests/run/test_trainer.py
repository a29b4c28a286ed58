"""The trainer as a lineage: where it starts, and what it says of the versions that it makes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.model.files import weights, write_directory
from etude.model.transformer import ModelConfig, fresh
from etude.run import trainer as trainer_module
from etude.run.prepare import store_files
from etude.run.trainer import Trainer
from etude.store.runs import Run
from etude.train.learner import FitStats
from etude.train.ranks import Ranks
from etude.train.stages import Progress
from etude.weights.manifest import read_manifest
from etude.weights.records import manifest_key
from tests.small_model import small_files

TOML = """
name = "lineage"
[[stage]]
kind = "midtrain"
steps = 3
batch_tokens = 64
row_tokens = 32
[[stage]]
kind = "rl"
steps = 1
"""


def test_the_model_directory_is_needed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.run.documents.NUM_BUILT_IN", 8)
    files, directory = small_files(), tmp_path / "model"
    write_directory(directory, files, weights(fresh(ModelConfig.from_json(files["config.json"]), 1)))
    whole = parse(TOML, [f"model.path={directory}"])
    config = whole.model_copy(update={"stage": whole.stage[:1]})
    run = Run.open("memory:")
    store_files(run, files)
    Trainer(run, config, emit=lambda event: None).train()
    manifest = read_manifest(run.objects, 1)
    assert (manifest.stage, manifest.step) == ("midtrain", 3)

    (directory / "model.safetensors").unlink()
    run.objects.delete(manifest_key(1, 1))  # as if it had died before it published
    resumed = Trainer(run, config, emit=lambda event: None)
    again = read_manifest(run.objects, 1)
    assert resumed.version == 1 and (again.root, again.stage, again.step) == (manifest.root, "midtrain", 3)
    empty = Run.open("memory:")
    store_files(empty, files)
    with pytest.raises(EtudeError, match="model.safetensors missing there"):
        Trainer(empty, config, emit=lambda event: None)


class Second(Ranks):
    """A rank among others, of which the first has spoken last."""

    def __init__(self, heard: float) -> None:
        super().__init__(rank=1)
        self.heard = heard

    def sum(self, *values: float) -> list[float]:
        return [self.heard + value for value in values]


@pytest.mark.parametrize("due", [True, False])
def test_the_first_rank_decides_when_a_checkpoint_is_due(due: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks differ: two ranks that asked their own would now and then save after different steps."""
    run, files = Run.open("memory:"), small_files()
    store_files(run, files)
    trainer = Trainer(run, parse(TOML), emit=lambda event: None)
    saved: list[int] = []
    monkeypatch.setattr(trainer, "save", lambda: saved.append(trainer.step))
    monkeypatch.setattr(trainer_module, "CHECKPOINT_S", math.inf if due else -1.0)
    trainer.ranks = Second(float(due))
    fit = FitStats(loss=1.0, grad_norm=1.0, lr=0.1, num_tokens=1, figures={})
    trainer.follow_fit()(Progress(step=3, total=9, fit=fit))
    assert saved == ([3] if due else [])


def test_a_device_without_enough_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(trainer: Trainer) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(Trainer, "train", too_much)
    run = Run.open("memory:")
    store_files(run, small_files())
    with pytest.raises(
        EtudeError, match=r"too little memory at the start \(CUDA out of memory\): go on with less of microbatch_tokens"
    ):
        trainer_module.train(run, parse(TOML), Ranks(), torch.device("cpu"))
