"""Selection of the device, the runner and the size of the KV cache for a model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from etude.core.errors import EtudeError
from etude.engine import native
from etude.engine.adapters import AdapterLimits
from etude.engine.batch import ModelRunner
from etude.engine.batch_invariant import BatchInvariantTorchRunner
from etude.engine.blocks import num_windowed_blocks
from etude.engine.runner import (
    BLOCK_SIZE,
    TorchRunner,
    block_size,
    kv_bytes,
    state_bytes,
    windowed_bytes,
)
from etude.model.layers import ADAPTER_KINDS
from etude.model.transformer import Transformer

MAX_PLAIN_BLOCK_SIZE = 64
"""The largest block size of the runners, for models without recurrent layers: windows are counted
in these blocks, which suffices for smaller ones."""
WINDOWED_SHARE = 0.25
"""Share of the KV cache's tokens, beyond the running windows, that layers with a window have room
for."""
KV_MEMORY_FRACTION = 0.7
"""The share of the free device memory that the KV cache takes; the rest is for graphs and
activations."""


def select_device(asked: str) -> torch.device:
    """The device for a config value: cpu, cuda, or auto, which is cuda if available."""
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise EtudeError(
            "device cuda: torch sees no CUDA device; install torch for CUDA, or use device cpu"
        )
    return torch.device("cuda" if there and asked != "cpu" else "cpu")


def check_ranks(device: torch.device, ranks: int) -> None:
    """Check that each rank of a machine has its own device."""
    if device.type == "cuda" and ranks > (count := torch.cuda.device_count()):
        raise EtudeError(
            f"rank {ranks - 1} has no CUDA device of its own: this machine has {count}; lower "
            f"trainer.ranks"
        )


@dataclass(frozen=True, slots=True)
class KvCacheSize:
    """The size of a KV cache in tokens; `windowed`: that of layers with a window, 0 if they use the
    same blocks as the others."""

    tokens: int
    windowed: int = 0


def kv_cache_size(
    model: Transformer,
    max_num_seqs: int,
    kv_cache_bytes: int | None,
    max_batched_tokens: int | None = None,
) -> KvCacheSize:
    """The size of the KV cache: four times as many tokens as can run at once, so that sessions find
    their earlier turns; but within `kv_cache_bytes`, and at least one sequence. None: a GiB, or on
    a device most of its free memory.

    Layers with a window need the tokens that running sequences see; beyond that they get room for a
    share of all tokens, for the windows at the ends of cached prefixes. If that is no less than all
    tokens, or `max_batched_tokens` is not given, they have no blocks of their own.
    """
    c, weight = model.config, model.model.embed_tokens.weight
    if kv_cache_bytes is None:
        kv_cache_bytes = int(KV_MEMORY_FRACTION * _free(model)) if weight.is_cuda else 1 << 30
    width = weight.element_size()
    context = c.max_position_embeddings
    fp8 = model.arithmetic.fp8_kv
    token_bytes = kv_bytes(c, width, fp8=fp8) + state_bytes(c, width) // block_size(c)

    def within(num_bytes: float, token_bytes: float) -> int:
        return max(context, min(4 * max_num_seqs * context, int(num_bytes // token_bytes)))

    if c.sliding_window is None or not c.windowed_layers or max_batched_tokens is None:
        return KvCacheSize(within(kv_cache_bytes, token_bytes))
    size = MAX_PLAIN_BLOCK_SIZE
    windowed = windowed_bytes(c, width, fp8=fp8)
    seen = size * num_windowed_blocks(
        c.sliding_window, size, max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens
    )
    saved = windowed * (1 - WINDOWED_SHARE)
    tokens = within(kv_cache_bytes - seen * windowed, token_bytes - saved)
    in_windows = seen + int(tokens * WINDOWED_SHARE)
    if in_windows >= tokens:
        return KvCacheSize(within(kv_cache_bytes, token_bytes))
    return KvCacheSize(tokens, in_windows)


def _free(model: Transformer) -> int:
    """Free bytes of its device, after the runner has stored FP8 weights in addition to the
    unquantised ones."""
    free: int = torch.cuda.mem_get_info(model.model.embed_tokens.weight.device)[0]
    return free - sum(own.weight.numel() for own in model.quantised_layers())


def has_kernels(model: Transformer, dtype: torch.dtype, *, invariant: bool) -> bool:
    """True if the model runs on our CUDA kernels when it computes in `dtype`."""
    if not model.model.embed_tokens.weight.is_cuda or dtype != torch.bfloat16:
        return False
    # imports Triton, which comes only with a CUDA build of torch
    from etude.engine.kernels import fused, unfused

    found = fused.unsupported(
        model.config, fused.INVARIANT_SUPPORTED if invariant else fused.SUPPORTED
    )
    if found and not invariant:
        found = unfused.unsupported(model.config)
    _say_once("our CUDA kernels do", found)
    return not found


def _say_once(path: str, features: list[str]) -> None:
    """Warn that a fast path cannot compute a model, which runs all the same."""
    if features:
        why = f"{path} not support {', '.join(features)}: falling back to torch's operators"
        warnings.warn(why, RuntimeWarning, stacklevel=3)


def _check_invariant(model: Transformer) -> None:
    if model.config.linear:
        raise EtudeError(
            f"batch-invariant arithmetic is not available for {model.config.model_type}: its "
            f"recurrent layers add up in chunks that depend on how a prompt is split; turn "
            f"batch_invariant off"
        )


def invariant_trainer_model(model: Transformer, dtype: torch.dtype) -> Transformer:
    """The trainer's model with the same bits as a batch-invariant engine: on the same kernels, or
    with the same operators."""
    if not has_kernels(model, dtype, invariant=True):
        _check_invariant(model)
        return model.compute_with(model.arithmetic.but(invariant=True))
    if any(name.endswith(ADAPTER_KINDS) for name, _ in model.named_parameters()):
        raise EtudeError(
            "batch_invariant is not available with trainer.lora on CUDA: turn one of them off, "
            "or train on the CPU"
        )
    from etude.engine.kernels.trainable import BatchInvariantTransformer

    trainable = BatchInvariantTransformer(model.config).to(model.model.embed_tokens.weight.device)
    trainable.load_state_dict(model.state_dict())
    trainable.compute_with(model.arithmetic)
    return trainable


def select_runner(
    model: Transformer,
    max_num_seqs: int,
    kv_cache_bytes: int | None,
    adapters: AdapterLimits | None = None,
    *,
    max_batched_tokens: int | None = None,
) -> ModelRunner:
    """The fastest runner that supports the model on its device, with `adapters` if these are given;
    a batch-invariant one if the model's arithmetic is. With `max_num_seqs` 1 on a CPU it is the
    `TorchRunner`, whose bits can be reproduced with the model definition: checks of deterministic
    runs rely on that."""
    weight = model.model.embed_tokens.weight
    room = kv_cache_size(model, max_num_seqs, kv_cache_bytes, max_batched_tokens)

    def blocks(size: int) -> tuple[int, int]:
        return -(-room.tokens // size), -(-room.windowed // size)

    if has_kernels(model, weight.dtype, invariant=model.invariant):
        from etude.engine.cuda import CudaRunner

        count, windowed = blocks(max(CudaRunner.block_size, block_size(model.config)))
        return CudaRunner(
            model, count, max_num_seqs, invariant=model.invariant, adapters=adapters,
            num_windowed_blocks=windowed,
        )  # fmt: skip
    with_adapters = adapters is not None
    if model.invariant:
        _check_invariant(model)
        count, windowed = blocks(BLOCK_SIZE)
        return BatchInvariantTorchRunner(
            model, count, num_windowed_blocks=windowed, with_adapters=with_adapters
        )
    if not weight.is_cuda and max_num_seqs > 1:
        # It merges the adapter of the weights; in bf16 that would give a different model.
        merges = adapters is not None and not adapters.num_named and weight.dtype == torch.float32
        missing = [] if adapters is None or merges else ["adapters"]
        missing += ["FP8"] if model.arithmetic.fp8 or model.arithmetic.fp8_kv else []
        if not missing and not native.unsupported(model.config, weight.dtype):
            return native.CpuRunner(model, blocks(native.BLOCK_SIZE)[0], with_adapter=merges)
        _say_once("native.c does", [*model.config.unsupported_features(native.SUPPORTED), *missing])
    count, windowed = blocks(block_size(model.config))
    return TorchRunner(model, count, num_windowed_blocks=windowed, with_adapters=with_adapters)
