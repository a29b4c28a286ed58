"""Paged keys and values: the layout of tokens, and the FP8 format.

Keys and values are [blocks, K, block size, D]; a slot is block * block size + offset. In FP8 they
are rounded as in `model.fp8.quantise_kv`, with scales [blocks, K, block size]. The scales are
powers of 2, so that multiplying scores and weights by them instead, which are fewer than keys and
values, changes no bit. Values in FP8 are [blocks, K, D, block size]: tensor cores take four tokens
of a column at a time, and no shared memory instruction transposes bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from etude.model.fp8 import Quantised

Pages = Tensor | Quantised
"""Keys or values of a layer."""


def empty_pages(
    like: Tensor, shape: tuple[int, int, int, int], *, fp8: bool
) -> tuple[Pages, Pages]:
    """Keys and values of zeros, of this shape, in the dtype of `like` or in FP8."""
    if not fp8:
        return like.new_zeros(shape), like.new_zeros(shape)
    k, v = (like.new_zeros(shape, dtype=torch.float8_e4m3fn) for _ in "kv")
    k_scales, v_scales = (like.new_zeros(shape[:-1], dtype=torch.float32) for _ in "kv")
    return Quantised(k, k_scales), Quantised(v.view(*shape[:2], shape[3], shape[2]), v_scales)


def pointers(k: Pages, v: Pages) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values, then their scales, or placeholders for them."""
    if isinstance(k, Quantised) and isinstance(v, Quantised):
        return k.values, v.values, k.scales, v.scales
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    return k, v, k, v


@triton.jit
def row_of(slot, kh, K: tl.constexpr, PAGE: tl.constexpr):
    """The row of a slot's key or value. A block holds its tokens head by head, so a program reads
    one contiguous range."""
    slot = slot.to(tl.int64)
    return (slot // PAGE * K + kh) * PAGE + slot % PAGE


@triton.jit
def read(
    k_cache, v_cache, k_scales, v_scales, table, first, end, seen, kh, K: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys and values of BLOCK positions from `first` on, and their scales, or placeholders for
    them. In FP8 `first` is a multiple of BLOCK, and values keep their layout: [D, BLOCK]."""
    position, d = first + tl.arange(0, BLOCK), tl.arange(0, D)
    if k_cache.dtype.element_ty != tl.float8e4nv:
        page = tl.load(table + position // PAGE, mask=seen, other=0)
        row = row_of(page * PAGE + position % PAGE, kh, K, PAGE)
        place = (row * D)[:, None] + d[None, :]
        k = tl.load(k_cache + place, mask=seen[:, None], other=0)
        v = tl.load(v_cache + place, mask=seen[:, None], other=0)
        k_scale, v_scale = k, v
    else:
        if PAGE % BLOCK == 0:  # all of them are in one page
            page = tl.load(table + first // PAGE, mask=first < end, other=0)
            within = tl.multiple_of(first % PAGE, BLOCK)
            offset = within + tl.arange(0, BLOCK)
            # Sixteen at a time, with up to fifteen that are not seen, so that bytes are loaded
            # together.
            near = offset // 16 * 16 < end - first + within
        else:
            page = tl.load(table + position // PAGE, mask=seen, other=0)
            offset = position % PAGE
            near = seen
        begin = (page.to(tl.int64) * K + kh) * PAGE
        k_place = ((begin + offset) * D)[:, None] + d[None, :]
        v_place = (begin * D + offset)[None, :] + d[:, None] * PAGE
        k = tl.load(k_cache + k_place, mask=seen[:, None], other=0.0)
        v = tl.load(v_cache + v_place, mask=near[None, :], other=0.0)
        k_scale = tl.load(k_scales + begin + offset, mask=seen, other=0.0)
        v_scale = tl.load(v_scales + begin + offset, mask=seen, other=0.0)
    return k, v, k_scale, v_scale


@triton.jit
def _widened(x, like):
    # Hopper has fast instructions for all of these steps, but not for fp16 to bf16.
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
    """Add values weighted by p to `acc`."""
    if v.dtype == tl.float8e4nv:
        acc = tl.dot((p * v_scale[None, :]).to(q.dtype), tl.trans(_widened(v, q)), acc)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc)
    return acc


@triton.jit
def store_fp8(x, cache, scales, row, inside, PAGE: tl.constexpr, D: tl.constexpr, V: tl.constexpr):
    """Round heads [.., D], and write them to these rows of keys or, if V, of values; returns them
    as they will be read."""
    d = tl.arange(0, D)[None, :]
    wide = x.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    bits = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    bits = tl.where(largest > 1e-30, bits, 127 << 23)
    scale = bits.to(tl.float32, bitcast=True)
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    # A NaN is stored in the scale: unseen values are read and multiplied by 0, which a NaN would
    # survive, but unseen scales are not read.
    is_known = wide == wide
    scale = tl.where(tl.min(is_known.to(tl.int32), 1) > 0, scale, float("nan"))
    stored = tl.where(is_known, wide * inverse[:, None], 0.0).to(tl.float8e4nv)
    tl.store(scales + row, scale, mask=inside)
    if V:
        place = (row // PAGE * PAGE * D + row % PAGE)[:, None] + d * PAGE
    else:
        place = (row * D)[:, None] + d
    tl.store(cache + place, stored, mask=inside[:, None])
    return (stored.to(tl.float32) * scale[:, None]).to(x.dtype)
