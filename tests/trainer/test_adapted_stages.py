"""Stages that train an adapter: publication, resumption, collection and export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from etude.cli import main
from etude.commands.serve import load, read_adapters
from etude.core.config import RunConfig, parse
from etude.core.errors import EtudeError
from etude.core.lineage import StageSpan
from etude.model.files import hf_state_dict, write_directory
from etude.model.lora import LoraConfig, merged, read_adapter
from etude.model.transformer import ModelConfig
from etude.store import checkpoints
from etude.store.runs import Run
from etude.trainer.prepare import adapter_config, check_training, store_files
from etude.trainer.trainer import Trainer
from etude.weights.collect import collect
from etude.weights.follow import Follower, fetch
from etude.weights.manifest import Chain, read_manifest
from tests.small_model import sharp, small_files
from tests.trainer.lives import batch, of_version_1

TOML = """
name = "adapted"
deterministic = true
engine = {regions = ["here"]}
[trainer]
checkpoint_every_s = 0
[trainer.lora]
rank = 4
alpha = 8
[[stage]]
kind = "rl"
name = "first"
steps = 1
max_lag = 0
lr = 1e-3
[[stage]]
kind = "rl"
steps = 3
max_lag = 0
lr = 1e-3
kl_coef = 0.1
"""


def open_run(tmp_path: Path, name: str, *settings: str, batches: int = 4) -> tuple[Run, RunConfig]:
    files, model = small_files(), tmp_path / "model"
    if not model.exists():
        shape = ModelConfig.from_json(files["config.json"])
        write_directory(model, files, hf_state_dict(sharp(shape, 0, 2.0)))
    config = parse(TOML, [f"model.path={model}", *settings])
    run = Run.open(f"file:{tmp_path / name}")
    assert config.trainer.lora is not None
    told = adapter_config(config.trainer.lora).to_json(str(model))
    store_files(run, files | {"adapter_config.json": told})
    run.put_config(config)
    for step in range(1, batches + 1):
        run.put_batch(batch(step))
    return run, config


def train(run: Run, config: RunConfig, until: int | None = None) -> Trainer:
    trainer = Trainer(run, config, emit=lambda event: None)
    if until is not None:
        finish = trainer.finish_step

        def stop(version: int, span: StageSpan) -> None:
            finish(version, span)
            if version == until:
                trainer.saver.wait()
                raise KeyboardInterrupt

        trainer.finish_step = stop  # type: ignore[method-assign]
    trainer.train()
    return trainer


def test_what_is_published_of_an_adapter_and_how_it_resumes(tmp_path: Path) -> None:
    """The first stage trains all weights, or none does."""
    run, config = open_run(tmp_path, "run", "trainer.lora.from_stage=rl")
    train(run, config)
    chain = Chain(run.objects)
    manifests = {version: read_manifest(run.objects, version) for version in range(5)}
    assert [m.adapter_of and m.adapter_of.version for m in manifests.values()] == [
        None, None, 1, 1, 1
    ]  # fmt: skip
    assert manifests[4].bytes < manifests[1].bytes / 4
    newest, base = fetch(run.objects, 4), fetch(run.objects, 1)
    assert all(torch.equal(newest[name], tensor) for name, tensor in base.items())
    assert any(newest[name].any() for name in newest.keys() - base.keys() if "lora_B" in name)
    follower = Follower(chain)
    assert all(follower.fetch(v).keys() == (newest if v > 1 else base).keys() for v in (3, 0, 4, 2))
    # killed in the middle, and resumed from the checkpoint, which has only the adapter
    other, _ = open_run(tmp_path, "other", "trainer.lora.from_stage=rl")
    with pytest.raises(KeyboardInterrupt):
        train(other, config, until=3)
    saved = checkpoints.read(other, other.checkpoints()[-1])
    whole = sum(t.numel() for t in base.values())
    assert len(checkpoints.read_part(other, saved, 0)) < 4 * 3 * whole / 2
    (tmp_path / "model").rename(tmp_path / "gone")
    train(other, config)
    again = fetch(other.objects, 4)
    assert again.keys() == newest.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in newest.items())


def test_a_run_of_an_adapter_from_the_start(tmp_path: Path) -> None:
    run, config = open_run(tmp_path, "run")
    train(run, config)
    given = fetch(run.objects, 0)
    newest = fetch(run.objects, 4)
    assert all(torch.equal(newest[name], tensor) for name, tensor in given.items())
    assert [read_manifest(run.objects, v).adapter_of is None for v in range(5)] == [
        True, False, False, False, False
    ]  # fmt: skip
    collected = collect(Chain(run.objects), keep=1, grace_s=0.0)
    collect(Chain(run.objects), keep=1, grace_s=0.0)
    assert fetch(run.objects, 4).keys() == newest.keys(), collected


@pytest.mark.parametrize("adapter", ["from_stage=first", "from_stage=rl"])
def test_a_stage_that_is_taken_back_whole_starts_anew(tmp_path: Path, adapter: str) -> None:
    """Version 2 is refused, and 3 is made from the last one of the previous stage: weights,
    optimizer, reference and lineage are those of a stage that has just begun."""
    settings = (f"trainer.lora.{adapter}", "stage.rl.warmup_steps=0")
    back = of_version_1(batch(3))
    refused, config = open_run(tmp_path, "refused", *settings, "stage.rl.steps=2", batches=2)
    refused.put_batch(back)
    plain, once = open_run(tmp_path, "plain", *settings, "stage.rl.steps=1", batches=1)
    plain.put_batch(replace(back, step=2, base=None))
    trainers = [train(refused, config), train(plain, once)]
    found, expected = fetch(refused.objects, 3), fetch(plain.objects, 2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not all(torch.equal(fetch(refused.objects, 2)[n], t) for n, t in expected.items())
    lineages = [[origin.stage for origin in trainer.lineage] for trainer in trainers]
    assert lineages == [["first", "rl"]] * 2


def test_an_adapter_is_exported_merged_and_alone(tmp_path: Path) -> None:
    run, config = open_run(tmp_path, "run")
    train(run, config)
    url, newest = str(tmp_path / "run"), fetch(run.objects, 4)
    assert main(["weights", "export", url, str(tmp_path / "merged")]) == 0
    assert main(["weights", "export", url, str(tmp_path / "alone"), "--adapter"]) == 0
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    lora = LoraConfig.from_json(run.model_files()["adapter_config.json"])
    loaded = load(str(tmp_path / "merged"), "float32", torch.device("cpu"))
    expected = merged(newest, lora)
    found = hf_state_dict(loaded.model)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(expected[n], newest[n]) for n in expected)
    alone = read_adapter(tmp_path / "alone")
    assert alone.config == lora
    assert all(torch.equal(tensor, newest[name]) for name, tensor in alone.tensors.items())
    said = json.loads((tmp_path / "alone" / "adapter_config.json").read_bytes())
    assert said["base_model_name_or_path"] == str(tmp_path / "model")
    assert main(
        ["weights", "export", url, str(tmp_path / "no"), "--adapter", "--version", "0"]
    ) == 2  # fmt: skip
    served = load(url, "float32", torch.device("cpu"))
    assert served.is_merged and served.version == 4
    of_run, of_directory = read_adapters([f"a={url}", f"b={tmp_path / 'alone'}"]).values()
    assert of_run.tensors.keys() == of_directory.tensors.keys()
    with pytest.raises(EtudeError, match="each name only once"):
        read_adapters([f"a={url}", f"a={url}"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["trainer.lora.from_stage=sft"], "is not one of the stages: first, rl"),
        (["trainer.optimizer=muon"], "only works with adamw"),
        (["stage.rl.router_balance=true"], "router_balance"),
        (["trainer.lora.rank=0"], "rank"),
        (["trainer.lora.target=x"], "did you mean targets"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: list[str], said: str) -> None:
    with pytest.raises(EtudeError, match=said):
        parse(TOML, ["model.path=x", *settings])
    with pytest.raises(EtudeError, match="would adapt untrained weights"):
        parse(TOML)


def test_targets_that_the_model_lacks_are_refused_before_any_stage(tmp_path: Path) -> None:
    _, config = open_run(tmp_path, "run", 'trainer.lora.targets=["q_proj", "w1"]')
    with pytest.raises(EtudeError, match="named w1; adaptable layers: "):
        check_training(config, resumed=False)
