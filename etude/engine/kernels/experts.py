"""Mixture-of-experts layers: routing, and grouped products that read the weights of an active
expert once.

`route` turns the router's logits into the chosen experts and their shares, `group_by_expert` lists
for every expert the choices that selected it, and `grouped_gemm` multiplies each expert's weights
with its tokens. A choice is token * k + rank.

For few tokens, launching kernels and reading the experts dominate the time, so there are three
kernels of matrix-vector products instead of five: `router_logits`, `chosen_gated` and
`chosen_down`. Their programs recompute the experts of a token from its logits, which is faster than
waiting for a kernel that writes them to memory.

Shapes: B tokens, X experts, k experts of a token, E hidden size, I expert size.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as gpu

FEW_TOKENS = 8
"""Up to this many tokens are multiplied with their experts one by one."""

LOWEST = tl.constexpr(-(1 << 31))


@triton.jit
def _route(
    logits, ids, shares, record, slots, X, record_stride,
    XP: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr, RENORM: tl.constexpr,
    GIVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    x = tl.arange(0, XP)
    rank = tl.arange(0, TP)
    logit = tl.load(logits + row * X + x, mask=x < X, other=-float("inf")).to(tl.float32)
    # padding rows may hold anything, NaN too
    logit = tl.where(logit == logit, logit, 0.0)
    p = tl.exp(logit - tl.max(logit, 0))
    p = tl.where(x < X, p / tl.sum(p, 0), -1.0)
    chosen = tl.zeros([TP], tl.int32)
    share = tl.zeros([TP], tl.float32)
    for j in tl.static_range(TOP):
        best = tl.argmax(p, 0)
        value = tl.max(p, 0)
        if GIVEN:
            told = tl.load(ids + row * TOP + j)
            best = tl.where(told >= 0, told, best)
            value = tl.sum(tl.where(x == best, p, 0.0), 0)  # exact: only one term is not 0
        chosen = tl.where(rank == j, best, chosen)
        share = tl.where(rank == j, value, share)
        p = tl.where(x == best, -1.0, p)
    if RENORM:
        share = share / tl.sum(share, 0)
    slot = tl.load(slots + row).to(tl.int64)
    real = slot >= 0  # a padding row goes to no expert
    tl.store(
        record + slot * record_stride + rank,
        chosen.to(record.dtype.element_ty),
        mask=tl.where(real, rank, TOP) < TOP,
    )
    tl.store(ids + row * TOP + rank, tl.where(real, chosen, -1), mask=rank < TOP)
    tl.store(shares + row * TOP + rank, share, mask=rank < TOP)


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


@triton.jit
def _router_logits(
    x, gain, w, normed, logits, E, X, eps,
    NORM: tl.constexpr, SIZE: tl.constexpr, BX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    expert = tl.program_id(0) * BX + tl.arange(0, BX)
    e = tl.arange(0, SIZE)
    # Weights do not depend on the previous kernel, so they are loaded while it ends.
    inside = (expert < X)[:, None] & (e < E)[None, :]
    tile = tl.load(w + expert[:, None].to(tl.int64) * E + e[None, :], mask=inside, other=0)
    if NORM:
        scale = tl.load(gain + e, mask=e < E, other=0).to(tl.float32)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    value = tl.load(x + row * E + e, mask=e < E, other=0).to(tl.float32)
    if NORM:
        value = value * tl.rsqrt(tl.sum(value * value) / E + eps)
        rounded = (value * scale).to(normed.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(normed + row * E + e, rounded, mask=e < E)
        value = rounded.to(tl.float32)
    sums = tl.sum(tile.to(tl.float32) * value[None, :], 1)
    tl.store(logits + row * X + expert, sums, mask=expert < X)


@triton.jit
def _ordered(logits, row, X, XP: tl.constexpr, COPIES: tl.constexpr):
    """The logits of a token as integers in the same order [COPIES, XP], and the expert of each. One
    copy for every warp, so that no warp waits for another."""
    x = tl.broadcast_to(tl.arange(0, XP)[None, :], (COPIES, XP))
    # .cg: another multiprocessor wrote them, maybe after this kernel began.
    logit = tl.load(logits + row * X + x, mask=x < X, other=0.0, cache_modifier=".cg")
    logit = tl.where(tl.abs(logit) > 0, logit, 0.0)  # NaN and -0 count as 0
    return tl.where(x < X, _flipped(logit.to(tl.int32, bitcast=True)), LOWEST), x


@triton.jit
def _flipped(bits):
    """Convert the bits of a float to an integer in the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best(key, x, XP: tl.constexpr):
    """For each copy the largest key, its expert (the first of several), and the keys without it."""
    top = tl.max(key, 1)
    best = tl.min(tl.where(key == top[:, None], x, XP), 1)
    return top, best, tl.where(x == best[:, None], LOWEST, key)


@triton.jit
def _chosen(
    logits, row, X, XP: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr, COPIES: tl.constexpr,
    RENORM: tl.constexpr,
):  # fmt: skip
    """The experts of a token and their shares, as in `_route`; from TOP to TP both are 0."""
    key, x = _ordered(logits, row, X, XP, COPIES)
    top = tl.max(key, 1)
    logit, best_logit = _flipped(key), _flipped(top)
    best_logit = best_logit.to(tl.float32, bitcast=True)
    p = tl.exp(logit.to(tl.float32, bitcast=True) - best_logit[:, None])
    total = tl.sum(tl.where(x < X, p, 0.0), 1)
    rank = tl.broadcast_to(tl.arange(0, TP)[None, :], (COPIES, TP))
    ids = tl.zeros([COPIES, TP], tl.int32)
    shares = tl.zeros([COPIES, TP], tl.float32)
    for j in tl.static_range(TOP):
        top, best, key = _best(key, x, XP)
        share = tl.exp(_flipped(top).to(tl.float32, bitcast=True) - best_logit) / total
        ids = tl.where(rank == j, best[:, None], ids)
        shares = tl.where(rank == j, share[:, None], shares)
    if RENORM:
        shares = shares / tl.sum(shares, 1)[:, None]
    return tl.max(ids, 0), tl.max(shares, 0)


@triton.jit
def _chosen_gated(
    x, w, logits, slots, act, N, C, X,
    TOP: tl.constexpr, XP: tl.constexpr, COPIES: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some rows of one expert of a token. The programs of all tokens run concurrently: an expert
    shared by several is read from memory once, and then from the L2 cache."""
    pair = tl.program_id(0)
    row = (pair // TOP).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.arange(0, BC)
    padding = tl.load(slots + row) < 0
    if PDL:
        # In this order, so that the router is done when `_chosen_down` begins.
        gpu.gdc_wait()
        gpu.gdc_launch_dependents()
    if padding:  # padding goes to no expert
        return
    key, experts = _ordered(logits, row, X, XP, COPIES)
    for _ in range(pair % TOP):
        top, best, key = _best(key, experts, XP)
    top, best, key = _best(key, experts, XP)
    expert = tl.max(best, 0).to(tl.int64)
    inside = (n < N)[:, None]
    gates = w + (expert * (2 * N) + n[:, None]) * C
    ups = gates + N.to(tl.int64) * C
    sums = tl.zeros([BN, BC // 8], tl.float32)
    sums_up = tl.zeros([BN, BC // 8], tl.float32)
    for start in tl.range(0, C, BC, num_stages=STAGES):
        column = start + c
        tile = tl.load(gates + column[None, :], mask=inside & (column < C)[None, :], other=0)
        tile_up = tl.load(ups + column[None, :], mask=inside & (column < C)[None, :], other=0)
        value = tl.load(x + row * C + column, mask=column < C, other=0).to(tl.float32)[None, :]
        sums += tl.sum(tl.reshape(tile.to(tl.float32) * value, (BN, BC // 8, 8)), 2)
        sums_up += tl.sum(tl.reshape(tile_up.to(tl.float32) * value, (BN, BC // 8, 8)), 2)
    result = tl.sum(sums, 1)
    result = result * tl.sigmoid(result) * tl.sum(sums_up, 1)
    tl.store(act + pair.to(tl.int64) * N + n, result.to(act.dtype.element_ty), mask=n < N)


@triton.jit
def _chosen_down(
    act, w, logits, slots, record, out, N, C, X, record_stride,
    TOP: tl.constexpr, TP: tl.constexpr, XP: tl.constexpr, COPIES: tl.constexpr,
    RENORM: tl.constexpr, ADD: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some outputs of a token, summed over all of its experts. Axes: TP experts, TOP of them real,
    BN outputs, BC inner."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    ids, shares = _chosen(logits, row, X, XP, TOP, TP, COPIES, RENORM)
    rank = tl.arange(0, TP)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.arange(0, BC)[None, None, :]
    inside = (tl.where(slot < 0, N, n) < N)[None, :, None]
    there = (rank < TOP)[:, None, None]
    inside = inside & there
    rows = w + (ids.to(tl.int64)[:, None, None] * N + n[None, :, None]) * C
    inputs = act + (row * TOP + rank)[:, None, None] * C
    # The router was done when `_chosen_gated` let this kernel begin: the experts are known, and are
    # loaded while that one ends.
    tile = tl.load(rows + c, mask=inside & (c < C), other=0)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    if slot < 0:  # padding
        return
    sums = tl.zeros([TP, BN, BC // 8], tl.float32)
    for start in range(0, C, BC):
        column = start + c
        value = tl.load(inputs + column, mask=there & (column < C), other=0).to(tl.float32)
        sums += tl.sum(tl.reshape(tile.to(tl.float32) * value, (TP, BN, BC // 8, 8)), 3)
        column += BC
        tile = tl.load(rows + column, mask=inside & (column < C), other=0)
    # Rounded where `_grouped_gemm` and the sum of its parts round.
    part = (tl.sum(sums, 2) * shares[:, None]).to(out.dtype.element_ty).to(tl.float32)
    result = tl.sum(part, 0).to(out.dtype.element_ty)
    place = out + row * N + n
    if ADD:
        result = result.to(tl.float32) + tl.load(place, mask=n < N, other=0).to(tl.float32)
    tl.store(place, result.to(out.dtype.element_ty), mask=n < N)
    if tl.program_id(1) == 0:
        told = record + slot * record_stride + rank
        tl.store(told, ids.to(record.dtype.element_ty), mask=rank < TOP)


def route(
    logits_BX: Tensor, ids_Bk: Tensor, shares_Bk: Tensor, record_Sk: Tensor, slot_mapping_B: Tensor,
    *, renormalise: bool, given: bool = False, pdl: bool = False,
) -> None:  # fmt: skip
    """Route every token to its k likeliest experts, also written to `record` at the token's slot
    (-1: nowhere). `given`: `ids` holds the experts to use instead, or -1 for the likeliest."""
    (rows, experts), top = logits_BX.shape, ids_Bk.shape[1]
    _route[(rows,)](
        logits_BX, ids_Bk, shares_Bk, record_Sk, slot_mapping_B, experts, record_Sk.stride(0),
        triton.next_power_of_2(experts), top, triton.next_power_of_2(top), renormalise, given, pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def group_by_expert(
    ids_Bk: Tensor, counts_X: Tensor, choices_XB: Tensor, pdl: bool = False
) -> None:
    """List the choices that selected each expert, in order, so that the same batch always gives the
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
    """Grouped matrix product, one group for each expert. `gated`: x [B, E] -> silu(gate) * up [B k,
    I]; otherwise x [B k, I] -> [B k, E], times the token's share."""
    experts, outputs, inner = w_XNC.shape
    outputs //= 2 if gated else 1
    rows, top = shares_Bk.shape
    bb = 16 if rows * top <= 12 * experts else 32 if rows * top <= 48 * experts else 64
    _grouped_gemm[(triton.cdiv(outputs, 64), experts)](
        x, w_XNC, counts_X, choices_XB, shares_Bk, out, choices_XB.stride(0), outputs, inner,
        top if gated else 1, gated, bb, 64, 128, pdl, num_warps=4, num_stages=3, launch_pdl=pdl,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChosenConfig:
    """The launch configuration of products with the chosen experts: outputs (of each of the
    experts) and inner size of one program, and blocks of the inner axis in flight."""

    outputs: int
    inner: int
    warps: int = 4
    stages: int = 1


GATED = ChosenConfig(16, 256, stages=3)
DOWN = ChosenConfig(4, 256)


def router_logits(
    x_BE: Tensor, w_XE: Tensor, logits_BX: Tensor, normed_BE: Tensor, *,
    norm: tuple[Tensor, float] | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """The router's product for few tokens. `norm`: gain and epsilon of an RMSNorm before it, whose
    result goes to `normed`."""
    (rows, size), experts = x_BE.shape, len(w_XE)
    gain, eps = norm or (w_XE, 0.0)
    _router_logits[(experts, rows)](
        x_BE, gain, w_XE, normed_BE, logits_BX, size, experts, eps, norm is not None,
        triton.next_power_of_2(size), 1, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def chosen_gated(
    x_BE: Tensor, w_XNE: Tensor, logits_BX: Tensor, slot_mapping_B: Tensor, act_BkI: Tensor,
    *, config: ChosenConfig = GATED, pdl: bool = False,
) -> None:  # fmt: skip
    """silu(gate) * up of the k likeliest experts of every token, in the order of their shares;
    nothing where the slot is -1."""
    (rows, top, inner), experts = act_BkI.shape, len(w_XNE)
    _chosen_gated[(rows * top, triton.cdiv(inner, config.outputs))](
        x_BE, w_XNE, logits_BX, slot_mapping_B, act_BkI, inner, x_BE.shape[1], experts, top,
        triton.next_power_of_2(experts), config.warps, config.outputs, config.inner, config.stages,
        pdl, num_warps=config.warps, launch_pdl=pdl,
    )  # fmt: skip


def chosen_down(
    act_BkI: Tensor, w_XEI: Tensor, logits_BX: Tensor, slot_mapping_B: Tensor, record_Sk: Tensor,
    out_BE: Tensor, *, renormalise: bool, add: bool = False, config: ChosenConfig = DOWN,
    pdl: bool = False,
) -> None:  # fmt: skip
    """The sum of the outputs of a token's experts on the result of `chosen_gated`, weighted by
    their shares; with `add`, added to the existing content of `out`. `record` takes the experts, as
    in `route`. Only valid directly after `chosen_gated`, because it begins early."""
    (rows, top, inner), (experts, size) = act_BkI.shape, w_XEI.shape[:2]
    _chosen_down[(rows, triton.cdiv(size, config.outputs))](
        act_BkI, w_XEI, logits_BX, slot_mapping_B, record_Sk, out_BE, size, inner, experts,
        record_Sk.stride(0), top, triton.next_power_of_2(top), triton.next_power_of_2(experts),
        config.warps, renormalise, add, config.outputs, config.inner, pdl, num_warps=config.warps,
        launch_pdl=pdl,
    )  # fmt: skip
