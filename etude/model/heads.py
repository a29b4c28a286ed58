"""Attention layers: grouped-query attention (GQA), and multi-head latent attention (MLA).

The attention backend is passed as `attend`.

Shapes: .. any leading dimensions (B rows of T tokens in training, N tokens of many sequences in
inference), E hidden size, H query heads, K key/value heads, D head size, R size of the latent, P of
the rotated part, Q and V the sizes of the unrotated part of a key and of a value.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from etude.model.config import LatentConfig, ModelConfig
from etude.model.fp8 import rounded_kv
from etude.model.layers import Fused, Linear, RMSNorm
from etude.model.numerics import PLAIN
from etude.model.recurrence import Recur
from etude.model.rope import mla_score_scale, rotate, split_halves
from etude.model.scoring import Scoring

LATENT_EPS = 1e-6  # eps of the norms within MLA, whatever the model's own is


class AttentionBackend(Protocol):
    latent: bool
    """True: an MLA layer passes its latent as the only key head, and the first R numbers of it as
    values (a view, not to be stored twice). False: it passes the keys and values of all heads."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        scoring: Scoring | None = None,
    ) -> Tensor:
        """Attend every token to the tokens that it sees: q [.., H, D], k [.., K, D], v [.., K, V]
        -> [.., H, V]. Scores are multiplied by `scale`, or by 1 / sqrt(D); `scoring` holds further
        changes to them."""

    def recurrence(self, shape: torch.Size) -> Recur:
        """The order of tokens with these leading dimensions, for layers without attention."""


class GroupedQueryAttention(nn.Module):
    arithmetic = PLAIN
    sinks: nn.Parameter | None

    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = c.cached_layers.index(layer)
        self.head_dim = c.head_dim
        self.num_q = c.num_attention_heads
        self.num_kv = c.num_key_value_heads
        features = c.layer_features(layer)
        family = c.family
        q = self.num_q * self.head_dim
        kv = self.num_kv * self.head_dim
        self.gated = features.gated_attention
        sizes = {"q_proj": 2 * q if self.gated else q, "k_proj": kv, "v_proj": kv}
        if family.fused_files:
            sizes = {"qkv_proj": q + 2 * kv}
        self.qkv_proj = Fused(c.hidden_size, sizes, bias=features.qkv_bias)
        self.o_proj = Linear(q, c.hidden_size, bias=features.out_bias)
        self.q_norm = self.k_norm = None
        self.rowwise_norm = features.qk_norm == "row"
        if features.qk_norm:
            q, kv = (q, kv) if self.rowwise_norm else (self.head_dim, self.head_dim)
            self.q_norm = RMSNorm(q, c.rms_norm_eps, features.centred_norms)
            self.k_norm = RMSNorm(kv, c.rms_norm_eps, features.centred_norms)
        self.rotated = features.rope is not None
        self.scale = features.scale
        self.window = features.window
        self.softcap = features.softcap
        self.sinks = nn.Parameter(torch.zeros(self.num_q)) if features.sinks else None

    @property
    def scoring(self) -> Scoring | None:
        if self.window is None and self.softcap is None and self.sinks is None:
            return None
        return Scoring(self.window, self.softcap, self.sinks)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: AttentionBackend) -> Tensor:
        heads = self.qkv_proj(x).view(*x.shape[:-1], -1, self.head_dim)
        num_q = 2 * self.num_q if self.gated else self.num_q
        q, k, v = heads.split_with_sizes((num_q, self.num_kv, self.num_kv), -2)
        gate = None
        if self.gated:  # each head's gate follows its query
            q, gate = q.unflatten(-2, (self.num_q, 2)).unbind(-2)
        if self.q_norm and self.k_norm:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if self.rotated:
            q, k = rotate(q, cos, sin, self.arithmetic), rotate(k, cos, sin, self.arithmetic)
        if self.arithmetic.fp8_kv:
            k, v = rounded_kv(k), rounded_kv(v)
        mixed = attend(self.layer, q, k, v, self.scale, self.scoring)
        if gate is not None:
            mixed = mixed * self.arithmetic.sigmoid(gate)
        return self.o_proj(mixed.flatten(-2))  # type: ignore[no-any-return]

    def _normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        if self.rowwise_norm:
            return norm(x.flatten(-2)).view(x.shape)  # type: ignore[no-any-return]
        return norm(x)  # type: ignore[no-any-return]


class LatentAttention(nn.Module):
    arithmetic = PLAIN

    def __init__(self, c: ModelConfig, latent: LatentConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = c.num_attention_heads
        self.c = latent
        self.qk_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        self.scale = self.qk_dim**-0.5 * mla_score_scale(c.rope_scaling)
        queries = self.num_heads * self.qk_dim
        kv = latent.kv_lora_rank + latent.qk_rope_head_dim
        first = {"q_a_proj": latent.q_lora_rank} if latent.q_lora_rank else {"q_proj": queries}
        self.a_proj = Fused(c.hidden_size, first | {"kv_a_proj_with_mqa": kv})
        self.q_a_layernorm = RMSNorm(latent.q_lora_rank, LATENT_EPS) if latent.q_lora_rank else None
        self.q_b_proj = (
            Linear(latent.q_lora_rank, queries, bias=False) if latent.q_lora_rank else None
        )
        self.kv_a_layernorm = RMSNorm(latent.kv_lora_rank, LATENT_EPS)
        expanded = self.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        self.kv_b_proj = Linear(latent.kv_lora_rank, expanded, bias=False)
        self.kv_b_proj.quantisable = False  # `_over_latent` multiplies its parts separately
        self.o_proj = Linear(self.num_heads * latent.v_head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: AttentionBackend) -> Tensor:
        c = self.c
        sizes = (
            self.a_proj.out_features - c.kv_lora_rank - c.qk_rope_head_dim,
            c.kv_lora_rank,
            c.qk_rope_head_dim,
        )
        q, latent, k_rope = self.a_proj(x).split_with_sizes(sizes, -1)
        if self.q_a_layernorm and self.q_b_proj:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.view(*x.shape[:-1], self.num_heads, -1)
        q_nope, q_rope = q.split_with_sizes((c.qk_nope_head_dim, c.qk_rope_head_dim), -1)
        latent = self.kv_a_layernorm(latent)
        # The one key head is rotated together with all query heads.
        turned = torch.cat((q_rope, k_rope.unsqueeze(-2)), -2)
        turned = rotate(
            split_halves(turned) if c.rope_interleave else turned, cos, sin, self.arithmetic
        )
        q_rope, k_rope = turned.split_with_sizes((self.num_heads, 1), -2)
        seen = self._over_latent if attend.latent else self._expanded
        return self.o_proj(seen(q_nope, q_rope, latent, k_rope, attend).flatten(-2))  # type: ignore[no-any-return]

    def _expanded(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        attend: AttentionBackend,
    ) -> Tensor:
        kv = self.kv_b_proj(latent).view(*latent.shape[:-1], self.num_heads, -1)
        k_nope, v = kv.split_with_sizes((self.c.qk_nope_head_dim, self.c.v_head_dim), -1)
        k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), -1)
        return attend(self.layer, torch.cat((q_nope, q_rope), -1), k, v, self.scale)

    def _over_latent(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        attend: AttentionBackend,
    ) -> Tensor:
        """Same result, with the expansion of keys applied to the queries, and that of values to the
        output."""
        expand = self.kv_b_proj.weight.view(self.num_heads, -1, self.c.kv_lora_rank)
        keys_HQR, values_HVR = expand.split_with_sizes(
            (self.c.qk_nope_head_dim, self.c.v_head_dim), 1
        )
        q = torch.cat((self.arithmetic.per_head(q_nope, keys_HQR), q_rope), -1)
        k = torch.cat((latent.unsqueeze(-2), k_rope), -1)
        mixed = attend(self.layer, q, k, k[..., : self.c.kv_lora_rank], self.scale)
        return self.arithmetic.per_head(mixed, values_HVR.transpose(1, 2))
