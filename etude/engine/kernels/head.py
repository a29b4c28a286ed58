"""The LM head and the sampler: hidden states to sampled tokens in one pass over the vocabulary.

`logits` multiplies with the output matrix and stores, for every tile of the vocabulary, the largest
of its logits (divided by the temperature) and the sum of their exponentials relative to it.
`sample` then finds the tile in which the cumulative distribution crosses u, and reads only that
one. The logits stay in memory for callers that need all of them.

Shapes: B rows, E hidden size, V vocabulary, T tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra import cuda as gpu

TILE = 128
"""Tokens in a tile of the vocabulary."""


@triton.jit
def _logits(
    x, w, temperature, out, stats, B, V, E, T,
    BB: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BB + tl.arange(0, BB)
    tile = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    e = tl.arange(0, BE)[None, :]
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    sums = tl.zeros([BB, BN], tl.float32)
    for start in range(0, E, BE):
        hidden = tl.load(
            x + b[:, None] * E + start + e, mask=(b < B)[:, None] & (start + e < E), other=0
        )
        rows = tl.load(
            w + n[:, None].to(tl.int64) * E + start + e,
            mask=(n < V)[:, None] & (start + e < E),
            other=0,
        )
        sums = tl.dot(hidden, tl.trans(rows), sums)
    mask = (b < B)[:, None] & (n < V)[None, :]
    tl.store(out + b[:, None].to(tl.int64) * V + n[None, :], sums, mask=mask)
    warm = tl.load(temperature + b, mask=b < B, other=1.0)
    scaled = tl.where(
        (n < V)[None, :], sums / tl.where(warm == 0, 1.0, warm)[:, None], -float("inf")
    )
    top = tl.max(scaled, 1)
    total = tl.sum(tl.exp(scaled - top[:, None]), 1)
    tl.store(stats + (b * T + tile) * 2, top, mask=b < B)
    tl.store(stats + (b * T + tile) * 2 + 1, total, mask=b < B)


@triton.jit
def _sample(
    logits,
    stats,
    temperature,
    u,
    tokens,
    logprobs,
    V,
    T,
    TP: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    t = tl.arange(0, TP)
    tops = tl.load(stats + (row * T + t) * 2, mask=t < T, other=-float("inf"))
    totals = tl.load(stats + (row * T + t) * 2 + 1, mask=t < T, other=0)
    warm = tl.load(temperature + row)
    greedy = warm == 0
    top = tl.max(tops, 0)
    # float64: over a large vocabulary, float32 would shift the boundaries by more than the width of
    # a rare token.
    mass = totals.to(tl.float64) * tl.exp(tops - top).to(tl.float64)
    reached = tl.cumsum(mass, 0)
    total = tl.sum(mass, 0)
    target = tl.load(u + row) * total
    crossing = tl.minimum(tl.sum((reached <= target).to(tl.int32), 0), T - 1)
    tile = tl.where(greedy, tl.argmax(tops, 0), crossing)
    before = tl.sum(tl.where(t < tile, mass, 0.0), 0)
    i = tl.arange(0, BN)
    n = tile * BN + i
    value = tl.load(logits + row * V + n, mask=n < V, other=-float("inf")) / tl.where(
        greedy, 1.0, warm
    )
    p = tl.exp(value - top)
    inner = before + tl.cumsum(p.to(tl.float64), 0)
    # A tile's sum and the sum of its parts round differently, so the last token of positive
    # probability is the limit.
    last = tl.max(tl.where(p > 0, i, 0), 0)
    sampled = tl.minimum(tl.sum((inner <= target).to(tl.int32), 0), last)
    choice = tl.where(greedy, tl.argmax(value, 0), sampled)
    chosen = tl.sum(tl.where(i == choice, value, 0.0), 0)
    tl.store(tokens + row, tile * BN + choice)
    tl.store(logprobs + row, chosen - top - tl.log(total).to(tl.float32))


def num_tiles(vocabulary: int) -> int:
    return -(-vocabulary // TILE)


def logits(
    x_BE: Tensor,
    w_VE: Tensor,
    temperature_B: Tensor,
    out_BV: Tensor,
    stats_BT2: Tensor,
    pdl: bool = False,
) -> None:
    rows, size = x_BE.shape
    tiles = num_tiles(len(w_VE))
    # Measured: for one row loads in flight matter most, for many rows arithmetic.
    bb = max(16, min(128, int(triton.next_power_of_2(rows))))
    be, warps, stages = (64, 4, 4) if bb in (32, 64) else (128, 8, 3)
    _logits[(triton.cdiv(rows, bb), tiles)](
        x_BE, w_VE, temperature_B, out_BV, stats_BT2, rows, len(w_VE), size, tiles, bb, TILE, be,
        pdl, num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip


def tile_stats(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """The statistics that `logits` stores for each tile, for logits that were computed
    elsewhere."""
    rows, vocabulary = logits_BV.shape
    warm_B1 = torch.where(temperature_B == 0, 1.0, temperature_B)[:, None]
    padded = F.pad(logits_BV / warm_B1, (0, -vocabulary % TILE), value=-torch.inf)
    tiles_BTN = padded.view(rows, -1, TILE)
    top_BT1 = tiles_BTN.amax(-1, keepdim=True)
    total_BT1 = (tiles_BTN - top_BT1).exp().sum(-1, keepdim=True)
    return torch.cat((top_BT1, total_BT1), -1)


def sample(
    logits_BV: Tensor, stats_BT2: Tensor, temperature_B: Tensor, u_B: Tensor, tokens_B: Tensor,
    logprobs_B: Tensor, pdl: bool = False,
) -> None:  # fmt: skip
    """Sample a token for each row, where the cumulative distribution crosses u, with its log-prob;
    at temperature 0 the likeliest token."""
    rows, vocabulary = logits_BV.shape
    tiles = num_tiles(vocabulary)
    _sample[(rows,)](
        logits_BV, stats_BT2, temperature_B, u_B, tokens_B, logprobs_B, vocabulary, tiles,
        triton.next_power_of_2(tiles), TILE, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
