"""The initial model of a run: from scratch, or from a model directory."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from etude.core.errors import EtudeError
from etude.model.experts import SparseMoE, StackedExperts
from etude.model.files import build_model, read_directory
from etude.model.heads import GroupedQueryAttention
from etude.model.transformer import Block, ModelConfig, Transformer, init_from_scratch


def compile_layers(model: Transformer) -> Transformer:
    """Compile each layer and the head on a device, for any number of tokens. Routers are left out,
    because their replayed and recorded choices differ in every layer, and a layer would be
    recompiled for each. Only for models that compute in bf16, where one kernel takes all sequences:
    a loop over sequences would be recompiled for every microbatch. The first step takes some
    seconds longer; bits may depend on what was computed before."""
    if next(model.parameters()).is_cuda:
        model.fused = True
        for block in model.model.layers:
            assert isinstance(block, Block)
            # Attention with a window or sinks is a loop over sequences on any device, a recurrent
            # layer is a loop over chunks, and experts with biases are a loop over experts.
            attention = [] if block.self_attn is None or _loops(block) else [block.self_attn]
            parts: list[nn.Module] = [*attention, block.mlp]
            if isinstance(block.mlp, SparseMoE):
                whole = type(block.mlp.experts) is StackedExperts
                parts = [*attention, *([block.mlp.experts] if whole else [])]
            elif attention:
                parts = [block]
            for part in parts:
                part.compile(dynamic=True)
    return model


def _loops(block: Block) -> bool:
    attention = block.self_attn
    return isinstance(attention, GroupedQueryAttention) and attention.scoring is not None


def initial_model(directory: Path | None, config_json: bytes, seed: int) -> Transformer:
    """The initial model: with the weights of a directory, or fresh ones. `config_json` sets the
    shape, which the weights must fit."""
    if directory is None:
        return init_from_scratch(ModelConfig.from_json(config_json), seed)
    try:
        small, tensors = read_directory(directory)
        return build_model(small | {"config.json": config_json}, tensors)
    # RuntimeError is what torch raises for a tensor of another shape.
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as e:
        raise EtudeError(
            f"the model in {directory} cannot be read ({type(e).__name__}: {e}): download it "
            f"again, or set another model.path"
        ) from e
