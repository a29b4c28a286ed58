"""The trainer's model on the engine's batch-invariant kernels: the same bits forward, the usual
gradients backward.

The engine adds and normalises in one kernel; here these are two steps, which round in the same
places.

Shapes: N tokens of all sequences one after the other, B sequences, E hidden size, C inputs of a
product, M outputs, V vocabulary, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from etude.engine.kernels import attention, fp8, head, norm
from etude.engine.kernels import batch_invariant as invariant
from etude.engine.kernels.fused import FusedForward, LayerWeights, expert_parts
from etude.engine.kernels.pages import empty_pages
from etude.model.attention import CausalAttention
from etude.model.experts import Routing, SparseMoE
from etude.model.fp8 import rounded_kv
from etude.model.heads import AttentionBackend, GroupedQueryAttention
from etude.model.layers import MLP, Linear, RMSNorm
from etude.model.numerics import PLAIN, product_of, value_of, value_of_later
from etude.model.rope import rotate
from etude.model.tiled_attention import TiledCausalAttention
from etude.model.transformer import Block, Transformer

PAGE_SIZE = 64


class BatchInvariantTransformer(Transformer):
    """The model that a trainer runs to get the bits of a batch-invariant engine: the forward pass
    of `BatchInvariantForward`, with the usual gradients. It takes packed sequences only, with
    causal attention."""

    @property
    def invariant(self) -> bool:
        return True

    def forward(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        attend: AttentionBackend,
        routing: Routing | None = None,
    ) -> Tensor:
        assert isinstance(attend, TiledCausalAttention), "which says how long the sequences are"
        fused = FusedForward(self)
        paged = _PagedCausalAttention(self, attend.lengths, positions_N)
        x_NE = F.embedding(tokens_N, self.model.embed_tokens.weight)
        for block, layer in zip(self.model.layers, fused.layers, strict=True):
            assert isinstance(block, Block) and isinstance(block.self_attn, GroupedQueryAttention)
            qkv = _linear(_normed(x_NE, block.input_layernorm), layer.qkv)
            x_NE = x_NE + _summed(paged.attend(layer, block.self_attn, qkv), layer.out)
            normed_NE = _normed(x_NE, block.post_attention_layernorm)
            if isinstance(layer.mlp, SparseMoE):
                x_NE = x_NE + _experts(normed_NE, layer.mlp, routing)
            else:
                assert isinstance(layer.mlp, MLP)
                x_NE = x_NE + _summed(_gated(normed_NE, layer.mlp), layer.mlp.down_proj)
        return _normed(x_NE, self.model.norm)

    def logprobs(
        self, hidden_NE: Tensor, tokens_N: Tensor, temperature_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        table_VE = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        logp_N, logp_NV = super().logprobs(hidden_NE, tokens_N, temperature_N)
        if temperature_N is None:
            temperature_N = torch.ones(len(hidden_NE), device=hidden_NE.device)

        def exact() -> Tensor:
            logits_NV = hidden_NE.new_empty(len(hidden_NE), len(table_VE), dtype=torch.float32)
            stats = logits_NV.new_empty(len(hidden_NE), head.num_tiles(len(table_VE)), 2)
            invariant.logits(hidden_NE, table_VE, temperature_N, logits_NV, stats, pdl=False)
            out_N = torch.empty_like(temperature_N)
            invariant.logprobs(logits_NV, stats, temperature_N, tokens_N.int(), out_N, pdl=False)
            return out_N

        return value_of(exact, gradient_of=lambda: logp_N), logp_NV


class _PagedCausalAttention:
    """Causal attention within whole sequences: the values are those of the engine's paged kernel,
    the gradients those of plain attention. Each sequence has as many pages as the longest."""

    def __init__(self, model: Transformer, lengths: Sequence[int], positions_N: Tensor) -> None:
        c = model.config
        weight = model.model.embed_tokens.weight.detach()
        self._plain = CausalAttention(lengths, weight.device)
        pages = -(-max(lengths) // PAGE_SIZE)
        shape = (len(lengths) * pages, c.num_key_value_heads, PAGE_SIZE, c.head_dim)
        self._k, self._v = empty_pages(weight, shape, fp8=model.arithmetic.fp8_kv)
        self._cos, self._sin = model.rope[positions_N].to(weight.dtype).unbind(1)

        def ints(values: Tensor) -> Tensor:
            return values.to(weight.device, torch.int32).contiguous()

        length_B = torch.tensor(lengths)
        end_B = length_B.cumsum(0)
        sequence_N = torch.arange(len(lengths)).repeat_interleave(length_B)
        self._positions = ints(positions_N)
        self._slots = ints(sequence_N * pages * PAGE_SIZE + positions_N.cpu())
        self._blocks = ints(torch.arange(len(lengths) * pages))
        self._stride = ints(torch.tensor([pages]))
        self._ends = ints(end_B)
        self._lengths = ints(length_B)
        step = attention.PREFILL_ROWS // (c.num_attention_heads // c.num_key_value_heads)
        tiles_B = -(-length_B // step)
        self._sequence = ints(torch.arange(len(lengths)).repeat_interleave(tiles_B))
        firsts = [
            torch.arange(end - length, end, step)
            for end, length in zip(end_B, length_B, strict=True)
        ]
        self._first = ints(torch.cat(firsts))

    def attend(self, layer: LayerWeights, own: GroupedQueryAttention, qkv: Tensor) -> Tensor:
        def exact() -> Tensor:
            turned, out = qkv.clone(), qkv.new_empty(len(qkv), own.num_q * own.head_dim)
            params = layer.attention_config
            attention.write(
                params, turned, self._k, self._v, self._positions, self._slots, page_size=PAGE_SIZE
            )
            invariant.prefill(
                params, turned, self._k, self._v, self._blocks, self._stride, self._ends,
                self._lengths, self._sequence, self._first, out, page_size=PAGE_SIZE,
            )  # fmt: skip
            return out

        norms = [own.q_norm, own.k_norm] if own.q_norm and own.k_norm else []
        gains = [norm.weight for norm in norms if norm]
        return value_of_later(exact, partial(self._attend, own), qkv, *gains)

    def _attend(self, own: GroupedQueryAttention, qkv: Tensor, *gains: Tensor) -> Tensor:
        heads = qkv.view(len(qkv), -1, own.head_dim)
        q, k, v = heads.split_with_sizes((own.num_q, own.num_kv, own.num_kv), -2)
        if own.q_norm and own.k_norm:
            q, k = (
                F.rms_norm(x, gain.shape, gain, own.q_norm.eps)
                for x, gain in zip((q, k), gains, strict=True)
            )
        q, k = (rotate(x, self._cos, self._sin, PLAIN) for x in (q, k))
        if own.arithmetic.fp8_kv:
            k, v = rounded_kv(k), rounded_kv(v)
        return self._plain(own.layer, q, k, v).flatten(1)


def _normed(x_NE: Tensor, own: RMSNorm) -> Tensor:
    def exact() -> Tensor:
        out_NE = torch.empty_like(x_NE)
        norm.add_norm(x_NE, None, own.weight.detach(), out_NE, own.eps)
        return out_NE

    def plain(x_NE: Tensor, gain_E: Tensor) -> Tensor:
        return F.rms_norm(x_NE, gain_E.shape, gain_E, own.eps)

    return value_of_later(exact, plain, x_NE, own.weight)


def _linear(x_NC: Tensor, own: Linear) -> Tensor:
    if own.arithmetic.fp8:
        return _in_fp8(x_NC, own)
    return product_of(
        lambda: invariant.product(x_NC, own.weight, own.bias), x_NC, own.weight, own.bias
    )


def _summed(x_NC: Tensor, own: Linear) -> Tensor:
    """Linear layer, summed as in `norm.add_norm`: in float32, in order, and rounded once."""
    if own.arithmetic.fp8:
        return _in_fp8(x_NC, own)
    return product_of(
        lambda: _sum(invariant.split_product(x_NC, own.weight), x_NC.dtype), x_NC, own.weight
    )


def _in_fp8(x_NC: Tensor, own: Linear) -> Tensor:
    return product_of(
        lambda: fp8.product(
            fp8.quantise_rows(x_NC), fp8.quantise_rows(own.weight), own.bias, x_NC.dtype
        ),
        x_NC,
        own.weight,
        own.bias,
    )


def _sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part
    return total.to(dtype)


def _gated(x_NE: Tensor, own: MLP) -> Tensor:
    if own.arithmetic.fp8:
        gate_up = _in_fp8(x_NE, own.gate_up_proj)
        return value_of_later(lambda: fp8.gated(gate_up), _act, gate_up)

    def plain(x_NE: Tensor, w: Tensor) -> Tensor:
        return _act(F.linear(x_NE, w))

    weight = own.gate_up_proj.weight
    return value_of_later(lambda: invariant.gated(x_NE, weight), plain, x_NE, weight)


def _act(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _experts(x_NE: Tensor, own: SparseMoE, routing: Routing | None) -> Tensor:
    with torch.no_grad():
        logits_NX = invariant.router_logits(x_NE, own)
    replay_Nk = None
    if routing is not None:
        top = own.gate.c.num_experts_per_tok
        chosen_Nk = routing.choose(own.place, own.gate.scores(x_NE), logits_NX, top)
        if routing.replay is not None:
            # Where nothing is replayed, the engine's kernel decides, as it did in the engine.
            is_told_N = (routing.replay[:, own.place] >= 0).any(-1)
            replay_Nk = chosen_Nk.where(is_told_N[:, None], -1)
    with torch.no_grad():
        slot_mapping_N = torch.arange(len(x_NE), dtype=torch.int32, device=x_NE.device)
        unread = slot_mapping_N.new_empty(len(x_NE), own.gate.c.num_experts_per_tok)
        parts, ids_Nk = expert_parts(
            x_NE, own, logits_NX, slot_mapping_N, unread, pdl=False, replay_Nk=replay_Nk
        )
    # The gradient is that of the experts that were used, even if the plain router would choose
    # others.
    used = Routing(replay=ids_Nk[:, None].expand(-1, own.place + 1, -1))
    return value_of(lambda: _sum(parts, x_NE.dtype), gradient_of=lambda: own(x_NE, used))
