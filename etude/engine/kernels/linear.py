"""Products with a weight matrix for few rows, where reading the weights once dominates the time.

`gemv` is for a single row: every program streams a few rows of the matrix, begins before its input
is ready (programmatic dependent launch), and includes the norm before it and the activation or the
sum after it. `gemm` is for more rows, on the tensor cores; a small matrix is also split along its
inner axis (split-K), so that all multiprocessors have work, and `norm.add_norm` sums the splits.

Shapes: B rows, C inputs, N outputs, S splits. Weights are [N, C]; a gated pair is [2 N, C], gates
first.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as gpu

FP8_SUM = tl.constexpr(128)


@triton.jit
def _prefetch(w, first, size, LINES: tl.constexpr):
    """Prefetch LINES lines of 64 two-byte numbers, from `first` on."""
    place = tl.minimum(first + tl.arange(0, LINES) * 64, size - 64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [w + place],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _eighths(tile, value, BN: tl.constexpr, BC: tl.constexpr):
    """The products of a tile with a row, eight neighbours summed."""
    return tl.sum(tl.reshape(tile.to(tl.float32) * value[None, :], (BN, BC // 8, 8)), 2)


@triton.jit
def _gemv(
    x, gain, w, bias, out, C, N, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.arange(0, BC)
    rows = w + n[:, None].to(tl.int64) * C
    upper = rows + N.to(tl.int64) * C
    inside = (n < N)[:, None]
    # The first tile does not depend on the previous kernel, so it is loaded while that one ends.
    tile = tl.load(rows + c[None, :], mask=inside & (c < C)[None, :], other=0)
    if GATED:
        tile_up = tl.load(upper + c[None, :], mask=inside & (c < C)[None, :], other=0)
    if LINES:  # prefetch the other tiles into the L2 cache
        _prefetch(w, tl.program_id(0).to(tl.int64) * BN * C, N.to(tl.int64) * C, LINES)
    if NORM:
        scales = tl.load(gain + c, mask=c < C, other=0).to(tl.float32)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    value = tl.load(x + c, mask=c < C, other=0).to(tl.float32)
    if NORM:
        squares = tl.sum(value * value)
        for start in range(BC, C, BC):
            more = tl.load(x + start + c, mask=start + c < C, other=0).to(tl.float32)
            squares += tl.sum(more * more)
        shrink = tl.rsqrt(squares / C + eps)
    # A thread sums its eight neighbours at once, which halves the registers, so that more programs
    # are resident at a time.
    sums = tl.zeros([BN, BC // 8], tl.float32)
    sums_up = tl.zeros([BN, BC // 8], tl.float32)
    for start in range(0, C, BC):
        if NORM:
            value = (value * shrink * scales).to(w.dtype.element_ty).to(tl.float32)
        sums += _eighths(tile, value, BN, BC)
        if GATED:
            sums_up += _eighths(tile_up, value, BN, BC)
        column = start + BC + c
        tile = tl.load(rows + column[None, :], mask=inside & (column < C)[None, :], other=0)
        if GATED:
            tile_up = tl.load(upper + column[None, :], mask=inside & (column < C)[None, :], other=0)
        value = tl.load(x + column, mask=column < C, other=0).to(tl.float32)
        if NORM:
            scales = tl.load(gain + column, mask=column < C, other=0).to(tl.float32)
    result = tl.sum(sums, 1)
    if BIAS:
        result += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
    if GATED:
        result = result * tl.sigmoid(result) * tl.sum(sums_up, 1)
    if ADD:
        result = result.to(out.dtype.element_ty).to(tl.float32) + tl.load(
            out + n, mask=n < N, other=0
        ).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _gemm(
    x, w, x_scale, w_scale, bias, out, B, N, C, piece,
    GATED: tl.constexpr, BIAS: tl.constexpr, FP8: tl.constexpr,
    BB: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    s = tl.program_id(1)
    b = tl.program_id(2) * BB + tl.arange(0, BB)
    c = tl.arange(0, BC)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    rows = w + n[:, None].to(tl.int64) * C
    inputs = x + b[:, None].to(tl.int64) * C
    sums = tl.zeros([BB, BN], tl.float32)
    sums_up = tl.zeros([BB, BN], tl.float32)
    end = min(C, (s + 1) * piece)
    for start in range(s * piece, end, BC):
        column = start + c[None, :]
        value = tl.load(inputs + column, mask=(b < B)[:, None] & (column < end), other=0.0)
        tile = tl.load(rows + column, mask=(n < N)[:, None] & (column < end), other=0.0)
        # Tensor cores sum FP8 with few digits; after this many products the sum continues in fp32.
        sums = tl.dot(value, tl.trans(tile), sums, max_num_imprecise_acc=FP8_SUM if FP8 else None)
        if GATED:
            tile_up = tl.load(
                rows + N.to(tl.int64) * C + column,
                mask=(n < N)[:, None] & (column < end),
                other=0.0,
            )
            sums_up = tl.dot(value, tl.trans(tile_up), sums_up)
    if FP8:
        sums = sums * tl.load(w_scale + n, mask=n < N, other=0)[None, :]
        sums = sums * tl.load(x_scale + b, mask=b < B, other=0)[:, None]
    if BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)[None, :]
    if GATED:
        sums = sums * tl.sigmoid(sums) * sums_up
    place = (s * B + b)[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=(b < B)[:, None] & (n < N)[None, :])


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """The launch configuration of a matrix product: rows, outputs and inner size of one program,
    and the number of splits of the inner axis (split-K)."""

    rows: int
    outputs: int
    inner: int
    split_k: int
    warps: int = 4
    stages: int = 4


def gemm_config(
    rows: int, outputs: int, inner: int, *, gated: bool = False, split: bool = False
) -> GemmConfig:
    """The configuration for a product of this shape, measured on an H200: about one program for
    every multiprocessor, and no more splits than that needs."""
    bb = 16 if rows <= 16 else 64
    if gated and outputs >= 8192:
        return GemmConfig(bb, 32, 64, 1)
    if gated and rows > 64:
        return GemmConfig(128, 64, 64, 1, warps=8, stages=4 if rows <= 256 else 3)
    if gated:
        return GemmConfig(bb, bb if bb == 64 else 32, 128, 1, stages=4 if bb == 64 else 3)
    if not split:
        return GemmConfig(bb, 64 if bb == 64 else 32, 128, 1)
    split_k, programs = 1, triton.cdiv(outputs, 64) * triton.cdiv(rows, bb)
    while programs * split_k < 128 and inner // (2 * split_k) >= 256:
        split_k *= 2
    return GemmConfig(bb, 64, 128 if bb == 64 else 64, split_k, stages=4 if bb == 64 else 5)


def gemv(
    x_C: Tensor, w_NC: Tensor, out_N: Tensor, *, norm: tuple[Tensor, float] | None = None,
    bias_N: Tensor | None = None, gated: bool = False, add: bool = False, ahead: bool = False,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Matrix-vector product: out = w x for one row, or out += w x with `add`; with `norm` RMSNorm
    is applied first, with `gated` the output is silu(gate) * up. `ahead`: with `pdl`, prefetch all
    of its weights while it waits for its input; not for a gated pair."""
    assert not (ahead and gated)
    inner, outputs = w_NC.shape[1], w_NC.shape[0] // (2 if gated else 1)
    gain, eps = (w_NC, 0.0) if norm is None else norm
    # 8 rows per program, unless that leaves multiprocessors of an H200 idle
    bn = 4 if gated or outputs < 8 * 132 else 8
    lines = triton.next_power_of_2(bn * inner // 64) if ahead and pdl else 0
    _gemv[(triton.cdiv(outputs, bn),)](
        x_C, gain, w_NC, w_NC if bias_N is None else bias_N, out_N, inner, outputs, eps,
        norm is not None, gated, add, bias_N is not None, bn,
        min(1024, triton.next_power_of_2(inner)), lines, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def gemm(
    x_BC: Tensor, w_NC: Tensor, out_SBN: Tensor, *, config: GemmConfig,
    scales: tuple[Tensor, Tensor] | None = None, bias_N: Tensor | None = None, gated: bool = False,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Matrix product on the tensor cores: out[s] = split s of x wᵀ, or silu(gate) * up with
    `gated`. `gated` and a bias need a single split. `scales`: of the rows of x and of w, both in
    FP8; not for a gated pair."""
    rows, inner = x_BC.shape
    outputs = w_NC.shape[0] // (2 if gated else 1)
    assert config.split_k == 1 or not (gated or bias_N is not None)
    assert scales is None or not gated
    piece = triton.cdiv(triton.cdiv(inner, config.inner), config.split_k) * config.inner
    _gemm[(triton.cdiv(outputs, config.outputs), config.split_k, triton.cdiv(rows, config.rows))](
        x_BC, w_NC, *(scales or (x_BC, w_NC)), w_NC if bias_N is None else bias_N, out_SBN, rows,
        outputs, inner, piece, gated, bias_N is not None, scales is not None, config.rows,
        config.outputs, config.inner, pdl,
        num_warps=config.warps, num_stages=config.stages, launch_pdl=pdl,
    )  # fmt: skip
