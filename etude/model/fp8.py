"""Products in FP8: e4m3, with a scale for each row of the activations (a token) and for each row of
the weights (an output); and keys and values in FP8, with a scale for each token and head. The
engine and the trainer both compute what stands here.

A scale is that of its row alone: one for a whole tensor would carry a token's neighbours into it.
Products of two numbers in e4m3 are exact in fp32 and are added up there, so what differs between
devices is the order of that sum.

Shapes: .. any leading dimensions, N rows, C what goes in, M what comes out, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from etude.model.numerics import Arithmetic, product_of, value_of

LARGEST = 448.0
"""Of e4m3."""


class Quantised(NamedTuple):
    """Rows in e4m3, and the factor of each (fp32)."""

    values: Tensor
    scales: Tensor

    def read(self, dtype: torch.dtype) -> Tensor:
        return (self.values.float() * self.scales[..., None]).to(dtype)


def quantise_rows(x: Tensor) -> Quantised:
    """Round each row to e4m3, so that its largest number becomes the largest one there."""
    wide = _widened(x)
    largest = wide.abs().amax(-1, keepdim=True)
    # On CUDA a plain number would be multiplied by its inverse, which rounds otherwise.
    top = torch.full_like(largest, LARGEST)
    largest = torch.where(largest > 1e-30, largest, top)  # less is 0, and has no inverse
    values = (wide * (top / largest)).to(torch.float8_e4m3fn)
    return Quantised(values, (largest / top).squeeze(-1))


def quantise_kv(x: Tensor) -> Quantised:
    """Round keys or values [.., D], each row by the smallest power of 2 with which it fits. Such a
    scale changes no digit: what is read back is exact in bf16 too, and rounding that again changes
    nothing; scores may be multiplied by it instead of keys."""
    wide = _widened(x)
    largest = wide.abs().amax(-1, keepdim=True)
    # The largest of e4m3 is 1.75 * 2^8: what is more than 1.75 of a power takes the next one.
    bits = (largest.view(torch.int32) + 0x1FFFFF & 0x7F800000) - (8 << 23)
    bits = torch.where(largest > 1e-30, bits, 127 << 23)  # less is 0, and has no inverse
    values = (wide * ((254 << 23) - bits).view(torch.float32)).to(torch.float8_e4m3fn)
    return Quantised(values, bits.view(torch.float32).squeeze(-1))


def _widened(x: Tensor) -> Tensor:
    """In fp32, bf16 by its bits: compiled code would go on with the digits from before it was
    rounded to bf16, and then round every thirtieth number the other way."""
    if x.dtype != torch.bfloat16:
        return x.float()
    return (x.view(torch.int16).int() << 16).view(torch.float32)


def rounded_kv(x: Tensor) -> Tensor:
    """What an FP8 KV cache gives back of keys or values; gradients are those of x itself
    (straight-through)."""
    return value_of(lambda: quantise_kv(x).read(x.dtype), gradient_of=lambda: x)


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
