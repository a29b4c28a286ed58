"""AdamW over split masters, on a CUDA device: one launch, one pass over memory.

For each weight, the gradient (2 or 4 bytes), both halves of the master and both moments are read,
and the halves and moments written: 26 or 28 bytes. The master is fp32 in registers only.

One launch updates all tensors: a launch for each would keep the host busy for longer than the
device, and most tensors are too small to fill it. The kernel reads their addresses from a table.

The formulas are those of torch's fused AdamW, in fp32. Every operation is rounded by itself, as
IEEE 754 wants it, so the bits do not depend on what a version of Triton fuses.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from etude.core.errors import EtudeError
from etude.train.distributed import local_tensor
from etude.train.masters import HALF, SplitMaster

SIZE = 1024  # 8 weights of each of 128 threads: 16 bytes of a half
KINDS = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}  # of gradients


@triton.jit
def _pointers(address, start, KIND: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(KIND)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + tl.arange(0, SIZE)


@triton.jit
def _update(
    rounded,
    remainder,
    gradient,
    first,
    second,
    start,
    left,
    scale,
    factors,
    WHOLE: tl.constexpr,
    GRADIENT: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Update SIZE weights from `start` on of the tensors with these addresses, or as many as are
    left. WHOLE means that all of them are, and that every address is a multiple of 16."""
    rounded = _pointers(rounded, start, tl.int16, SIZE, WHOLE)
    remainder = _pointers(remainder, start, tl.int16, SIZE, WHOLE)
    gradient = _pointers(gradient, start, GRADIENT, SIZE, WHOLE)
    first = _pointers(first, start, tl.float32, SIZE, WHOLE)
    second = _pointers(second, start, tl.float32, SIZE, WHOLE)
    inside = None if WHOLE else tl.arange(0, SIZE) < left
    rate = tl.load(factors)
    correction = tl.load(factors + 1)
    decay = tl.load(factors + 2)
    high = tl.load(rounded, mask=inside).to(tl.int32)
    low = tl.load(remainder, mask=inside).to(tl.int32)
    master = ((high << 16) + low).to(tl.float32, bitcast=True)
    g = tl.load(gradient, mask=inside).to(tl.float32)
    g = tl.div_rn(g, tl.zeros_like(g) + scale)
    m = tl.load(first, mask=inside)
    v = tl.load(second, mask=inside)
    master -= decay * master
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    root = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + correction)
    master -= tl.div_rn(rate * m, root + EPS)
    bits = master.to(tl.int32, bitcast=True)
    tl.store(rounded, ((bits + HALF) >> 16).to(tl.int16), mask=inside)
    tl.store(remainder, bits.to(tl.int16), mask=inside)
    tl.store(first, m, mask=inside)
    tl.store(second, v, mask=inside)


@triton.jit
def _step(
    owners,
    table,
    factors,
    divisor,
    GRADIENT: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Each program updates up to SIZE weights of the tensor that owns it, if the gradient has this
    dtype. `_table` says what is in a row of the table."""
    number = tl.load(owners + tl.program_id(0)).to(tl.int64)
    row = table + 8 * number
    rounded = tl.load(row)
    remainder = tl.load(row + 1)
    gradient = tl.load(row + 2)
    first = tl.load(row + 3)
    second = tl.load(row + 4)
    start = (tl.program_id(0) - tl.load(row + 5)) * SIZE
    left = tl.load(row + 6) - start
    is_kind = tl.load(row + 7) == GRADIENT.primitive_bitwidth
    scale = tl.load(divisor)
    if is_kind & (tl.abs(scale) < float("inf")):  # false for a NaN too
        factors += 3 * number
        addresses = rounded | remainder | gradient | first | second
        if (addresses % 16 == 0) & (left >= SIZE):
            _update(
                rounded, remainder, gradient, first, second, start, left, scale, factors,
                True, GRADIENT, BETA1, BETA2, EPS, HALF, SIZE,
            )  # fmt: skip
        else:
            _update(
                rounded, remainder, gradient, first, second, start, left, scale, factors,
                False, GRADIENT, BETA1, BETA2, EPS, HALF, SIZE,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Plan:
    """Programs by tensor, and the columns of the table that are the same at every step."""

    owners: Tensor
    """The number of the tensor that each program updates (int32)."""
    begins: list[int]
    """The first program of each tensor."""
    counts: list[int]
    """The number of weights of each."""
    weight_decays: Tensor
    """float64."""


class SplitAdamW:
    """Steps over split masters, of which it remembers the sizes only."""

    def __init__(self) -> None:
        self._key: object = None
        self._plan: _Plan | None = None

    def step(
        self,
        masters: Sequence[SplitMaster],
        gradients: Sequence[Tensor],
        first_moments: Sequence[Tensor],
        second_moments: Sequence[Tensor],
        steps: Sequence[Tensor],
        *,
        lr: float,
        weight_decays: Sequence[float],
        betas: tuple[float, float],
        eps: float,
        divisor: Tensor,
    ) -> None:
        """Update masters, moments and step counts in place. Gradients are divided by `divisor`; if
        that is not finite, nothing changes."""
        if not masters:
            return
        tensors = (
            [local_tensor(master.parameter) for master in masters],
            [master.remainder for master in masters],
            [gradient.contiguous() for gradient in gradients],
            first_moments,
            second_moments,
        )
        plan = self._plan_for(tensors, weight_decays)
        table = _table(tensors, plan)
        torch._foreach_add_(list(steps), divisor.isfinite().float())
        # powers near 1 are exact enough in float64 only
        counts = torch.stack(list(steps)).double()
        rates = lr / (1 - betas[0] ** counts)
        corrections = (1 - betas[1] ** counts).sqrt()
        factors = torch.stack((rates, corrections, lr * plan.weight_decays), 1).float()
        for dtype in {gradient.dtype for gradient in gradients}:
            if len(plan.owners):  # a rank may hold no row of any parameter
                _step[(len(plan.owners),)](
                    plan.owners, table, factors, divisor,
                    KINDS[dtype], *betas, eps, HALF, SIZE, enable_fp_fusion=False,
                )  # fmt: skip

    def _plan_for(
        self, tensors: Sequence[Sequence[Tensor]], weight_decays: Sequence[float]
    ) -> _Plan:
        key = ([tensor.numel() for tensor in tensors[0]], list(weight_decays))
        if self._plan is None or self._key != key:
            assert all(tensor.is_contiguous() for column in tensors for tensor in column)
            self._key, self._plan = key, _plan(*key, tensors[0][0].device)
        return self._plan


def _plan(counts: list[int], weight_decays: list[float], device: torch.device) -> _Plan:
    programs = torch.tensor([triton.cdiv(count, SIZE) for count in counts])
    owners = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(programs)
    return _Plan(
        owners=owners.to(device),
        begins=(programs.cumsum(0) - programs).tolist(),
        counts=counts,
        weight_decays=torch.tensor(weight_decays, dtype=torch.float64, device=device),
    )


def _table(tensors: Sequence[Sequence[Tensor]], plan: _Plan) -> Tensor:
    """A row for each master, on the device: the addresses of its rounded half, remainder, gradient
    and moments; its first program; the number of its weights; the bits of one number of its
    gradient."""
    columns = array("q")
    for column in tensors:
        columns.extend(map(Tensor.data_ptr, column))
    columns.extend(plan.begins)
    columns.extend(plan.counts)
    columns.extend(8 * gradient.itemsize for gradient in tensors[2])
    table = torch.frombuffer(columns, dtype=torch.int64).view(8, -1).T.contiguous()
    if not plan.owners.is_cuda:
        return table
    # The host does not wait; torch keeps the pinned memory for as long as it is being copied.
    return table.pin_memory().to(plan.owners.device, non_blocking=True)


@cache
def check(device: torch.device, betas: tuple[float, float], eps: float) -> None:
    """Compare a step over a few small tensors with torch's operators: no test of ours has run with
    this device and these versions."""
    sizes, lr, divisor = (1, 7, SIZE + 1, 2 * SIZE), 1e-3, torch.tensor(2.5, device=device)
    kinds = [dtype for dtype in KINDS for _ in sizes]
    ramps = [torch.linspace(0.5, 1.5, size, device=device) for size in (*sizes, *sizes)]
    masters = [0.1 * ramp * (-1) ** n for n, ramp in enumerate(ramps)]
    gradients = [(1e-2 * ramp).to(dtype) for ramp, dtype in zip(ramps, kinds, strict=True)]
    first, second = ([scale * ramp.flip(0) for ramp in ramps] for scale in (1e-3, 1e-4))
    steps = [torch.tensor(10.0 * n, device=device) for n in range(len(ramps))]
    decays = [0.1 * (n % 3) for n in range(len(ramps))]
    own = [SplitMaster.of(m, torch.empty_like(m, dtype=torch.bfloat16)) for m in masters]
    every = zip(masters, gradients, first, second, steps, decays, strict=True)
    expected = [
        _formula(w, g.float() / divisor, m, v, count + 1, lr, decay, betas, eps)
        for w, g, m, v, count, decay in every
    ]
    SplitAdamW().step(
        own, gradients, first, second, steps,
        lr=lr, weight_decays=decays, betas=betas, eps=eps, divisor=divisor,
    )  # fmt: skip
    found = zip((master.join() for master in own), first, second, strict=True)
    worst = max(
        _places(one, other)
        for row, expected_row in zip(found, expected, strict=True)
        for one, other in zip(row, expected_row, strict=True)
    )
    if worst > 2:
        raise EtudeError(
            f"the AdamW kernel gives wrong results on {device} (off by {worst} units in the last "
            f"place; Triton {triton.__version__}); the trainer stops rather than train on them. "
            'Try other versions of torch and Triton, or trainer.compute_dtype = "float32"'
        )


def _formula(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    count: Tensor,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A master and its moments after a step, by torch's operators."""
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    rate = (lr / (1 - betas[0] ** count.double())).float()
    correction = (1 - betas[1] ** count.double()).sqrt().float()
    root = v.double().sqrt().float() / correction
    w = w - lr * weight_decay * w
    return w - rate * m / (root + eps), m, v


def _places(one: Tensor, other: Tensor) -> int:
    """The largest difference of numbers of the same sign, in units of the last place."""
    return int((one.view(torch.int32).long() - other.view(torch.int32).long()).abs().max())
