"""Converter of a model directory to FP8, as servers read it: e4m3 with a scale for each block of
128 by 128, the layout of DeepSeek-V3. Matrices of layers are rounded; embeddings, head, routers and
norms are not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128
LARGEST = 448.0
"""The largest number in e4m3."""
KEPT = ("gate.weight", "router.weight", "shared_expert_gate.weight", "in_proj_ba.weight")
"""Suffixes of tensors that decide between scores that are close together, or set how fast a memory
fades."""
FILTERS = "conv1d.weight"


def to_fp8(
    small: Mapping[str, bytes], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, bytes], dict[str, Tensor]]:
    """The small files and tensors of the same model in FP8. Raises ValueError for a model without a
    known layout of this kind."""
    large = (name for name, t in tensors.items() if t.ndim > 2 and not name.endswith(FILTERS))
    if stacked := next(large, None):
        raise ValueError(
            f"{stacked} is a stack of matrices, which has no known FP8 layout: use bf16"
        )
    found: dict[str, Tensor] = {}
    kept = []
    for name, tensor in tensors.items():
        if _is_rounded(name, tensor):
            found[name], found[name + "_scale_inv"] = rounded(tensor)
            continue
        found[name] = tensor
        if tensor.ndim == 2 and not name.startswith("model.embed_tokens"):
            kept.append(name.removesuffix(".weight"))
    said: dict[str, Any] = json.loads(small["config.json"])
    said["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }
    return {**small, "config.json": json.dumps(said, indent=2).encode()}, found


def _is_rounded(name: str, tensor: Tensor) -> bool:
    return ".layers." in name and tensor.ndim == 2 and not name.endswith(KEPT)


def rounded(weight_MC: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3, and the factor of each block."""
    rows, columns = weight_MC.shape
    padded = F.pad(weight_MC.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    stored = (blocks / scale[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return stored.to(torch.float8_e4m3fn).contiguous(), scale
