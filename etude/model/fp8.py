"""FP8 products, in e4m3 with a scale for each row of the activations (a token) and each row of the
weights (an output); and FP8 keys and values, with a scale for each token and head. Engine and
trainer share this code.

Each row has its own scale: with one scale for a whole tensor a token would depend on its
neighbours. Products of two e4m3 numbers are exact in fp32 and are summed there, so devices differ
only in the order of that sum.

Shapes: .. any leading dimensions, N rows, C inputs, M outputs, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from etude.model.numerics import Arithmetic, product_of, value_of

LARGEST = 448.0
"""The largest number in e4m3."""


class Quantised(NamedTuple):
    """Rows in e4m3, and the factor of each (fp32)."""

    values: Tensor
    scales: Tensor

    def read(self, dtype: torch.dtype) -> Tensor:
        return (self.values.float() * self.scales[..., None]).to(dtype)


def quantise_rows(x: Tensor) -> Quantised:
    """Round each row to e4m3, scaled so that its largest number becomes the largest e4m3 number."""
    wide = _widened(x)
    largest = wide.abs().amax(-1, keepdim=True)
    # On CUDA, division by a Python number is multiplication by its inverse, which rounds
    # differently.
    top = torch.full_like(largest, LARGEST)
    largest = torch.where(largest > 1e-30, largest, top)  # smaller is 0, and has no inverse
    values = (wide * _quotient(top, largest)).to(torch.float8_e4m3fn)
    return Quantised(values, _quotient(largest, top).squeeze(-1))


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    """x / y, rounded correctly in compiled code too, where division in fp32 is approximate on CUDA.
    Rounding the quotient in float64 again gives the same bits as rounding it once."""
    return (x.double() / y.double()).float()


def quantise_kv(x: Tensor) -> Quantised:
    """Round keys or values [.., D], each row with the smallest power of 2 that makes it fit. Such a
    scale changes no digit: the values read are exact in bf16 too, rounding them again changes
    nothing, and scores can be multiplied by it instead of keys."""
    wide = _widened(x)
    largest = wide.abs().amax(-1, keepdim=True)
    # The largest e4m3 number is 1.75 * 2^8: a row with more than 1.75 times a power of 2 needs the
    # next power.
    bits = (largest.view(torch.int32) + 0x1FFFFF & 0x7F800000) - (8 << 23)
    bits = torch.where(largest > 1e-30, bits, 127 << 23)  # smaller is 0, and has no inverse
    values = (wide * ((254 << 23) - bits).view(torch.float32)).to(torch.float8_e4m3fn)
    return Quantised(values, bits.view(torch.float32).squeeze(-1))


def _widened(x: Tensor) -> Tensor:
    """Convert to fp32, bf16 by its bits: compiled code would otherwise continue with the digits
    from before the rounding to bf16, and round one number in thirty the other way."""
    if x.dtype != torch.bfloat16:
        return x.float()
    return (x.view(torch.int16).int() << 16).view(torch.float32)


def rounded_kv(x: Tensor) -> Tensor:
    """Keys or values as read from an FP8 KV cache; gradients are those of x itself
    (straight-through)."""
    return value_of(lambda: quantise_kv(x).read(x.dtype), gradient_of=lambda: x)


def linear(x: Tensor, w: Quantised, bias_M: Tensor | None, arithmetic: Arithmetic) -> Tensor:
    """x wᵀ with x in FP8 too, in the dtype of x; the bias is added in that dtype."""
    quantised = quantise_rows(x)
    fits = not any(size % 16 for size in w.values.shape)
    if x.is_cuda and x.dtype == torch.bfloat16 and fits and not arithmetic.invariant:
        product = scaled_mm(quantised, w, x.dtype)
    else:
        product = arithmetic.linear(quantised.values.float(), w.values.float(), None)
        product = (product * w.scales * quantised.scales[..., None]).to(x.dtype)
    return product if bias_M is None else product + bias_M


def scaled_mm(x: Quantised, w: Quantised, dtype: torch.dtype) -> Tensor:
    """The library's FP8 product, for sizes that are multiples of 16."""
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
    without rounding, with weights and inputs in their own dtype (straight-through)."""
    return product_of(lambda: linear(x, quantise_rows(w_MC), bias_M, arithmetic), x, w_MC, bias_M)
