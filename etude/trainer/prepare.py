"""Preparation of a new run: put the small files of its model (shape, vocabulary, chat template)
into the store.

`config.json` is written last, so the model is either complete or absent.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.lora_config import LoraConfig as LoraTable
from etude.core.stages import (
    BUILT_IN,
    LOSSES,
    DistillConfig,
    DpoConfig,
    MidtrainConfig,
    RlConfig,
    RopeScalingConfig,
    SftConfig,
)
from etude.core.types import Json
from etude.model.config import ModelConfig
from etude.model.config_json import rope_kind, stated_rope
from etude.model.quantization import without_quantization
from etude.run.plugins import check_file, import_from
from etude.serve import heartbeat
from etude.store.runs import Run
from etude.tasks import sources

if TYPE_CHECKING:
    from etude.model.lora import LoraConfig


def is_prepared(run: Run) -> bool:
    """True if the model's files are in the store; config.json is written last. Raises EtudeError if
    others are lost."""
    from etude.model.directory import MODEL_FILES

    if not run.objects.exists("model/config.json"):
        return False
    for name in MODEL_FILES:
        if not run.objects.exists(f"model/{name}"):
            raise EtudeError(
                f"{run.objects.url}: model/{name} is missing: restore it from a backup"
            )
    return True


def model_directory(path: str, key: str = "model.path") -> Path:
    """Check a model directory. `key`: the config key that names it."""
    from etude.model.directory import MODEL_FILES, missing_files, read_model_files

    directory = Path(path)
    missing = missing_files(directory)
    if not missing:
        missing = [name for name in MODEL_FILES if name not in read_model_files(directory)]
    if missing:
        otherwise = (
            ", or remove model.path to start from fresh weights" if key == "model.path" else ""
        )
        raise EtudeError(
            f"{key} = {path!r} is not a complete model: {', '.join(missing)} missing; give a "
            f"Hugging Face directory{otherwise}"
        )
    return directory


def check_stage_files(config: RunConfig) -> None:
    """Check the files that all stages need, so that a missing file of the last stage does not cost
    the stages before it."""
    check_file(config.tasks.environment, "tasks.environment")
    check_file(config.harness.agent, "harness.agent")
    for stage in config.stage:
        if isinstance(stage, RlConfig):
            check_file(stage.loss, f"stage.{stage.name}.loss")
        if isinstance(stage, DistillConfig):
            model_directory(stage.teacher, f"stage.{stage.name}.teacher")
        if isinstance(stage, SftConfig | DpoConfig) and stage.path is not None:
            for path in sources.files(stage.path):
                next(sources.records(path), None)  # the rest is read when the stage begins
        if isinstance(stage, MidtrainConfig):
            for source in stage.sources:
                if source.path != BUILT_IN:
                    sources.files(source.path)
            if stage.heldout_path is not None:
                sources.files(stage.heldout_path)


def check_training(config: RunConfig, *, resumed: bool) -> None:
    """Check everything that trainer and workers would check at their start: devices, model, custom
    losses, teachers. `resumed`: the weights are in a checkpoint, and the model's directory may be
    gone."""
    ranks = config.trainer.ranks
    if "cuda" in {config.engine.device, config.trainer.device} or (
        config.trainer.device == "auto" and ranks > 1
    ):
        from etude.engine.select import check_ranks, select_device

        select_device(config.engine.device)
        check_ranks(select_device(config.trainer.device), ranks)
    if not resumed:
        shape = model_shape(config)
        _check_parallel(config, shape)
        if config.trainer.lora is not None:
            _check_adapter(config.trainer.lora, shape)
    import_from(config.folder)
    for stage in config.stage:
        if isinstance(stage, RlConfig) and stage.loss not in LOSSES:
            from etude.trainer.step import objective_of

            objective_of(stage)
        if isinstance(stage, DistillConfig):
            _check_teacher(stage, config)


def _check_parallel(config: RunConfig, shape: ModelConfig) -> None:
    """Check that ranks can divide rows and experts as configured."""
    trainer, invariant = config.trainer, config.batch_invariant
    if trainer.context_parallel > 1:
        from etude.train.context_parallel import check_context_parallel

        check_context_parallel(shape, invariant=invariant)
    if trainer.expert_parallel > 1:
        from etude.train.expert_parallel import check_expert_parallel

        check_expert_parallel(
            shape, ranks=trainer.ranks, size=trainer.expert_parallel, invariant=invariant
        )


def _check_adapter(lora: LoraTable, shape: ModelConfig) -> None:
    """Check the adapter before the first stage, since the stage that trains it may be the last."""
    import torch

    from etude.model.lora import check_targets
    from etude.model.transformer import Transformer

    with torch.device("meta"):
        check_targets(Transformer(shape), lora.targets)


def model_shape(config: RunConfig) -> ModelConfig:
    """The shape of the run's initial model, with its full context; checks its files."""
    path, shape = config.model.path, config.model
    if path is None:
        return ModelConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=shape.max_context,
        )
    from etude.model.directory import check_weights
    from etude.model.tokenizer import ChatTokenizer

    files = pretrained_files(path, _stretch_of(config))
    try:
        ChatTokenizer(files)
        check_weights(Path(path))
        return ModelConfig.from_json(files["config.json"])
    except (EtudeError, ValueError) as e:
        raise EtudeError(f"model.path = {path!r}: {e}") from e


def _check_teacher(stage: DistillConfig, config: RunConfig) -> None:
    from etude.model.directory import read_model_files
    from etude.model.tokenizer import same_vocabulary

    path = config.model.path
    if path is not None and not same_vocabulary(
        read_model_files(Path(stage.teacher))["tokenizer.json"],
        read_model_files(Path(path))["tokenizer.json"],
    ):
        raise EtudeError(
            f"stage.{stage.name}.teacher = {stage.teacher!r} has a different vocabulary from "
            f"the student in {path}: use a teacher of the same family"
        )


def pretrained_files(path: str, stretch: RopeScalingConfig | None = None) -> dict[str, bytes]:
    """The files of a model directory, its context stretched if the run asks for it."""
    from etude.model.directory import read_model_files

    directory = model_directory(path)
    files = read_model_files(directory)
    try:
        shape = json.loads(without_quantization(files["config.json"]))
        own = int(shape["max_position_embeddings"])
        if stretch is not None:
            _stretch(shape, stretch, own)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise EtudeError(
            f"{directory / 'config.json'} does not describe a model ({type(e).__name__}: {e}): "
            f"download it again, or set another model.path"
        ) from e
    return files | {"config.json": json.dumps(shape, indent=2).encode()}


def _stretch(shape: dict[str, Json], stretch: RopeScalingConfig, own: int) -> None:
    rope = stated_rope(shape)
    key = "rope_parameters" if rope and not shape.get("rope_scaling") else "rope_scaling"
    if rope_kind(rope) != "default":
        raise EtudeError(
            f"rope_scaling: the model of model.path already has a scaling ({rope}): remove the key"
        )
    told = {
        "rope_type": stretch.type,
        "factor": stretch.factor,
        "original_max_position_embeddings": own,
    }
    shape[key] = {name: value for name, value in rope.items() if name != "type"} | told
    shape["max_position_embeddings"] = int(own * stretch.factor)


def _stretch_of(config: RunConfig) -> RopeScalingConfig | None:
    first = config.stage[0]
    return first.rope_scaling if isinstance(first, MidtrainConfig) else None


def scratch_files(config: RunConfig) -> dict[str, bytes]:
    from etude.model.from_scratch import tokenizer_files
    from etude.model.tokenizer import ChatTokenizer
    from etude.trainer import data

    files = tokenizer_files(data.vocabulary_texts(config), config.model.vocab_size)
    model = replace(model_shape(config), vocab_size=ChatTokenizer(files).vocab_size)
    return files | {"config.json": model.to_json().encode()}


def model_files(config: RunConfig) -> dict[str, bytes]:
    path, lora = config.model.path, config.trainer.lora
    files = scratch_files(config) if path is None else pretrained_files(path, _stretch_of(config))
    if lora is None:
        return files
    from etude.model.lora import CONFIG_FILE

    return files | {CONFIG_FILE: adapter_config(lora).to_json(path or "")}


def adapter_config(lora: LoraTable) -> LoraConfig:
    from etude.model.lora import LoraConfig

    return LoraConfig(rank=lora.rank, alpha=lora.alpha, targets=tuple(sorted(lora.targets)))


def store_files(run: Run, files: Mapping[str, bytes]) -> None:
    for name in sorted(files, key=lambda name: name == "config.json"):
        run.put_model_file(name, files[name])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="etude.trainer.prepare", description="Write a run's model files to its store."
    )
    parser.add_argument("--store", required=True, help="the run's store")
    args = parser.parse_args()
    heartbeat.send_heartbeats_from_thread()
    try:
        run = Run.open(args.store, create=False)
        config = run.config()
        store_files(run, model_files(config))
    except EtudeError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
