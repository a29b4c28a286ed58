"""Gated DeltaNet, the linear attention of Qwen3-Next. Shapes as in `recurrence`, and E hidden
size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etude.model.config import LinearConfig, ModelConfig
from etude.model.heads import AttentionBackend
from etude.model.layers import Fused, Linear, RMSNorm
from etude.model.numerics import PLAIN
from etude.model.recurrence import DeltaRule


class Convolution(nn.Module):
    """One filter for each channel."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


class GatedDeltaNet(nn.Module):
    arithmetic = PLAIN

    def __init__(self, c: ModelConfig, linear: LinearConfig, layer: int) -> None:
        super().__init__()
        self.c = linear
        self.place = linear.layers.index(layer)
        self.act = c.hidden_act
        keys = linear.num_key_heads * linear.key_head_dim
        values = linear.num_value_heads * linear.value_head_dim
        sizes = {
            "in_proj_qkvz": 2 * keys + 2 * values,
            "in_proj_ba": 2 * linear.num_value_heads,
        }
        self.in_proj = Fused(c.hidden_size, sizes)
        self.in_proj.quantisable = False  # it determines how fast a memory fades
        self.conv1d = Convolution(linear.conv_dim, linear.conv_kernel_dim)
        self.dt_bias = nn.Parameter(torch.ones(linear.num_value_heads))
        # Not `linspace`: once transformers has loaded a model, `linspace` ignores `torch.device`.
        spread = torch.arange(linear.num_value_heads) / max(1, linear.num_value_heads - 1)
        self.A_log = nn.Parameter((1 + 15 * spread).log())
        self.norm = RMSNorm(linear.value_head_dim, c.rms_norm_eps)
        self.out_proj = Linear(values, c.hidden_size, bias=False)

    def forward(self, x: Tensor, attend: AttentionBackend) -> Tensor:
        c, sigmoid = self.c, self.arithmetic.sigmoid
        q, k, v, z, b, a = self._projected(x)
        decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        mixed = torch.cat((q, k, v), -1)
        rule = DeltaRule(
            self.conv1d.weight.squeeze(1),
            c.num_key_heads,
            c.key_head_dim,
            c.value_head_dim,
            self.arithmetic.activation(self.act),
        )
        recur = attend.recurrence(x.shape[:-1])
        flat = (part.flatten(0, -2) for part in (mixed, decay, sigmoid(b)))
        read_NHV = recur(self.place, rule, *flat)
        # In float32 up to this point, because the norm makes a nearly empty read as large as any
        # other.
        normed = F.rms_norm(read_NHV, (c.value_head_dim,), self.norm.weight.float(), self.norm.eps)
        normed = normed * F.silu(z.reshape(read_NHV.shape).float())
        return self.out_proj(normed.to(x.dtype).view(*x.shape[:-1], -1))  # type: ignore[no-any-return]

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values, output gates, input gates and decay of one layer. In the files the
        rows of one key head are contiguous."""
        c = self.c
        shared = c.num_value_heads // c.num_key_heads
        values = shared * c.value_head_dim
        qkvz, ba = self.in_proj(x).split_with_sizes(list(self.in_proj.sizes.values()), -1)
        parts = [
            *_by_head(qkvz, c.num_key_heads, (c.key_head_dim, c.key_head_dim, values, values)),
            *_by_head(ba, c.num_key_heads, (shared, shared)),
        ]
        return tuple(parts)


def _by_head(x: Tensor, heads: int, sizes: tuple[int, ...]) -> list[Tensor]:
    parts = x.view(*x.shape[:-1], heads, -1).split_with_sizes(sizes, -1)
    return [part.flatten(-2) for part in parts]
