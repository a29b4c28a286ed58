"""The forward pass of a `Transformer` on Triton kernels, on its own parameters and with the same
inputs and outputs.

A layer takes five kernels for one row and seven for more rows; with experts six and eight, and ten
beyond a few rows. Values are rounded to the dtype of the weights where the model definition rounds.

Shapes: N new tokens, E hidden size, R sampled rows, V vocabulary, S splits of a product or experts
of a token, X experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from etude.core.errors import EtudeError
from etude.engine.kernels import attention, experts, fp8, head, linear, norm
from etude.engine.kernels.lora import CudaAdapters
from etude.model.config import SupportedFeatures
from etude.model.experts import SparseMoE
from etude.model.fp8 import Quantised
from etude.model.heads import GroupedQueryAttention
from etude.model.layers import MLP, Linear
from etude.model.recurrence import Recur
from etude.model.transformer import Block, ModelConfig, Transformer

FEW_ROWS, SMALL_MATRIX = 64, 8 << 20
"""Bounds up to which our own products are faster than the library's: this many rows, or four times
as many with at most this many weights."""

Attend = Callable[[int, Tensor], Tensor]
"""(layer, projected q, k and v of the new tokens) -> the attention output of each."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The context of a pass, which its layers read: the positions of the new tokens, and the
    functions for attention to earlier tokens and for recurrence."""

    positions_N: Tensor
    attend: Attend
    recur: Recur | None = None
    """For recurrent layers; None in a model without them."""


class _Wildcard(Collection[Any]):
    """A collection that contains every value: in `SupportedFeatures`, any value of a feature.
    It has no length: do not iterate over it."""

    def __contains__(self, value: object) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


ANY = _Wildcard()
INVARIANT_SUPPORTED: SupportedFeatures = {
    "qkv_bias": (True,),
    "qk_norm": ("head",),
    "router": ("softmax",),
}
"""The features that these kernels, and those of `batch_invariant` and `trainable`, compute beyond a
plain layer; a model with any other feature does not run on them."""
SUPPORTED: SupportedFeatures = {**INVARIANT_SUPPORTED, "window": ANY}
"""The same for the kernels that are not batch-invariant."""


def unsupported(c: ModelConfig, supported: SupportedFeatures = SUPPORTED) -> list[str]:
    """The reasons why these kernels do not run a model, as text; empty if they do."""
    return c.unsupported_features(supported) + odd_heads(c)


def odd_heads(c: ModelConfig) -> list[str]:
    """Head sizes that no attention kernel takes."""
    odd = c.head_dim & (c.head_dim - 1) != 0 or c.head_dim < 16
    return [f"head_dim {c.head_dim}"] if odd else []


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one transformer layer, in the shapes that the kernels read."""

    input_gain: Tensor
    qkv: Linear
    attention_config: attention.AttentionLayerConfig
    out: Linear
    mlp_gain: Tensor
    mlp: MLP | SparseMoE


class FusedForward:
    """The forward pass of a `Transformer` on Triton kernels, on the parameters of that model."""

    supported = SUPPORTED
    adapters: CudaAdapters | None = None

    def __init__(self, model: Transformer) -> None:
        c = model.config
        if found := unsupported(c, self.supported):
            raise EtudeError(
                f"the kernels cannot run {c.model_type} with {', '.join(found)}; `select_runner` "
                f"finds one that can"
            )
        self.config = c
        self.eps = c.rms_norm_eps
        self.table_VE = model.model.embed_tokens.weight.detach()
        self.head_VE = self.table_VE if model.lm_head is None else model.lm_head.weight.detach()
        self.gain_E = model.model.norm.weight.detach()
        self.layers = [_layer(block, model.rope, c.rms_norm_eps) for block in model.model.layers]  # type: ignore[arg-type]

    def hidden(
        self,
        tokens_N: Tensor,
        slot_mapping_N: Tensor,
        sampled: Tensor,
        context: ForwardContext,
        record: Tensor | None,
        pdl: bool,
    ) -> Tensor:
        """The normalised output of the last layer. `record` [slots, layers with experts, k] takes
        the experts used. With `pdl` a kernel may begin while the previous one ends."""
        x_NE = self._embedded(tokens_N, sampled)
        if len(x_NE) == 1 and not self._has_adapters and not self._in_fp8:
            return self._one_row(x_NE, slot_mapping_N, context.attend, record, pdl)
        return self._rows(x_NE, slot_mapping_N, context.attend, record, pdl)

    def sample(
        self, hidden_RE: Tensor, temperature_R: Tensor, u_R: Tensor, logits_RV: Tensor,
        tokens_R: Tensor, logprobs_R: Tensor, pdl: bool,
    ) -> None:  # fmt: skip
        stats = logits_RV.new_empty(len(hidden_RE), head.num_tiles(len(self.head_VE)), 2)
        head.logits(hidden_RE, self.head_VE, temperature_R, logits_RV, stats, pdl)
        head.sample(logits_RV, stats, temperature_R, u_R, tokens_R, logprobs_R, pdl)

    def _embedded(self, tokens_N: Tensor, sampled: Tensor) -> Tensor:
        x_NE = self.table_VE.new_empty(len(tokens_N), self.table_VE.shape[1])
        norm.embed(tokens_N, sampled, self.table_VE, x_NE)
        return x_NE

    def _rows(
        self, x_NE: Tensor, slot_mapping_N: Tensor, attend: Attend, record: Tensor | None, pdl: bool
    ) -> Tensor:
        normed_NE = torch.empty_like(x_NE)
        rounded = fp8.empty_rows(x_NE) if self._in_fp8 else None
        norm.add_norm(x_NE, None, self.layers[0].input_gain, normed_NE, self.eps, pdl, rounded)
        gains = [layer.input_gain for layer in self.layers[1:]] + [self.gain_E]
        for number, (layer, gain) in enumerate(zip(self.layers, gains, strict=True)):
            path = f"model.layers.{number}"
            qkv = self._linear(normed_NE, layer.qkv, rounded, pdl)
            self._adapt(f"{path}.self_attn.qkv_proj", normed_NE, qkv, pdl)
            mixed = attend(number, qkv)
            parts = self._summands(mixed, layer.out, pdl)
            self._adapt(f"{path}.self_attn.o_proj", mixed, parts[0], pdl)
            norm.add_norm(x_NE, parts, layer.mlp_gain, normed_NE, self.eps, pdl, rounded)
            if isinstance(layer.mlp, SparseMoE):
                assert record is not None
                parts = self._experts(
                    normed_NE, layer.mlp, slot_mapping_N, record[:, layer.mlp.place], pdl
                )
            else:
                parts = self._mlp(f"{path}.mlp", layer.mlp, normed_NE, rounded, pdl)
            norm.add_norm(x_NE, parts, gain, normed_NE, self.eps, pdl, rounded)
        return normed_NE

    def _mlp(
        self, path: str, mlp: MLP, x_NE: Tensor, rounded: Quantised | None, pdl: bool
    ) -> Tensor:
        up, down = mlp.gate_up_proj, mlp.down_proj
        # Dense layers between sparse ones have no adapters.
        if self.adapters is None or not self._has_adapters or self.config.experts:
            if up.quantised is None or down.quantised is None:
                return self._summands(self._gated(x_NE, up.weight, pdl), down, pdl)
            gate_up = self._linear(x_NE, up, rounded, pdl)
            act = fp8.quantise_rows(gate_up, gated=True, pdl=pdl)
            return self._fp8_summands(act, down.quantised, x_NE.dtype, pdl)
        gate_up = self._linear(x_NE, up, rounded, pdl)
        act_NF = self.adapters.gated(f"{path}.gate_up_proj", x_NE, gate_up, pdl)
        parts = self._summands(act_NF, down, pdl)
        self._adapt(f"{path}.down_proj", act_NF, parts[0], pdl)
        return parts

    @property
    def _has_adapters(self) -> bool:
        """True if rows of this pass may have adapters."""
        return self.adapters is not None and self.adapters.tiles is not None

    def _adapt(self, path: str, x_NC: Tensor, y_NM: Tensor, pdl: bool) -> None:
        if self.adapters is not None:
            self.adapters.add(path, x_NC, y_NM, pdl)

    @property
    def _in_fp8(self) -> bool:
        return self.layers[0].qkv.quantised is not None

    def _linear(self, x_NC: Tensor, own: Linear, rounded: Quantised | None, pdl: bool) -> Tensor:
        """`rounded`: x in FP8."""
        if own.quantised is None or rounded is None:
            return self._product(x_NC, own.weight, own.bias, pdl)
        return fp8.product(rounded, own.quantised, own.bias, x_NC.dtype, pdl=pdl)

    def _summands(self, x_NC: Tensor, own: Linear, pdl: bool) -> Tensor:
        """The product as parts, which `norm.add_norm` sums."""
        if own.quantised is None:
            return self._split_product(x_NC, own.weight, pdl)
        x = fp8.quantise_rows(x_NC, pdl=pdl)
        return self._fp8_summands(x, own.quantised, x_NC.dtype, pdl)

    def _fp8_summands(self, x: Quantised, w: Quantised, dtype: torch.dtype, pdl: bool) -> Tensor:
        return fp8.split_product(x, w, dtype, pdl=pdl)

    def _product(self, x_NC: Tensor, w: Tensor, bias: Tensor | None, pdl: bool) -> Tensor:
        if len(x_NC) > FEW_ROWS:
            return F.linear(x_NC, w, bias)
        out = x_NC.new_empty(len(x_NC), len(w))
        config = linear.gemm_config(len(x_NC), w.shape[0], w.shape[1])
        linear.gemm(x_NC, w, out, config=config, bias_N=bias, pdl=pdl)
        return out

    def _gated(self, x_NC: Tensor, w: Tensor, pdl: bool) -> Tensor:
        # The library's product is followed by two kernels that read and write everything again,
        # which costs more than a small matrix.
        if not _is_ours(x_NC, w) and w.numel() > SMALL_MATRIX:
            gate, up = F.linear(x_NC, w).chunk(2, -1)
            return F.silu(gate) * up
        out = x_NC.new_empty(len(x_NC), len(w) // 2)
        config = linear.gemm_config(len(out), out.shape[1], w.shape[1], gated=True)
        linear.gemm(x_NC, w, out, config=config, gated=True, pdl=pdl)
        return out

    def _split_product(self, x_NC: Tensor, w: Tensor, pdl: bool) -> Tensor:
        """A split-K product, whose splits `norm.add_norm` sums."""
        if not _is_ours(x_NC, w):
            return F.linear(x_NC, w)[None]
        config = linear.gemm_config(len(x_NC), w.shape[0], w.shape[1], split=True)
        parts = x_NC.new_empty(config.split_k, len(x_NC), len(w), dtype=torch.float32)
        linear.gemm(x_NC, w, parts, config=config, pdl=pdl)
        return parts

    def _one_row(
        self, x_NE: Tensor, slot_mapping_N: Tensor, attend: Attend, record: Tensor | None, pdl: bool
    ) -> Tensor:
        x_E = x_NE[0]
        for number, layer in enumerate(self.layers):
            qkv = x_NE.new_empty(1, len(layer.qkv.weight))
            sparse = isinstance(layer.mlp, SparseMoE)
            linear.gemv(
                x_E,
                layer.qkv.weight,
                qkv[0],
                norm=(layer.input_gain, self.eps),
                bias_N=layer.qkv.bias,
                ahead=sparse,
                pdl=pdl,
            )
            mixed_C = attend(number, qkv)[0]
            linear.gemv(mixed_C, layer.out.weight, x_E, add=True, ahead=sparse, pdl=pdl)
            if isinstance(layer.mlp, SparseMoE):
                assert record is not None
                place = record[:, layer.mlp.place]
                few_experts(x_NE, layer.mlp, slot_mapping_N, place, pdl, (layer.mlp_gain, self.eps))
                continue
            act = x_NE.new_empty(layer.mlp.down_proj.weight.shape[1])
            linear.gemv(
                x_E,
                layer.mlp.gate_up_proj.weight,
                act,
                norm=(layer.mlp_gain, self.eps),
                gated=True,
                pdl=pdl,
            )
            linear.gemv(act, layer.mlp.down_proj.weight, x_E, add=True, pdl=pdl)
        normed_NE = torch.empty_like(x_NE)
        norm.add_norm(x_NE, None, self.gain_E, normed_NE, self.eps, pdl)
        return normed_NE

    def _experts(
        self, x_NE: Tensor, layer: SparseMoE, slot_mapping_N: Tensor, record_Sk: Tensor, pdl: bool
    ) -> Tensor:
        (rows, inner), outputs = x_NE.shape, len(layer.gate.weight)
        if rows <= experts.FEW_TOKENS:
            return few_experts(x_NE, layer, slot_mapping_N, record_Sk, pdl)[None]
        logits_NX = x_NE.new_empty(rows, outputs, dtype=torch.float32)
        config = linear.gemm_config(rows, outputs, inner)
        linear.gemm(x_NE, layer.gate.weight, logits_NX, config=config, pdl=pdl)
        return expert_parts(x_NE, layer, logits_NX, slot_mapping_N, record_Sk, pdl)[0]


def few_experts(
    x_NE: Tensor,
    layer: SparseMoE,
    slot_mapping_N: Tensor,
    record_Sk: Tensor,
    pdl: bool,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """The output of a layer with experts for a few tokens. With `norm`, gain and epsilon of the
    RMSNorm before the layer, its output is added to `x_NE`, and that is returned."""
    c = layer.gate.c
    logits_NX = x_NE.new_empty(len(x_NE), c.num_experts, dtype=torch.float32)
    out_NE, normed_NE = torch.empty_like(x_NE), x_NE
    if norm is not None:
        out_NE, normed_NE = x_NE, torch.empty_like(x_NE)
    experts.router_logits(x_NE, layer.gate.weight, logits_NX, normed_NE, norm=norm, pdl=pdl)
    act_NkI = x_NE.new_empty(len(x_NE), c.num_experts_per_tok, c.moe_intermediate_size)
    up, down = layer.experts.gate_up_proj, layer.experts.down_proj
    experts.chosen_gated(normed_NE, up, logits_NX, slot_mapping_N, act_NkI, pdl=pdl)
    experts.chosen_down(
        act_NkI,
        down,
        logits_NX,
        slot_mapping_N,
        record_Sk,
        out_NE,
        renormalise=c.norm_topk_prob,
        add=norm is not None,
        pdl=pdl,
    )
    return out_NE


def expert_parts(
    x_NE: Tensor,
    layer: SparseMoE,
    logits_NX: Tensor,
    slot_mapping_N: Tensor,
    record_Sk: Tensor,
    pdl: bool,
    replay_Nk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output of each expert of a token, kNE, to be summed; and the ids of the experts, Nk.
    `replay_Nk`: the experts to use instead of the router's, -1 where it decides."""
    c = layer.gate.c
    rows, top = len(x_NE), c.num_experts_per_tok
    ids_Nk, shares_Nk = slot_mapping_N.new_empty(rows, top), logits_NX.new_empty(rows, top)
    if replay_Nk is not None:
        ids_Nk.copy_(replay_Nk)
    experts.route(
        logits_NX,
        ids_Nk,
        shares_Nk,
        record_Sk,
        slot_mapping_N,
        renormalise=c.norm_topk_prob,
        given=replay_Nk is not None,
        pdl=pdl,
    )
    counts_X, choices_XN = (
        slot_mapping_N.new_empty(c.num_experts),
        slot_mapping_N.new_empty(c.num_experts, rows),
    )
    experts.group_by_expert(ids_Nk, counts_X, choices_XN, pdl)
    act = x_NE.new_empty(rows * top, c.moe_intermediate_size)
    parts_NkE = x_NE.new_empty(rows, top, x_NE.shape[1])
    up, down = layer.experts.gate_up_proj, layer.experts.down_proj
    experts.grouped_gemm(x_NE, up, counts_X, choices_XN, shares_Nk, act, gated=True, pdl=pdl)
    experts.grouped_gemm(
        act, down, counts_X, choices_XN, shares_Nk, parts_NkE, gated=False, pdl=pdl
    )
    return parts_NkE.transpose(0, 1), ids_Nk


def _layer(block: Block, rope: Tensor, eps: float) -> LayerWeights:
    heads = block.self_attn
    assert isinstance(heads, GroupedQueryAttention) and isinstance(block.mlp, MLP | SparseMoE)
    q_gain, k_gain = (
        None if gain is None else gain.weight.detach() for gain in (heads.q_norm, heads.k_norm)
    )
    size = heads.head_dim
    return LayerWeights(
        input_gain=block.input_layernorm.weight.detach(),
        qkv=heads.qkv_proj,
        attention_config=attention.AttentionLayerConfig(
            heads.num_q, heads.num_kv, size, size**-0.5, eps, q_gain, k_gain, rope, heads.window
        ),
        out=heads.o_proj,
        mlp_gain=block.post_attention_layernorm.weight.detach(),
        mlp=block.mlp,
    )


def _is_ours(x_NC: Tensor, w: Tensor) -> bool:
    """True if our own product is faster than the library's, which is the case for few rows; with
    many rows arithmetic dominates, where the library is faster."""
    return len(x_NC) <= FEW_ROWS or (len(x_NC) <= 4 * FEW_ROWS and w.numel() <= SMALL_MATRIX)
