"""Paged keys and values: where a token lies, and what is in FP8.

Keys and values are [blocks, K, block size, D]; a slot is block * block size + offset. In FP8 they
are rounded as `model.fp8.quantise_kv` does it, with scales [blocks, K, block size]. These are
powers of 2, so that it changes no bit to multiply scores and weights by them, which are fewer than
keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from etude.model.fp8 import Quantised

Pages = Tensor | Quantised
"""The keys or the values of a layer."""


def empty_pages(like: Tensor, shape: Sequence[int], *, fp8: bool) -> Pages:
    """Zeros in the type of `like`, or in FP8."""
    if not fp8:
        return like.new_zeros(shape)
    values = like.new_zeros(shape, dtype=torch.float8_e4m3fn)
    return Quantised(values, like.new_zeros(shape[:-1], dtype=torch.float32))


def pointers(k: Pages, v: Pages) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values, then their scales or whatever stands for them."""
    if isinstance(k, Quantised) and isinstance(v, Quantised):
        return k.values, v.values, k.scales, v.scales
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    return k, v, k, v


@triton.jit
def row_of(slot, kh, K: tl.constexpr, PAGE: tl.constexpr):
    """The row of the key or value of a slot. A block holds its tokens head by head, so a program
    reads one run."""
    slot = slot.to(tl.int64)
    return (slot // PAGE * K + kh) * PAGE + slot % PAGE


@triton.jit
def read(
    k_cache, v_cache, k_scales, v_scales, table, position, seen, kh, K: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Keys and values of these positions, and their scales or whatever stands for them."""
    page = tl.load(table + position // PAGE, mask=seen, other=0)
    row = row_of(page * PAGE + position % PAGE, kh, K, PAGE)
    place = (row * D)[:, None] + tl.arange(0, D)[None, :]
    k = tl.load(k_cache + place, mask=seen[:, None], other=0.0)
    v = tl.load(v_cache + place, mask=seen[:, None], other=0.0)
    if k.dtype == tl.float8e4nv:
        k_scale = tl.load(k_scales + row, mask=seen, other=0.0)
        v_scale = tl.load(v_scales + row, mask=seen, other=0.0)
    else:
        k_scale, v_scale = k, v
    return k, v, k_scale, v_scale


@triton.jit
def _widened(x, like):
    # All of these steps have fast instructions on Hopper; one from fp16 to bf16 has not.
    return x.to(tl.float16).to(tl.float32).to(like.dtype)


@triton.jit
def scores(q, k, k_scale):
    if k.dtype == tl.float8e4nv:
        score = tl.dot(q, tl.trans(_widened(k, q))) * k_scale[None, :]
    else:
        score = tl.dot(q, tl.trans(k))
    return score


@triton.jit
def mix(q, p, v, v_scale, acc):
    """Values by their weights p, added to `acc`."""
    if v.dtype == tl.float8e4nv:
        acc = tl.dot((p * v_scale[None, :]).to(q.dtype), _widened(v, q), acc)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc)
    return acc


@triton.jit
def store_fp8(x, cache, scales, row, inside, D: tl.constexpr):
    """Round heads [.., D], and write them to these rows; returns what can be read there."""
    wide = x.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    bits = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    bits = tl.where(largest > 1e-30, bits, 127 << 23)
    scale = bits.to(tl.float32, bitcast=True)
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    stored = (wide * inverse[:, None]).to(tl.float8e4nv)
    tl.store(scales + row, scale, mask=inside)
    place = (row * D)[:, None] + tl.arange(0, D)[None, :]
    tl.store(cache + place, stored, mask=inside[:, None])
    return (stored.to(tl.float32) * scale[:, None]).to(x.dtype)
