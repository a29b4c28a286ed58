"""Embedding, and RMSNorm fused with the residual sum: one pass over each row.

Shapes: B rows, E hidden size, S summands (the splits of a split-K product, or the experts of a
token).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as gpu

from etude.engine.kernels.fp8 import store_quantised
from etude.model.fp8 import LARGEST, Quantised


@triton.jit
def _embed(tokens, sampled, table, x, E, SIZE: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    token = tl.load(tokens + row)
    if token < 0:
        token = tl.load(sampled - 1 - token)
    column = tl.arange(0, SIZE)
    value = tl.load(table + token.to(tl.int64) * E + column, mask=column < E)
    tl.store(x + row * E + column, value, mask=column < E)


@triton.jit
def _add_norm(
    x,
    parts,
    gain,
    normed,
    values,
    scales,
    E,
    eps,
    row_stride,
    part_stride,
    S: tl.constexpr,
    FP8: tl.constexpr,
    LARGEST: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    inside = column < E
    scale = tl.load(gain + column, mask=inside, other=0).to(tl.float32)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    value = tl.load(x + row * E + column, mask=inside, other=0).to(tl.float32)
    if S > 0:
        added = tl.zeros_like(value)
        for s in tl.static_range(S):
            added += tl.load(
                parts + row * row_stride + s * part_stride + column, mask=inside, other=0
            ).to(tl.float32)
        # Rounded where the model definition rounds: the output of a layer, then the sum.
        value = (
            (value + added.to(x.dtype.element_ty).to(tl.float32))
            .to(x.dtype.element_ty)
            .to(tl.float32)
        )
        tl.store(x + row * E + column, value.to(x.dtype.element_ty), mask=inside)
    norm = value * tl.rsqrt(tl.sum(value * value) / E + eps)
    norm = (norm * scale).to(normed.dtype.element_ty)
    tl.store(normed + row * E + column, norm, mask=inside)
    if FP8:
        store_quantised(norm.to(tl.float32), values, scales, row, column, E, LARGEST)


def embed(
    tokens_B: Tensor, sampled: Tensor, table_VE: Tensor, x_BE: Tensor, pdl: bool = False
) -> None:
    """Embed tokens: x = table[token]; a token -1 - i stands for entry i of `sampled`."""
    rows, size = x_BE.shape
    _embed[(rows,)](
        tokens_B, sampled, table_VE, x_BE, size, triton.next_power_of_2(size), pdl, launch_pdl=pdl
    )


def add_norm(
    x_BE: Tensor,
    parts_SBE: Tensor | None,
    gain_E: Tensor,
    normed_BE: Tensor,
    eps: float,
    pdl: bool = False,
    rounded: Quantised | None = None,
) -> None:
    """x += sum of the parts (any strides, the last axis dense); normed = RMSNorm(x), and also in
    FP8 if `rounded` is given."""
    rows, size = x_BE.shape
    parts = x_BE[None] if parts_SBE is None else parts_SBE
    width = triton.next_power_of_2(size)
    _add_norm[(rows,)](
        x_BE, parts, gain_E, normed_BE, *(rounded or (normed_BE, normed_BE)), size, eps,
        parts.stride(1), parts.stride(0), 0 if parts_SBE is None else len(parts_SBE),
        rounded is not None, LARGEST, width, pdl, num_warps=4 if width <= 2048 else 8,
        launch_pdl=pdl,
    )  # fmt: skip
