"""FP8 products on the tensor cores, as `etude.model.fp8` defines them.

They are batch-invariant, and products of many rows (`scaled_mm`, the library's) have the same bits
as those of few (`linear.gemm`): both sum 128 products on the tensor cores, and these sums in fp32,
in order; few rows are computed as 64. Only `split_product` gives up these bits for speed.

Shapes: N rows, C inputs, M outputs. A gated pair is [N, 2 C], gates first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as gpu

from etude.engine.kernels.linear import GemmConfig, gemm
from etude.model.fp8 import LARGEST, Quantised, scaled_mm

FEW_ROWS = 64
"""Largest number of rows for which our own product is faster."""


@triton.jit
def _activations(x, row, column, C, GATED: tl.constexpr):
    """A row, or silu(gate) * up of a row of pairs, rounded where the model definition rounds."""
    kind: tl.constexpr = x.dtype.element_ty
    if not GATED:
        return tl.load(x + row * C + column, mask=column < C, other=0).to(tl.float32)
    place = x + 2 * row * C + column
    gate = tl.load(place, mask=column < C, other=0).to(tl.float32)
    up = tl.load(place + C, mask=column < C, other=0).to(tl.float32)
    return ((gate * tl.sigmoid(gate)).to(kind).to(tl.float32) * up).to(kind).to(tl.float32)


@triton.jit
def store_quantised(value, values, scales, row, column, C, LARGEST: tl.constexpr):
    """Quantise and store a row of fp32 numbers."""
    top = tl.full([], LARGEST, tl.float32)
    largest = tl.max(tl.abs(value))
    largest = tl.where(largest > 1e-30, largest, top)
    tl.store(scales + row, tl.div_rn(largest, top))
    stored = (value * tl.div_rn(top, largest)).to(values.dtype.element_ty)
    tl.store(values + row * C + column, stored, mask=column < C)


@triton.jit
def _quantise(
    x, values, scales, C,
    GATED: tl.constexpr, LARGEST: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    value = _activations(x, row, column, C, GATED)
    store_quantised(value, values, scales, row, column, C, LARGEST)


@triton.jit
def _gated(x, out, C, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    value = _activations(x, row, column, C, True)
    tl.store(out + row * C + column, value.to(out.dtype.element_ty), mask=column < C)


def empty_rows(like_NC: Tensor) -> Quantised:
    values = like_NC.new_empty(like_NC.shape, dtype=torch.float8_e4m3fn)
    return Quantised(values, like_NC.new_empty(len(like_NC), dtype=torch.float32))


def quantise_rows(x_NC: Tensor, *, gated: bool = False, pdl: bool = False) -> Quantised:
    """`model.fp8.quantise_rows` of contiguous rows, or of silu(gate) * up."""
    out = empty_rows(x_NC.chunk(2, -1)[0] if gated else x_NC)
    quantise_into(x_NC, out, gated=gated, pdl=pdl)
    return out


def quantise_into(x_NC: Tensor, out: Quantised, *, gated: bool = False, pdl: bool = False) -> None:
    rows, size = out.values.shape
    width = triton.next_power_of_2(size)
    _quantise[(rows,)](
        x_NC, out.values, out.scales, size, gated, LARGEST, width, pdl,
        num_warps=4 if width <= 4096 else 8, launch_pdl=pdl,
    )  # fmt: skip


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, with the bits that `quantise_rows` rounds."""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    width = triton.next_power_of_2(out.shape[1])
    _gated[(len(out),)](gate_up, out, out.shape[1], width, num_warps=8)
    return out


def product(
    x: Quantised, w: Quantised, bias_M: Tensor | None, dtype: torch.dtype, *, pdl: bool = False
) -> Tensor:
    rows, (outputs, inner) = len(x.values), w.values.shape
    if rows > FEW_ROWS and x.values.is_cuda and not (outputs % 16 or inner % 16):
        out_NM = scaled_mm(x, w, dtype)
    else:
        out_NM = x.scales.new_empty(rows, outputs, dtype=dtype)
        config = _gemm_config(outputs)
        gemm(x.values, w.values, out_NM, config=config, scales=(x.scales, w.scales), pdl=pdl)
    return out_NM if bias_M is None else out_NM.add_(bias_M)


def split_product(x: Quantised, w: Quantised, dtype: torch.dtype, *, pdl: bool = False) -> Tensor:
    """A product as SNM, to be summed: few rows are computed in splits, which is faster for a matrix
    with few outputs, and rounds differently."""
    rows, (outputs, inner) = len(x.values), w.values.shape
    splits = _num_splits(outputs, inner)
    if rows > FEW_ROWS or splits == 1:
        return product(x, w, None, dtype, pdl=pdl)[None]
    out_SNM = x.scales.new_empty(splits, rows, outputs)
    config = GemmConfig(64, 64, 128, splits, stages=5)
    gemm(x.values, w.values, out_SNM, config=config, scales=(x.scales, w.scales), pdl=pdl)
    return out_SNM


def _num_splits(outputs: int, inner: int) -> int:
    splits = 1
    while triton.cdiv(outputs, 64) * splits < 256 and inner // (2 * splits) >= 1024:
        splits *= 2
    return splits


def _gemm_config(outputs: int) -> GemmConfig:
    """Configuration measured on an H200."""
    if outputs <= 4096:
        return GemmConfig(64, 32, 128, 1, stages=10)
    return GemmConfig(64, 64, 128, 1, stages=8 if outputs <= 8192 else 4)
