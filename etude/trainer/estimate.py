"""A rough estimate of the time, disk and memory of a run, from the shape of its model and a matrix
product on this machine. Sessions are assumed to have half of the allowed length, and at most half
of their tokens to be the model's; the user's own tools and tests are not counted."""

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
from etude.engine.runner import kv_bytes
from etude.engine.select import select_device
from etude.model.config import ModelConfig
from etude.model.files import hf_tensors
from etude.model.transformer import Transformer
from etude.tasks import sources
from etude.train.flops import BACKWARD_COST, forward_flops, peak_flops
from etude.train.head import MAX_LOGITS
from etude.train.learner import MICROBATCH_TOKENS
from etude.trainer.prepare import model_shape
from etude.trainer.state import computed_in

TRAINING, SAMPLING = 0.45, 0.1
"""Efficiency relative to a large product; prompts are read as efficiently as training reads."""
CHARACTERS = 4
"""Characters of a token, in the user's own files."""
STATE_BYTES = 12
"""Bytes of a weight in a checkpoint: the master and the optimizer's state."""
CHECKPOINTS = 3  # two that are kept, and one being written
GRADIENT_BYTES = 4
"""The sum of microbatches; in bf16 the gradient of a single one takes half of it."""
COPY_BYTES = 4
"""Bytes of a weight, in addition to the copy of the state, while a version is stored: its new
value, and the previous one."""
LOGITS_BYTES = 12
"""Bytes of a logit: the logit, its log-prob and its gradient."""
PROCESS_BYTES = 500_000_000
DELTA = 0.02
"""Share of all weights in a version that is stored as a delta."""
TOKEN_BYTES = 16
"""Bytes of a stored token: id, log-prob and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    parameters: int
    model_context: int
    """Tokens that the model can read; a run may use fewer."""
    seconds: dict[str, float]
    """Stage -> its computing time, and that of all evaluations."""
    disk_bytes: int
    memory_bytes: int
    """Memory of the trainer, all ranks together."""
    activation_bytes: int
    """The part of it that a pass takes; a smaller `microbatch_tokens` reduces it."""
    memory_free: int


def activation_bytes(config: RunConfig, shape: ModelConfig, device: torch.device) -> int:
    """Memory of one forward and backward pass of the longest microbatch, on one rank: activations
    that the layers keep for the backward pass, and the logits of a chunk with their gradient."""
    asked = [getattr(stage, "microbatch_tokens", None) for stage in config.stage]
    most = max(tokens or MICROBATCH_TOKENS[device.type] for tokens in asked)
    context = min(config.model.max_context, shape.max_position_embeddings)
    tokens = context if config.deterministic else max(most, context)
    experts = shape.experts
    inner = shape.intermediate_size
    if experts is not None:
        met = experts.num_experts_per_tok + experts.n_shared_experts
        inner = met * experts.moe_intermediate_size + experts.shared_expert_intermediate_size
    attended = shape.num_attention_heads * shape.head_dim
    layer = 8 * shape.hidden_size + 4 * attended + 4 * inner
    layers = shape.num_hidden_layers
    kept = layers * layer
    if config.trainer.gradient_checkpointing:
        kept = layers * shape.hidden_size + layer
    width = computed_in(config.trainer, device).itemsize
    logits = min(tokens * shape.vocab_size, MAX_LOGITS[device.type])
    return tokens * kept * width // config.trainer.context_parallel + logits * LOGITS_BYTES


def size_of_model(config: RunConfig) -> ModelSize:
    """Size of the run's initial model, in bf16."""
    shape = model_shape(config)
    with torch.device("meta"):
        parameters = sum(tensor.numel() for tensor in hf_tensors(Transformer(shape)).values())
    return ModelSize(
        parameters=parameters,
        # the products of a token, without attention to earlier ones
        active=forward_flops(shape, 1, 1) / 2,
        kv_bytes=kv_bytes(shape, 2, fp8=config.kv_cache_dtype == "fp8"),
        activation_bytes=activation_bytes(config, shape, torch.device("cuda")),
    )


def estimate(config: RunConfig, tasks: Mapping[str, int]) -> Estimate:
    """Estimate a run. `tasks`: the number of tasks in each split."""
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
    evaluations = len(config.stage) + config.evaluates_start
    evaluated = sum(tasks.get(split, 0) for split in EVAL_SPLITS) * evaluations
    seconds["evaluations"] = sampling(evaluated)
    weights = parameters * (4 if config.trainer.published_dtype == "float32" else 2)
    disk_bytes = parameters * STATE_BYTES * CHECKPOINTS
    disk_bytes += weights + int(weights * DELTA * versions)
    disk_bytes += (sessions + evaluated) * length * TOKEN_BYTES
    held, passing, free = _memory(config, shape, parameters)
    return Estimate(
        parameters=parameters,
        model_context=shape.max_position_embeddings,
        seconds=seconds,
        disk_bytes=disk_bytes,
        memory_bytes=held + passing,
        activation_bytes=passing,
        memory_free=free,
    )


def _memory(config: RunConfig, shape: ModelConfig, parameters: int) -> tuple[int, int, int]:
    """Memory of all ranks of the trainer: their state, the activations of a pass, and the free
    memory."""
    device = select_device(config.trainer.device)
    computed = computed_in(config.trainer, device)
    held = parameters * (GRADIENT_BYTES + STATE_BYTES)
    if computed == torch.float32 or config.trainer.published_dtype == "float32":
        held += parameters * computed.itemsize  # otherwise a parameter is half of its master
    if device.type == "cpu":
        held += parameters * (STATE_BYTES + COPY_BYTES) + PROCESS_BYTES * config.trainer.ranks
    passing = activation_bytes(config, shape, device) * config.trainer.ranks
    return held, passing, _memory_free(device)


def _memory_free(device: torch.device) -> int:
    """Free memory of the machine, or of all of its devices."""
    if device.type == "cuda":
        count = torch.cuda.device_count()
        return sum(torch.cuda.mem_get_info(number)[0] for number in range(count))
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _rate(config: RunConfig) -> float:
    device = select_device(config.trainer.device)
    torch.set_num_threads(max(stage.threads for stage in config.stage))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return peak_flops(device, dtype, size=512, tries=3) * config.trainer.ranks


def _tokens(pattern: str) -> float:
    files: Iterable[Path] = sources.files(pattern)
    return sum(path.stat().st_size for path in files) / CHARACTERS
