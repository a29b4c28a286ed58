"""Mixture-of-experts layers: routing, and grouped products that read the weights of an active
expert once.

`route` takes the router's logits to the chosen experts and their shares, `group_by_expert` lists
for every expert the choices that fell on it, and `grouped_gemm` multiplies each expert's weights
with its tokens. A choice is token * k + rank.

Shapes: B tokens, X experts, k experts of a token, E hidden size, I expert size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as gpu


@triton.jit
def _route(
    logits, ids, shares, record, slots, X, record_stride,
    XP: tl.constexpr, TOP: tl.constexpr, RENORM: tl.constexpr, GIVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    x = tl.arange(0, XP)
    rank = tl.arange(0, TOP)
    logit = tl.load(logits + row * X + x, mask=x < X, other=-float("inf")).to(tl.float32)
    # rows that only fill the batch up may hold anything, NaN too
    logit = tl.where(logit == logit, logit, 0.0)
    p = tl.exp(logit - tl.max(logit, 0))
    p = tl.where(x < X, p / tl.sum(p, 0), -1.0)
    chosen = tl.zeros([TOP], tl.int32)
    share = tl.zeros([TOP], tl.float32)
    for j in tl.static_range(TOP):
        best = tl.argmax(p, 0)
        value = tl.max(p, 0)
        if GIVEN:
            told = tl.load(ids + row * TOP + j)
            best = tl.where(told >= 0, told, best)
            value = tl.sum(tl.where(x == best, p, 0.0), 0)  # exact: only one of them is not 0
        chosen = tl.where(rank == j, best, chosen)
        share = tl.where(rank == j, value, share)
        p = tl.where(x == best, -1.0, p)
    if RENORM:
        share = share / tl.sum(share, 0)
    slot = tl.load(slots + row).to(tl.int64)
    real = slot >= 0  # a row that only fills the batch up goes to no expert
    tl.store(
        record + slot * record_stride + rank,
        chosen.to(record.dtype.element_ty),
        mask=tl.where(real, rank, TOP) < TOP,
    )
    tl.store(ids + row * TOP + rank, tl.where(real, chosen, -1))
    tl.store(shares + row * TOP + rank, share)


@triton.jit
def _group_by_expert(
    ids, counts, choices, num_choices, capacity, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    expert = tl.program_id(0)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    count = 0
    for start in range(0, num_choices, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        mine = (tl.load(ids + choice, mask=choice < num_choices, other=-1) == expert).to(tl.int32)
        place = count + tl.cumsum(mine, 0) - 1
        tl.store(choices + expert * capacity + place, choice, mask=mine == 1)
        count += tl.sum(mine, 0)
    tl.store(counts + expert, count)


@triton.jit
def _grouped_gemm(
    x, w, counts, choices, shares, out, capacity, N, C, PER_ROW: tl.constexpr, GATED: tl.constexpr,
    BB: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    expert = tl.program_id(1).to(tl.int64)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    count = tl.load(counts + expert)
    c = tl.arange(0, BC)[None, :]
    size = N * C
    rows = w + expert * size * (2 if GATED else 1) + n[:, None].to(tl.int64) * C
    for first in range(0, count, BB):
        i = first + tl.arange(0, BB)
        choice = tl.load(choices + expert * capacity + i, mask=i < count, other=0)
        inputs = x + (choice // PER_ROW)[:, None].to(tl.int64) * C
        sums = tl.zeros([BB, BN], tl.float32)
        sums_up = tl.zeros([BB, BN], tl.float32)
        for start in range(0, C, BC):
            column = start + c
            value = tl.load(inputs + column, mask=(i < count)[:, None] & (column < C), other=0)
            tile = tl.load(rows + column, mask=(n < N)[:, None] & (column < C), other=0)
            sums = tl.dot(value, tl.trans(tile), sums)
            if GATED:
                tile_up = tl.load(
                    rows + size + column, mask=(n < N)[:, None] & (column < C), other=0
                )
                sums_up = tl.dot(value, tl.trans(tile_up), sums_up)
        if GATED:
            sums = sums * tl.sigmoid(sums) * sums_up
        else:
            sums = sums * tl.load(shares + choice, mask=i < count, other=0)[:, None]
        place = choice[:, None].to(tl.int64) * N + n[None, :]
        tl.store(
            out + place, sums.to(out.dtype.element_ty), mask=(i < count)[:, None] & (n < N)[None, :]
        )


def route(
    logits_BX: Tensor, ids_Bk: Tensor, shares_Bk: Tensor, record_Sk: Tensor, slot_mapping_B: Tensor,
    *, renormalise: bool, given: bool = False, pdl: bool = False,
) -> None:  # fmt: skip
    """Route every token to its k likeliest experts, also written to `record` at the token's slot
    (-1: nowhere). `given`: `ids` holds those to take instead, -1 where the likeliest are wanted."""
    rows, experts = logits_BX.shape
    _route[(rows,)](
        logits_BX, ids_Bk, shares_Bk, record_Sk, slot_mapping_B, experts, record_Sk.stride(0),
        triton.next_power_of_2(experts), ids_Bk.shape[1], renormalise, given, pdl, num_warps=1,
        launch_pdl=pdl,
    )  # fmt: skip


def group_by_expert(
    ids_Bk: Tensor, counts_X: Tensor, choices_XB: Tensor, pdl: bool = False
) -> None:
    """List the choices that fell on each expert, in order, so that the same batch always gives the
    same sums."""
    block = min(1024, triton.next_power_of_2(ids_Bk.numel()))
    _group_by_expert[(len(counts_X),)](
        ids_Bk,
        counts_X,
        choices_XB,
        ids_Bk.numel(),
        choices_XB.stride(0),
        block,
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def grouped_gemm(
    x: Tensor, w_XNC: Tensor, counts_X: Tensor, choices_XB: Tensor, shares_Bk: Tensor, out: Tensor,
    *, gated: bool, pdl: bool = False,
) -> None:  # fmt: skip
    """Grouped matrix product, one group an expert. `gated`: x [B, E] -> silu(gate) * up [B k, I];
    otherwise x [B k, I] -> [B k, E], times the token's share."""
    experts, outputs, inner = w_XNC.shape
    outputs //= 2 if gated else 1
    rows, top = shares_Bk.shape
    bb = 16 if rows * top <= 12 * experts else 32 if rows * top <= 48 * experts else 64
    _grouped_gemm[(triton.cdiv(outputs, 64), experts)](
        x, w_XNC, counts_X, choices_XB, shares_Bk, out, choices_XB.stride(0), outputs, inner,
        top if gated else 1, gated, bb, 64, 128, pdl, num_warps=4, num_stages=3, launch_pdl=pdl,
    )  # fmt: skip
