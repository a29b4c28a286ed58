"""The unfused forward pass: the modules of a `Transformer` unchanged, with attention on our Triton
kernels. For models with layers that `fused` does not support.

Products and norms are torch's, one after the other; capturing them in a graph removes their largest
cost at small batches, the launches. Shapes as in `fused`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.core.errors import EtudeError
from etude.engine.kernels import attention, head
from etude.engine.kernels.fused import ANY, ForwardContext, odd_heads
from etude.engine.kernels.lora import CudaAdapters
from etude.model.experts import Routing
from etude.model.heads import GroupedQueryAttention
from etude.model.recurrence import Recur
from etude.model.scoring import Scoring
from etude.model.transformer import Block, ModelConfig, Transformer

SUPPORTED = {
    **dict.fromkeys(
        ("linear", "gated_attention", "qkv_bias", "out_bias", "sinks", "partial_rotary"), ANY
    ),
    **dict.fromkeys(("qk_norm", "scale", "softcap", "window", "rope"), ANY),
    **dict.fromkeys(("norms", "centred_norms", "residual_scale", "hidden_act", "mlp_bias"), ANY),
    **dict.fromkeys(("router", "experts_scale", "shared_experts", "clamped_gates"), ANY),
    **dict.fromkeys(("embedding_scale", "logits_scale", "logits_softcap"), ANY),
}
"""The features that the modules and the attention kernels compute beyond a plain layer."""


def unsupported(c: ModelConfig) -> list[str]:
    """The reasons why a model cannot run this way, as text; empty if it can."""
    # It needs a loop over experts, whose lengths the host would have to know.
    loops = c.experts is not None and c.hidden_act != "silu"
    return (
        c.unsupported_features(SUPPORTED)
        + odd_heads(c)
        + (["experts with hidden_act"] if loops else [])
    )


class _LayerAttention:
    """The attention config of one layer, under the name that a runner expects: as in
    `LayerWeights`."""

    def __init__(self, heads: GroupedQueryAttention, eps: float) -> None:
        size = heads.head_dim
        self.attention_config = attention.AttentionLayerConfig(
            heads.num_q,
            heads.num_kv,
            size,
            size**-0.5 if heads.scale is None else heads.scale,
            eps,
            None,
            None,
            None,
            heads.window,
            heads.softcap,
            None if heads.sinks is None else heads.sinks.detach(),
        )


class UnfusedForward:
    """The forward pass of a `Transformer` by its own modules, with attention on Triton kernels."""

    adapters: CudaAdapters | None = None
    """The adapters, which the modules call themselves."""

    def __init__(self, model: Transformer) -> None:
        c = model.config
        if found := unsupported(c):
            raise EtudeError(
                f"the kernels cannot run {c.model_type} with {', '.join(found)}; `select_runner` "
                f"finds one that can"
            )
        self.config = c
        self._model = model
        self.layers = [
            _LayerAttention(block.self_attn, c.rms_norm_eps)
            for block in model.model.layers
            if isinstance(block, Block) and isinstance(block.self_attn, GroupedQueryAttention)
        ]

    def hidden(
        self,
        tokens_N: Tensor,
        slot_mapping_N: Tensor,
        sampled: Tensor,
        context: ForwardContext,
        record: Tensor | None,
        pdl: bool,
    ) -> Tensor:
        """Like `FusedForward.hidden`; `record` has one more slot, for padding tokens."""
        known = sampled.index_select(0, (-1 - tokens_N).clamp(min=0))
        tokens_N = torch.where(tokens_N < 0, known, tokens_N)
        routing = None if record is None else Routing()
        positions_N, attend = context.positions_N, _TritonAttention(context)
        hidden_NE: Tensor = self._model(tokens_N, positions_N, attend, routing)
        if record is not None and routing is not None:
            nobody = record.shape[0] - 1
            slots_N = torch.where(slot_mapping_N < 0, nobody, slot_mapping_N).long()
            record.index_copy_(0, slots_N, routing.chosen().to(record.dtype))
        return hidden_NE

    def sample(
        self, hidden_RE: Tensor, temperature_R: Tensor, u_R: Tensor, logits_RV: Tensor,
        tokens_R: Tensor, logprobs_R: Tensor, pdl: bool,
    ) -> None:  # fmt: skip
        logits_RV.copy_(self._model.logits(hidden_RE))
        head.sample(
            logits_RV,
            head.tile_stats(logits_RV, temperature_R),
            temperature_R,
            u_R,
            tokens_R,
            logprobs_R,
            pdl=False,
        )


class _TritonAttention:
    """The attention backend of one pass, on Triton kernels over the paged KV cache."""

    latent = False

    def __init__(self, context: ForwardContext) -> None:
        self._context = context

    def __call__(
        self,
        layer: int,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        scale: float | None = None,
        scoring: Scoring | None = None,
    ) -> Tensor:
        """Attend; scale and scoring are ignored, because the kernels already have those of the
        layer."""
        qkv = torch.cat((q_NHD, k_NKD, v_NKD), -2).flatten(-2)
        return self._context.attend(layer, qkv).view(q_NHD.shape)

    def recurrence(self, shape: torch.Size) -> Recur:
        assert self._context.recur is not None
        return self._context.recur
