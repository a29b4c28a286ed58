"""AdamW over split masters, on a CUDA device: one pass over memory.

For each weight, the gradient (2 or 4 bytes), both halves of the master and both moments are read,
and the halves and moments written: 26 or 28 bytes. The master is fp32 in registers only.

The formulas are those of torch's fused AdamW, in fp32. Every operation is rounded by itself, as
IEEE 754 wants it, so the bits do not depend on what a version of Triton fuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from etude.train.masters import HALF, SplitMaster

SIZE = 1024  # 8 weights of each of 128 threads: 16 bytes of a half


@triton.jit(do_not_specialize=["number"])  # or it would be compiled again for 1, 16, 32 ..
def _step(
    rounded,
    remainder,
    gradient,
    first,
    second,
    divisor,
    factors,
    number,
    decay,
    count,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
):
    scale = tl.load(divisor)
    if tl.abs(scale) < float("inf"):  # false for a NaN too
        rate = tl.load(factors + 2 * number)
        correction = tl.load(factors + 2 * number + 1)
        at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        inside = at < count
        high = tl.load(rounded + at, mask=inside, other=0).to(tl.int32)
        low = tl.load(remainder + at, mask=inside, other=0).to(tl.int32)
        master = ((high << 16) + low).to(tl.float32, bitcast=True)
        g = tl.load(gradient + at, mask=inside, other=0).to(tl.float32)
        g = tl.div_rn(g, tl.zeros_like(g) + scale)
        m = tl.load(first + at, mask=inside, other=0)
        v = tl.load(second + at, mask=inside, other=0)
        master -= decay * master
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        root = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + correction)
        master -= tl.div_rn(rate * m, root + EPS)
        bits = master.to(tl.int32, bitcast=True)
        tl.store(rounded + at, ((bits + HALF) >> 16).to(tl.int16), mask=inside)
        tl.store(remainder + at, bits.to(tl.int16), mask=inside)
        tl.store(first + at, m, mask=inside)
        tl.store(second + at, v, mask=inside)


def step(
    masters: Sequence[SplitMaster],
    gradients: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    divisor: Tensor,
) -> None:
    """Update masters, moments and step counts in place. Gradients are divided by `divisor`; if that
    is not finite, nothing changes."""
    if not masters:
        return
    torch._foreach_add_(list(steps), divisor.isfinite().float())
    # powers near 1 are exact enough in float64 only
    counts = torch.stack(list(steps)).double()
    rates = lr / (1 - betas[0] ** counts)
    factors = torch.stack((rates, (1 - betas[1] ** counts).sqrt()), 1).float()
    for number, (master, gradient, first, second) in enumerate(
        zip(masters, gradients, first_moments, second_moments, strict=True)
    ):
        if count := gradient.numel():  # a rank may hold no row of a parameter
            _step[(triton.cdiv(count, SIZE),)](
                master.rounded.view(torch.int16), master.remainder, gradient.contiguous(), first,
                second, divisor, factors, number, lr * weight_decay, count, *betas, eps, HALF, SIZE,
                enable_fp_fusion=False,
            )  # fmt: skip
