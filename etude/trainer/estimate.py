"""A rough estimate of what a run takes, from the shape of its model and a product on this machine.
Sessions are taken to be half as long as they may be, and at most half of one to be the model's
words; tools and tests of the user's own are not counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from etude.core.config import RunConfig
from etude.core.lineage import stage_spans
from etude.core.placement import ModelSize
from etude.core.stages import DpoConfig, MidtrainConfig, RolloutStageConfig, SftConfig
from etude.core.types import EVAL_SPLITS
from etude.engine.select import select_device
from etude.model.files import hf_tensors
from etude.model.transformer import Transformer
from etude.tasks import sources
from etude.train.flops import BACKWARD_COST, forward_flops, peak_flops
from etude.trainer.prepare import model_shape

TRAINING, SAMPLING = 0.45, 0.1
"""Share of the arithmetic of a large product that is reached; prompts are read like what is trained
on."""
CHARACTERS = 4
"""Of a token, in files of the user's own."""
STATE_BYTES = 12
"""Of a weight in a checkpoint: the master and the optimizer's state."""
CHECKPOINTS = 3  # two that are kept, and the one that is being written
DELTA = 0.02
"""Of all weights, in a version that is stored as a difference."""
TOKEN_BYTES = 16
"""Of a stored token: id, log-prob and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    parameters: int
    model_context: int
    """Tokens that the model can read; a run may use fewer."""
    seconds: dict[str, float]
    """Stage -> its computing time, and that of all evaluations."""
    disk_bytes: int


def size_of_model(config: RunConfig) -> ModelSize:
    """Of the model that the run starts from, in bf16."""
    shape = model_shape(config)
    with torch.device("meta"):
        parameters = sum(tensor.numel() for tensor in hf_tensors(Transformer(shape)).values())
    rows, width = shape.cached_heads
    copies = 1 if shape.latent else 2  # keys and values, or the vector that both are made from
    return ModelSize(
        parameters=parameters,
        # a token's products, without its looks back
        active=forward_flops(shape, 1, 1) / 2,
        kv_bytes=2 * copies * rows * width * shape.num_hidden_layers,
    )


def estimate(config: RunConfig, tasks: Mapping[str, int]) -> Estimate:
    """`tasks`: how many there are of each split."""
    shape = model_shape(config)
    with torch.device("meta"):
        parameters = sum(tensor.numel() for tensor in hf_tensors(Transformer(shape)).values())
    rate = _rate(config)
    context = min(config.model.max_context, shape.max_position_embeddings)
    sampled = config.harness.max_turns * config.harness.max_tokens // 2
    length = min(context, 2 * sampled) // 2
    sampled = min(sampled, length // 2)

    def training(length: int, count: float) -> float:
        flops = (1 + BACKWARD_COST) * forward_flops(shape, length, length)
        return count * flops / (rate * TRAINING)

    def sampling(count: float) -> float:
        share = sampled / length
        flops = forward_flops(shape, length, sampled)
        return count * flops / rate * (share / SAMPLING + (1 - share) / TRAINING)

    seconds: dict[str, float] = {}
    sessions, versions = 0, 0
    for stage in config.stage:
        match stage:
            case MidtrainConfig():
                row = min(stage.seq_len, context)
                seconds[stage.name] = training(row, stage.steps * stage.batch_tokens / row)
            case SftConfig():
                own = _tokens(stage.path) if stage.path else 0.0
                count = (stage.demonstrations + own / length) * stage.max_epochs / 2
                seconds[stage.name] = training(length, count)
            case DpoConfig():
                count = _tokens(stage.path) / length * stage.epochs
                seconds[stage.name] = training(length, count) * (1 + 1 / (1 + BACKWARD_COST))
            case RolloutStageConfig():
                count = stage.steps * stage.groups_per_step * stage.group_size
                seconds[stage.name] = training(length, count) + sampling(count)
                sessions += count
    versions = stage_spans(config.stage)[-1].end
    evaluations = len(config.stage) + (config.model.path is not None)  # a given model's first
    evaluated = sum(tasks.get(split, 0) for split in EVAL_SPLITS) * evaluations
    seconds["evaluations"] = sampling(evaluated)
    weights = parameters * (4 if config.trainer.published_dtype == "float32" else 2)
    disk_bytes = parameters * STATE_BYTES * CHECKPOINTS
    disk_bytes += weights + int(weights * DELTA * versions)
    disk_bytes += (sessions + evaluated) * length * TOKEN_BYTES
    return Estimate(
        parameters=parameters,
        model_context=shape.max_position_embeddings,
        seconds=seconds,
        disk_bytes=disk_bytes,
    )


def _rate(config: RunConfig) -> float:
    device = select_device(config.trainer.device)
    torch.set_num_threads(max(stage.threads for stage in config.stage))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return peak_flops(device, dtype, size=512, tries=3) * config.trainer.ranks


def _tokens(pattern: str) -> float:
    files: Iterable[Path] = sources.files(pattern)
    return sum(path.stat().st_size for path in files) / CHARACTERS
