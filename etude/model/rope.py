"""Rotary positions: the frequency of each pair of numbers of a head, and a model's table of all
rotations.

Everything is computed in float64 and rounded once, so that every device and build starts from the
same table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from etude.model.config import ModelConfig, RopeScaling
from etude.model.numerics import Arithmetic


def table(config: ModelConfig) -> Tensor:
    """[positions, 2, 1, rotary_dim]: cosines, and sines with the first half negated, so that
    `rotate` only has to swap the halves of a head. The 1 is the dimension of the heads."""
    return _turns(config, inverse_frequencies(config), attention_factor(config.rope_scaling))


def local_table(config: ModelConfig) -> Tensor | None:
    """The table of layers with a window, if these have their own rope; it is never scaled."""
    if config.local_rope_theta is None:
        return None
    return _turns(config, _speeds(config.local_rope_theta, config.rotary_dim), 1.0)


def _turns(config: ModelConfig, speeds: Tensor, factor: float) -> Tensor:
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float64)
    angles = torch.outer(positions, speeds)
    cos, sin = (f(angles) * factor for f in (torch.cos, torch.sin))
    return (
        torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).unsqueeze(2).float()
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Rotate x [.., heads, D], pairing the two halves of a head; cos and sin [.., 1, D] come from
    the table. Numbers of a head beyond their size stay unchanged."""
    if (size := cos.shape[-1]) < x.shape[-1]:
        turned = rotate(x[..., :size], cos, sin, arithmetic)
        return torch.cat((turned, x[..., size:]), -1)
    first, second = x.chunk(2, -1)
    return arithmetic.rotate(x, cos, torch.cat((second, first), -1), sin)


def split_halves(x: Tensor) -> Tensor:
    """Reorder from the layout of DeepSeek, where the numbers of a pair are adjacent, to that of
    `rotate`."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position, for each pair."""
    dim, scaling = config.rotary_dim, config.rope_scaling
    speed = _speeds(config.rope_theta, dim)
    # A dynamic rope differs only beyond the context that the model was made for.
    if scaling is None or scaling.rope_type == "dynamic":
        return speed
    if scaling.rope_type == "longrope":
        return speed / torch.tensor(scaling.short_factor, dtype=torch.float64)
    if scaling.rope_type == "linear":
        return speed / scaling.factor
    context = scaling.original_max_position_embeddings
    if scaling.rope_type == "llama3":
        turns = speed * context / (2 * math.pi)  # within the context of the first training
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        keep = 1 - _ramp(scaling, dim, config.rope_theta, context)
    # Fast pairs see neighbours and stay unchanged, slow ones are stretched, those between are
    # mixed.
    return speed / scaling.factor * (1 - keep) + speed * keep


def _speeds(theta: float, dim: int) -> Tensor:
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _ramp(scaling: RopeScaling, dim: int, theta: float, context: int) -> Tensor:
    """YaRN: 0 for pairs that turn more than `beta_fast` times in the context, 1 below `beta_slow`,
    linear between."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    return ((torch.arange(dim // 2, dtype=torch.float64) - first) / max(last - first, 1e-3)).clamp(
        0, 1
    )


def attention_factor(scaling: RopeScaling | None) -> float:
    """The factor by which YaRN and longrope scale queries and keys, to sharpen attention in long
    contexts."""
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "longrope":
        context = math.log(scaling.original_max_position_embeddings)
        return math.sqrt(1 + math.log(scaling.factor) / context) if scaling.factor > 1 else 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _mscale(scaling.factor, 1.0)


def mla_score_scale(scaling: RopeScaling | None) -> float:
    """The factor on the scores of MLA, needed since only a part of its queries and keys is
    rotated."""
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    return _mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
