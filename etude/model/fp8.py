"""Products in FP8: e4m3, with a scale for each row of the activations (a token) and for each row of
the weights (an output). The engine and the trainer both compute what stands here.

A scale is that of its row alone: one for a whole tensor would carry a token's neighbours into it.
Products of two numbers in e4m3 are exact in fp32 and are added up there, so what differs between
devices is the order of that sum.

Shapes: .. any leading dimensions, N rows, C what goes in, M what comes out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from etude.model.numerics import Arithmetic, product_of

LARGEST = 448.0
"""Of e4m3."""


class Quantised(NamedTuple):
    """Rows in e4m3, and the factor of each (fp32)."""

    values: Tensor
    scales: Tensor


def quantise_rows(x: Tensor) -> Quantised:
    """Round each row to e4m3, so that its largest number becomes the largest one there."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    # On CUDA a plain number would be multiplied by its inverse, which rounds otherwise.
    top = torch.full_like(largest, LARGEST)
    largest = torch.where(largest > 1e-30, largest, top)  # less is 0, and has no inverse
    values = (wide * (top / largest)).to(torch.float8_e4m3fn)
    return Quantised(values, (largest / top).squeeze(-1))


def linear(x: Tensor, w: Quantised, bias_M: Tensor | None, arithmetic: Arithmetic) -> Tensor:
    """x wᵀ with x in FP8 too, in the type of x; the bias is added there."""
    quantised = quantise_rows(x)
    fits = not any(size % 16 for size in w.values.shape)
    if x.is_cuda and x.dtype == torch.bfloat16 and fits and not arithmetic.invariant:
        product = scaled_mm(quantised, w, x.dtype)
    else:
        product = arithmetic.linear(quantised.values.float(), w.values.float(), None)
        product = (product * w.scales * quantised.scales[..., None]).to(x.dtype)
    return product if bias_M is None else product + bias_M


def scaled_mm(x: Quantised, w: Quantised, dtype: torch.dtype) -> Tensor:
    """The vendor's product, for sizes that are multiples of 16."""
    product_NM = torch._scaled_mm(
        x.values.flatten(0, -2),
        w.values.T,
        scale_a=x.scales.flatten()[:, None],
        scale_b=w.scales[None],
        out_dtype=dtype,
    )
    return product_NM.view(*x.values.shape[:-1], -1)


def trainable_linear(
    x: Tensor, w_MC: Tensor, bias_M: Tensor | None, arithmetic: Arithmetic
) -> Tensor:
    """`linear` with weights that are quantised in each pass; gradients are those of the product
    without rounding, with weights and inputs in their own type (straight-through)."""
    return product_of(lambda: linear(x, quantise_rows(w_MC), bias_M, arithmetic), x, w_MC, bias_M)
