"""The kernel takes the step of torch's fused AdamW: on the CPU, through Triton's interpreter."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":  # conftest sets it if there is no device
    pytest.skip("a device runs it: tests.train.test_on_cuda", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from etude.train import adamw_kernel
from etude.train.masters import SplitMaster
from etude.train.optimizer import BETAS, EPS, _fused_adamw

SHAPES = [(1,), (7,), (1025,), (3, 700), (0, 4)]


def weights(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Masters, gradients and moments, as they are in mid-training."""
    generator = torch.Generator().manual_seed(0)

    def random(scale: float) -> list[Tensor]:
        return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]

    squares = [t.square() for t in random(1e-2)]
    return random(0.1), [t.to(dtype) for t in random(1e-2)], random(1e-3), squares


@pytest.mark.parametrize("divisor", [1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_is_that_of_torch(dtype: torch.dtype, divisor: float) -> None:
    """Up to two units in the last place: torch computes in another order on each device."""
    masters, gradients, first, second = weights(dtype)
    own = [SplitMaster.of(m, torch.empty_like(m, dtype=torch.bfloat16)) for m in masters]
    own_first, own_second = ([t.clone() for t in some] for some in (first, second))
    steps, own_steps = ([torch.tensor(40.0 * n) for n in range(len(SHAPES))] for _ in range(2))
    how = {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "betas": BETAS,
        "eps": EPS,
        "divisor": torch.tensor(divisor),
    }
    adamw_kernel.step(own, gradients, own_first, own_second, own_steps, **how)
    _fused_adamw(masters, gradients, first, second, steps, **how)
    assert own_steps == steps
    theirs = (*first, *second, *masters)
    for a, b in zip((*own_first, *own_second, *(m.join() for m in own)), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-22, atol=1e-9)


@pytest.mark.parametrize("divisor", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_changes_nothing(divisor: float) -> None:
    masters, gradients, first, second = weights(torch.bfloat16)
    own = [SplitMaster.of(m, torch.empty_like(m, dtype=torch.bfloat16)) for m in masters]
    moments = [t.clone() for t in (*first, *second)]
    steps = [torch.tensor(0.0) for _ in SHAPES]
    adamw_kernel.step(
        own, gradients, first, second, steps,
        lr=1e-3, weight_decay=0.1, betas=BETAS, eps=EPS, divisor=torch.tensor(divisor),
    )  # fmt: skip
    assert not any(steps)
    assert all(torch.equal(a.join(), b) for a, b in zip(own, masters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((*first, *second), moments, strict=True))


def test_halves_are_split_in_the_kernel_as_outside() -> None:
    """A gradient of 0 changes nothing, so only the split may."""
    near_ties = [high * 0x10000 + 0x8000 + n for high in (0, 1, 0x3F80, 0x7F7E) for n in (-1, 0, 1)]
    positive = torch.tensor(near_ties, dtype=torch.int32).view(torch.float32)
    masters = torch.cat((positive, -positive))
    own = SplitMaster.of(masters, torch.empty_like(masters, dtype=torch.bfloat16))
    rounded, remainder = own.rounded.clone(), own.remainder.clone()
    gradient, first, second = (torch.zeros_like(masters) for _ in range(3))
    adamw_kernel.step(
        [own], [gradient], [first], [second], [torch.tensor(0.0)],
        lr=1e-3, weight_decay=0.0, betas=BETAS, eps=EPS, divisor=torch.tensor(1.0),
    )  # fmt: skip
    assert torch.equal(own.rounded, rounded) and torch.equal(own.remainder, remainder)
