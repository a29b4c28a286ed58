"""Batch-invariant kernels: the bits of a row do not depend on how many rows are computed with it.

On Hopper every product instruction sums the inner axis 16 columns at a time, in order, onto the
accumulator, so tiles of any size give the same bits: they are chosen by the number of rows, for
speed. Two things must not depend on the rows: the number of splits of the inner axis, and the order
of sums outside products. So

- a product is split by its matrix alone, and its splits are summed in order;
- attention iterates over blocks of keys from the first one on, for a single token as for a prompt,
  and the weights of a block are summed as integers, for which the order does not matter;
- the sums of the softmax over the vocabulary come from tiles of one size.

The rest of `fused` works row by row already, and the products of experts have one split.

`tests/engine/invariance_checks.py` checks this on a device.

Shapes as in `fused`: N new tokens, C inputs of a product, M outputs, S splits, R sampled rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as gpu

from etude.engine.kernels import fp8, head, linear
from etude.engine.kernels.attention import (
    LOG2E,
    PREFILL_ROWS,
    AttentionLayerConfig,
    _rotated,
    group_rows,
)
from etude.engine.kernels.fused import (
    INVARIANT_SUPPORTED,
    ForwardContext,
    FusedForward,
    expert_parts,
)
from etude.engine.kernels.linear import GemmConfig
from etude.engine.kernels.pages import Pages, mix, pointers, read, row_of, scores, store_fp8
from etude.model.experts import SparseMoE
from etude.model.fp8 import Quantised

BLOCK = 64
"""Keys that attention adds at a time."""
FP8_ROWS = 64
"""Rows of a tile of queries over FP8 keys, for a single token as for a prompt. From 64 rows on the
instruction reads keys from shared memory, in order. A smaller one reads them from registers, where
Triton places keys that were bytes four to a thread instead of two, so that it sums other columns at
a time."""
UNIT = tl.constexpr(1 << 24)
"""A weight of 1 as an integer: the sum of a block still fits into 32 bits."""


@triton.jit
def _attend(
    q, k_cache, v_cache, k_scales, v_scales, table, kh, last, limit,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend to the tokens up to `last`; `limit` is the last position that each row sees."""
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for first in range(0, last, BLOCK):
        position = first + tl.arange(0, BLOCK)
        seen = position < last
        k, v, k_scale, v_scale = read(
            k_cache, v_cache, k_scales, v_scales, table, first, last, seen, kh, K, PAGE, D, BLOCK
        )
        visible = seen[None, :] & (position[None, :] <= limit[:, None])
        score = tl.where(visible, scores(q, k, k_scale), -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum((p * UNIT).to(tl.int32), 1).to(tl.float32)
        top, acc = new_top, mix(q, p, v, v_scale, acc * shrink[:, None])
    return acc / (total / UNIT)[:, None]


@triton.jit
def _prefill(
    qkv, k_cache, v_cache, k_scales, v_scales, table, ends, lengths, tile_sequence, tile_first, out,
    stride, scale, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, kh = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = H // K
    sequence = tl.load(tile_sequence + tile).to(tl.int64)
    end, length = tl.load(ends + sequence), tl.load(lengths + sequence)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    if tl.load(tile_first + tile) >= end:  # padding
        return
    r, d = tl.arange(0, ROWS), tl.arange(0, D)
    n = tl.load(tile_first + tile) + r // G
    head = kh * G + r % G
    inside = (n < end)[:, None]
    limit = tl.maximum(length - end + n, 0)
    last = tl.minimum(length, tl.max(limit) + 1)
    q = tl.load(
        qkv + n[:, None].to(tl.int64) * ((H + 2 * K) * D) + head[:, None] * D + d[None, :],
        mask=inside,
        other=0,
    )
    q = (q.to(tl.float32) * scale * LOG2E).to(q.dtype)
    mixed = _attend(
        q,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        table + sequence * tl.load(stride),
        kh,
        last,
        limit,
        K,
        D,
        PAGE,
        ROWS,
        BLOCK,
    )
    place = (n[:, None].to(tl.int64) * H + head[:, None]) * D + d[None, :]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _decode(
    qkv, q_gain, k_gain, rope, k_cache, v_cache, k_scales, v_scales, table, lengths, slots, out,
    stride, scale, eps, H: tl.constexpr, K: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kh, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    G: tl.constexpr = H // K
    length, slot = tl.load(lengths + sequence), tl.load(slots + sequence)
    mine = table + sequence * tl.load(stride)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    if length == 0:  # padding
        return
    g, d = tl.arange(0, GP), tl.arange(0, D)
    inside = (g < G)[:, None]
    row = qkv + sequence * (H + 2 * K) * D
    turn = rope + (length - 1).to(tl.int64) * (2 * D)
    q = _rotated(row + (kh * G + g)[:, None] * D, q_gain, turn, inside, eps, D, NORM)
    q = (q.to(qkv.dtype.element_ty).to(tl.float32) * scale * LOG2E).to(qkv.dtype.element_ty)
    # One key is rotated in as many rows as there are queries, so that the sum of its squares is
    # taken as in `write`.
    k = _rotated(row + (H + kh + g * 0)[:, None] * D, k_gain, turn, (g == 0)[:, None], eps, D, NORM)
    k = k.to(qkv.dtype.element_ty)
    v = tl.load(row + (H + K + kh) * D + d)
    number = row_of(slot, kh, K, PAGE)
    if k_cache.dtype.element_ty == tl.float8e4nv:
        store_fp8(k, k_cache, k_scales, number + g * 0, g == 0, PAGE, D, False)
        numbers = number + tl.arange(0, 1)
        v = tl.reshape(v, [1, D])
        store_fp8(v, v_cache, v_scales, numbers, numbers >= 0, PAGE, D, True)
    else:
        place = k_cache + number * D + (g * 0)[:, None] + d[None, :]
        tl.store(place, k, mask=(g == 0)[:, None])
        tl.store(v_cache + number * D + d, v)
    tl.debug_barrier()  # other threads read below what is written here
    limit = tl.full([GP], 2147483647, tl.int32)
    mixed = _attend(
        q, k_cache, v_cache, k_scales, v_scales, mine, kh, length, limit, K, D, PAGE, GP, BLOCK
    )
    place = (sequence * H + kh * G + g)[:, None] * D + d[None, :]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _logprobs(logits, stats, temperature, tokens, out, V, T, TP: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    t = tl.arange(0, TP)
    tops = tl.load(stats + (row * T + t) * 2, mask=t < T, other=-float("inf"))
    totals = tl.load(stats + (row * T + t) * 2 + 1, mask=t < T, other=0)
    top = tl.max(tops, 0)
    total = tl.sum(totals.to(tl.float64) * tl.exp(tops - top).to(tl.float64), 0)
    warm = tl.load(temperature + row)
    # of a padding row, any token
    token = tl.minimum(tl.maximum(tl.load(tokens + row), 0), V - 1)
    value = tl.load(logits + row * V + token) / tl.where(warm == 0, 1.0, warm)
    tl.store(out + row, value - top - tl.log(total).to(tl.float32))


def num_splits(outputs: int, inner: int) -> int:
    """The number of splits of the inner axis: enough for a single tile of rows to keep half the
    multiprocessors busy; a split has 256 columns or more."""
    splits, programs = 1, triton.cdiv(outputs, 64)
    while programs * splits < 64 and inner // (2 * splits) >= 256 and inner % (256 * splits) == 0:
        splits *= 2
    return splits


def gemm_config(rows: int, *, split_k: int = 1, gated: bool = False) -> GemmConfig:
    """The configuration for this number of rows, measured on an H200. The bits depend on `split_k`
    alone."""
    if rows <= 16:
        return GemmConfig(16, 32, 128, split_k)
    if rows <= 64:
        return GemmConfig(64, 64, 128, split_k)
    if gated:
        return GemmConfig(128, 64, 64, split_k, warps=8, stages=4 if rows <= 256 else 3)
    if rows <= 256:
        return GemmConfig(64, 128, 128, split_k)
    if rows <= 512:
        return GemmConfig(128, 128 if split_k == 1 else 64, 64, split_k, warps=8)
    return GemmConfig(128, 128, 64, split_k, warps=8, stages=3)


def prefill(
    params: AttentionLayerConfig, qkv: Tensor, k: Pages, v: Pages, blocks: Tensor, stride: Tensor,
    ends_B: Tensor, lengths_B: Tensor, sequence_T: Tensor, first_T: Tensor, out: Tensor, *,
    page_size: int, pdl: bool = False,
) -> None:  # fmt: skip
    """`attention.prefill`, batch-invariant."""
    _prefill[(len(sequence_T), params.num_kv_heads)](
        qkv, *pointers(k, v), blocks, ends_B, lengths_B, sequence_T, first_T, out, stride,
        params.scale, params.num_q_heads, params.num_kv_heads, params.head_dim, page_size,
        PREFILL_ROWS, BLOCK, pdl, num_warps=4, num_stages=3, launch_pdl=pdl,
    )  # fmt: skip


def decode(
    params: AttentionLayerConfig, qkv: Tensor, k: Pages, v: Pages, blocks: Tensor, stride: Tensor,
    lengths_B: Tensor, slot_mapping_B: Tensor, out: Tensor, *, page_size: int, pdl: bool = False,
) -> None:  # fmt: skip
    """`attention.decode` without splits, batch-invariant."""
    # Bytes would change the order in which smaller tiles sum: see `FP8_ROWS`.
    rows = max(group_rows(params), FP8_ROWS) if isinstance(k, Quantised) else group_rows(params)
    gains = [qkv if gain is None else gain for gain in (params.q_gain_D, params.k_gain_D)]
    _decode[(params.num_kv_heads, len(lengths_B))](
        qkv, *gains, params.rope, *pointers(k, v), blocks, lengths_B, slot_mapping_B, out, stride,
        params.scale, params.eps, params.num_q_heads, params.num_kv_heads, rows, params.head_dim,
        page_size, BLOCK, params.q_gain_D is not None, pdl, num_warps=4, num_stages=3,
        launch_pdl=pdl,
    )  # fmt: skip


def logits(
    x_RE: Tensor, w_VE: Tensor, temperature_R: Tensor, out_RV: Tensor, stats_RT2: Tensor, pdl: bool
) -> None:
    """`head.logits` in tiles of one size."""
    rows, size = x_RE.shape
    tiles = head.num_tiles(len(w_VE))
    head._logits[(triton.cdiv(rows, 64), tiles)](
        x_RE, w_VE, temperature_R, out_RV, stats_RT2, rows, len(w_VE), size, tiles, 64, head.TILE,
        64, pdl, num_warps=4, num_stages=4, launch_pdl=pdl,
    )  # fmt: skip


def logprobs(
    logits_RV: Tensor,
    stats_RT2: Tensor,
    temperature_R: Tensor,
    tokens_R: Tensor,
    out_R: Tensor,
    pdl: bool,
) -> None:
    """The log-probs of given tokens, from the statistics that `logits` wrote."""
    rows, vocabulary = logits_RV.shape
    tiles = head.num_tiles(vocabulary)
    _logprobs[(rows,)](
        logits_RV, stats_RT2, temperature_R, tokens_R, out_R, vocabulary, tiles,
        triton.next_power_of_2(tiles), pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def product(x_NC: Tensor, w_MC: Tensor, bias_M: Tensor | None = None, pdl: bool = False) -> Tensor:
    out_NM = x_NC.new_empty(len(x_NC), len(w_MC))
    linear.gemm(x_NC, w_MC, out_NM, config=gemm_config(len(x_NC)), bias_N=bias_M, pdl=pdl)
    return out_NM


def gated(x_NC: Tensor, w_MC: Tensor, pdl: bool = False) -> Tensor:
    out_NM = x_NC.new_empty(len(x_NC), len(w_MC) // 2)
    linear.gemm(x_NC, w_MC, out_NM, config=gemm_config(len(x_NC), gated=True), gated=True, pdl=pdl)
    return out_NM


def split_product(x_NC: Tensor, w_MC: Tensor, pdl: bool = False) -> Tensor:
    """A split-K product: SNM in float32, which `norm.add_norm` sums in order."""
    count = num_splits(*w_MC.shape)
    out_SNM = x_NC.new_empty(count, len(x_NC), len(w_MC), dtype=torch.float32)
    linear.gemm(x_NC, w_MC, out_SNM, config=gemm_config(len(x_NC), split_k=count), pdl=pdl)
    return out_SNM


def router_logits(x_NE: Tensor, layer: SparseMoE, pdl: bool = False) -> Tensor:
    """The router's product, in tiles of one size."""
    logits_NX = x_NE.new_empty(len(x_NE), len(layer.gate.weight), dtype=torch.float32)
    linear.gemm(x_NE, layer.gate.weight, logits_NX, config=gemm_config(len(x_NE)), pdl=pdl)
    return logits_NX


class BatchInvariantForward(FusedForward):
    """The forward pass on batch-invariant kernels."""

    supported = INVARIANT_SUPPORTED

    def hidden(
        self,
        tokens_N: Tensor,
        slot_mapping_N: Tensor,
        sampled: Tensor,
        context: ForwardContext,
        record: Tensor | None,
        pdl: bool,
    ) -> Tensor:
        x_NE = self._embedded(tokens_N, sampled)
        return self._rows(x_NE, slot_mapping_N, context.attend, record, pdl)

    def _product(self, x_NC: Tensor, w: Tensor, bias: Tensor | None, pdl: bool) -> Tensor:
        return product(x_NC, w, bias, pdl)

    def _gated(self, x_NC: Tensor, w: Tensor, pdl: bool) -> Tensor:
        return gated(x_NC, w, pdl)

    def _split_product(self, x_NC: Tensor, w: Tensor, pdl: bool) -> Tensor:
        return split_product(x_NC, w, pdl)

    def _fp8_summands(self, x: Quantised, w: Quantised, dtype: torch.dtype, pdl: bool) -> Tensor:
        return fp8.product(x, w, None, dtype, pdl=pdl)[None]

    def _experts(
        self, x_NE: Tensor, layer: SparseMoE, slot_mapping_N: Tensor, record_Sk: Tensor, pdl: bool
    ) -> Tensor:
        logits_NX = router_logits(x_NE, layer, pdl)
        return expert_parts(x_NE, layer, logits_NX, slot_mapping_N, record_Sk, pdl)[0]

    def sample(
        self, hidden_RE: Tensor, temperature_R: Tensor, u_R: Tensor, logits_RV: Tensor,
        tokens_R: Tensor, logprobs_R: Tensor, pdl: bool,
    ) -> None:  # fmt: skip
        stats = logits_RV.new_empty(len(hidden_RE), head.num_tiles(len(self.head_VE)), 2)
        logits(hidden_RE, self.head_VE, temperature_R, logits_RV, stats, pdl)
        head.sample(logits_RV, stats, temperature_R, u_R, tokens_R, logprobs_R, pdl)
        # `head.sample` rounds differently than the trainer's kernel, so that kernel overwrites its
        # log-probs.
        logprobs(logits_RV, stats, temperature_R, tokens_R, logprobs_R, pdl)
