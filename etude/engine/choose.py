"""Where a model is computed, by whom, and with how much memory for keys and values."""

from __future__ import annotations

import torch

from etude.core.errors import EtudeError
from etude.engine import native
from etude.engine.invariant import InvariantRunner
from etude.engine.plan import Runner
from etude.engine.runner import BLOCK_SIZE, CpuRunner
from etude.model.transformer import Transformer

DEVICE_SHARE = 0.7
"""Of the memory that is free on a device when the engine is made: the rest is for graphs and what a pass needs."""


def device_for(asked: str) -> torch.device:
    """`asked`: cpu, cuda, or auto, which is cuda where there is one."""
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise EtudeError("device cuda: torch sees no CUDA device here; install its CUDA build, or take the device cpu")
    return torch.device("cuda" if there and asked != "cpu" else "cpu")


def num_tokens(model: Transformer, max_batch: int, kv_bytes: int | None) -> int:
    """How many the key/value memory is made for: four times as many as can run at once, so that sessions find what they
    said before; in any case within `kv_bytes`, and in any case one sequence. None: a GiB, or on a device most of what
    is free there."""
    c, weight = model.config, model.model.embed_tokens.weight
    if kv_bytes is None:
        kv_bytes = int(DEVICE_SHARE * torch.cuda.mem_get_info(weight.device)[0]) if weight.is_cuda else 1 << 30
    heads, size = c.cached_heads
    token_bytes = c.num_hidden_layers * heads * size * weight.element_size() * (1 if c.latent else 2)
    context = c.max_position_embeddings
    return max(context, min(4 * max_batch * context, kv_bytes // token_bytes))


def runner_for(model: Transformer, max_batch: int, kv_bytes: int | None) -> Runner:
    """The fastest that knows the model, where the model is. But one request at a time is answered on a CPU by the
    operators of the model definition: whoever runs these too gets the same bits, and that is what a deterministic run
    is checked by. If the model's arithmetic is invariant, so is the runner's."""
    weight, tokens = model.model.embed_tokens.weight, num_tokens(model, max_batch, kv_bytes)
    if weight.is_cuda:
        from etude.engine.cuda import CudaRunner  # brings Triton, which is there only with a CUDA build of torch
        from etude.engine.kernels.network import unknown

        if weight.dtype == torch.bfloat16 and not unknown(model.config):
            blocks = -(-tokens // CudaRunner.block_size)
            return CudaRunner(model, blocks, max_batch, invariant=model.invariant)
    if model.invariant:
        return InvariantRunner(model, -(-tokens // BLOCK_SIZE))
    if not weight.is_cuda and max_batch > 1 and native.can_run(model.config, weight.dtype):
        return native.NativeRunner(model, -(-tokens // native.BLOCK_SIZE))
    return CpuRunner(model, -(-tokens // BLOCK_SIZE))
