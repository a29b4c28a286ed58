"""The kernel takes the step of torch's fused AdamW: on a CUDA device, or through Triton's
interpreter on the CPU."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":  # see conftest
    pytest.skip("needs a CUDA device, or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from etude.train import adamw_kernel
from etude.train.masters import SplitMaster
from etude.train.optimizer import BETAS, EPS, _fused_adamw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(1,), (7,), (1025,), (3, 700), (0, 4)]
LR, DECAY = 1e-3, 0.1
Weights = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def weights(dtype: torch.dtype) -> Weights:
    """Masters, gradients and moments, as they are in mid-training."""
    generator = torch.Generator().manual_seed(0)

    def random(scale: float) -> list[Tensor]:
        return [(scale * torch.randn(s, generator=generator)).to(DEVICE) for s in SHAPES]

    squares = [t.square() for t in random(1e-2)]
    return random(0.1), [t.to(dtype) for t in random(1e-2)], random(1e-3), squares


def split_all(masters: list[Tensor]) -> list[SplitMaster]:
    return [SplitMaster.of(m, torch.empty_like(m, dtype=torch.bfloat16)) for m in masters]


def settings(divisor: float, weight_decay: float = DECAY) -> dict[str, Any]:
    return {
        "lr": LR,
        "weight_decay": weight_decay,
        "betas": BETAS,
        "eps": EPS,
        "divisor": torch.tensor(divisor, device=DEVICE),
    }


def counts() -> list[Tensor]:
    return [torch.tensor(40.0 * n, device=DEVICE) for n in range(len(SHAPES))]


@pytest.mark.parametrize("divisor", [1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_is_that_of_torch(dtype: torch.dtype, divisor: float) -> None:
    """Up to two units in the last place: torch computes in another order on each device."""
    theirs, ours, steps, own_steps = weights(dtype), weights(dtype), counts(), counts()
    own = split_all(ours[0])
    adamw_kernel.step(own, *ours[1:], own_steps, **settings(divisor))
    _fused_adamw(*theirs, steps, **settings(divisor))
    assert own_steps == steps
    for a, b in zip(
        (*(m.join() for m in own), *ours[2], *ours[3]),
        (*theirs[0], *theirs[2], *theirs[3]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=2**-22, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_has_the_bits_of_the_formula(dtype: torch.dtype) -> None:
    masters, gradients, new_first, new_second = weights(dtype)
    _, _, first, second = weights(dtype)
    own, steps, how = split_all(masters), counts(), settings(2.5)
    adamw_kernel.step(own, gradients, new_first, new_second, steps, **how)
    for n, (w, count) in enumerate(zip(masters, steps, strict=True)):
        g = gradients[n].float() / how["divisor"]
        m = BETAS[0] * first[n] + (1 - BETAS[0]) * g
        v = BETAS[1] * second[n] + (1 - BETAS[1]) * g * g
        rate = (LR / (1 - BETAS[0] ** count.double())).float()
        correction = (1 - BETAS[1] ** count.double()).sqrt().float()
        root = v.double().sqrt().float() / correction  # torch's in float32 is off by a bit
        w = w - LR * DECAY * w
        w = w - rate * m / (root + EPS)
        assert torch.equal(own[n].join(), w)
        assert torch.equal(new_first[n], m) and torch.equal(new_second[n], v)


@pytest.mark.parametrize("divisor", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_changes_nothing(divisor: float) -> None:
    masters, gradients, first, second = weights(torch.bfloat16)
    own, steps = split_all(masters), [torch.zeros((), device=DEVICE) for _ in SHAPES]
    adamw_kernel.step(own, gradients, first, second, steps, **settings(divisor))
    assert not any(steps)
    assert all(torch.equal(a.join(), b) for a, b in zip(own, masters, strict=True))
    _, _, *moments = weights(torch.bfloat16)
    for after, before in zip((first, second), moments, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_halves_are_split_in_the_kernel_as_outside() -> None:
    """A gradient of 0 changes nothing, so only the split may."""
    near_ties = [high * 0x10000 + 0x8000 + n for high in (0, 1, 0x3F80, 0x7F7E) for n in (-1, 0, 1)]
    positive = torch.tensor(near_ties, dtype=torch.int32, device=DEVICE).view(torch.float32)
    masters = torch.cat((positive, -positive))
    (own,) = split_all([masters])
    rounded, remainder = own.rounded.clone(), own.remainder.clone()
    zeros = [[torch.zeros_like(masters)] for _ in range(3)]
    adamw_kernel.step([own], *zeros, [torch.zeros((), device=DEVICE)], **settings(1.0, 0.0))
    assert torch.equal(own.rounded, rounded) and torch.equal(own.remainder, remainder)
