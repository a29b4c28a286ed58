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

from etude.core.errors import EtudeError
from etude.train import adamw_kernel
from etude.train.masters import SplitMaster
from etude.train.optimizer import BETAS, EPS, _fused_adamw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(1,), (0, 4), (7,), (1025,), (3, 700), (2048,), (0,)]
LR = 1e-3
DECAYS = [0.1, 0.1, 0.0, 0.1, 0.0, 0.1, 0.0]
FLOAT, BFLOAT, MIXED = (
    [torch.float32] * len(SHAPES),
    [torch.bfloat16] * len(SHAPES),
    [(torch.float32, torch.bfloat16)[n % 2] for n in range(len(SHAPES))],
)
KINDS = pytest.mark.parametrize("kinds", [FLOAT, BFLOAT, MIXED], ids=["fp32", "bf16", "mixed"])
OFFSET = pytest.mark.parametrize("offset", [0, 1])
Weights = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def weights(kinds: list[torch.dtype]) -> Weights:
    """Masters, gradients and moments, as they are in mid-training."""
    generator = torch.Generator().manual_seed(0)

    def random(scale: float) -> list[Tensor]:
        return [(scale * torch.randn(s, generator=generator)).to(DEVICE) for s in SHAPES]

    squares = [t.square() for t in random(1e-2)]
    gradients = [t.to(kind) for t, kind in zip(random(1e-2), kinds, strict=True)]
    return random(0.1), gradients, random(1e-3), squares


def moved(tensor: Tensor, offset: int) -> Tensor:
    """A copy that begins so many numbers after the beginning of its memory."""
    memory = tensor.new_empty(tensor.numel() + offset)
    return memory[offset:].view(tensor.shape).copy_(tensor)


def split_all(masters: list[Tensor], offset: int = 0) -> list[SplitMaster]:
    made = []
    for master in masters:
        rounded = moved(master.bfloat16(), offset)
        made.append(SplitMaster(rounded, moved(torch.zeros_like(master).short(), offset)))
        made[-1].copy_(master)
    return made


def settings(divisor: float, decays: list[float] = DECAYS) -> dict[str, Any]:
    return {
        "lr": LR,
        "weight_decays": decays,
        "betas": BETAS,
        "eps": EPS,
        "divisor": torch.tensor(divisor, device=DEVICE),
    }


def counts() -> list[Tensor]:
    return [torch.tensor(40.0 * n, device=DEVICE) for n in range(len(SHAPES))]


def test_the_kernel_passes_its_check() -> None:
    adamw_kernel.check.__wrapped__(DEVICE, BETAS, EPS)


def test_a_kernel_with_other_results_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = adamw_kernel.SplitAdamW.step

    def wrong(self: adamw_kernel.SplitAdamW, *tensors: Any, **how: Any) -> None:
        right(self, *tensors, **how)
        _, _, first_moments, *_ = tensors
        first_moments[1][-1] *= 1 + 2**-21

    monkeypatch.setattr(adamw_kernel.SplitAdamW, "step", wrong)
    with pytest.raises(EtudeError, match=f"wrong results on {DEVICE} .* stops rather than train"):
        adamw_kernel.check.__wrapped__(DEVICE, BETAS, EPS)


@pytest.mark.parametrize("divisor", [1.0, 2.5])
@KINDS
def test_a_step_is_that_of_torch(kinds: list[torch.dtype], divisor: float) -> None:
    """Up to two units in the last place: torch computes in another order on each device."""
    theirs, ours, steps, own_steps = weights(kinds), weights(kinds), counts(), counts()
    own = split_all(ours[0])
    adamw_kernel.SplitAdamW().step(own, *ours[1:], own_steps, **settings(divisor))
    _fused_adamw(*theirs, steps, **settings(divisor))
    assert own_steps == steps
    # the unit of a master may be smaller than that of what is subtracted from it
    for parts, atol in (
        (zip((m.join() for m in own), theirs[0], strict=True), 2**-27),
        (zip((*ours[2], *ours[3]), (*theirs[2], *theirs[3]), strict=True), 1e-9),
    ):
        for a, b in parts:
            torch.testing.assert_close(a, b, rtol=2**-22, atol=atol)


@OFFSET
@KINDS
def test_a_step_has_the_bits_of_the_formula(kinds: list[torch.dtype], offset: int) -> None:
    masters, gradients, first, second = weights(kinds)
    own, steps, how = split_all(masters, offset), counts(), settings(2.5)
    new_first, new_second = ([moved(t, offset) for t in part] for part in (first, second))
    ours = [moved(t, offset) for t in gradients]
    adamw_kernel.SplitAdamW().step(own, ours, new_first, new_second, steps, **how)
    for n, (w, count) in enumerate(zip(masters, steps, strict=True)):
        g = gradients[n].float() / how["divisor"]
        m = BETAS[0] * first[n] + (1 - BETAS[0]) * g
        v = BETAS[1] * second[n] + (1 - BETAS[1]) * g * g
        rate = (LR / (1 - BETAS[0] ** count.double())).float()
        correction = (1 - BETAS[1] ** count.double()).sqrt().float()
        root = v.double().sqrt().float() / correction  # torch's in float32 is off by a bit
        w = w - LR * DECAYS[n] * w
        w = w - rate * m / (root + EPS)
        assert torch.equal(own[n].join(), w)
        assert torch.equal(new_first[n], m) and torch.equal(new_second[n], v)


@OFFSET
def test_nothing_beside_the_tensors_is_written(offset: int) -> None:
    masters, gradients, first, _ = weights(BFLOAT)
    counted, ends = counts(), [offset + m.numel() for m in masters]
    memories = [
        [torch.full((end + 9,), 3, device=DEVICE, dtype=kind) for end in ends]
        for kind in (torch.bfloat16, torch.int16, torch.float32, torch.float32)
    ]
    rounded, remainders, *moments = (
        [
            memory[offset:end].view(like.shape)
            for memory, end, like in zip(part, ends, first, strict=True)
        ]
        for part in memories
    )
    own = [SplitMaster(*halves) for halves in zip(rounded, remainders, strict=True)]
    adamw_kernel.SplitAdamW().step(own, gradients, *moments, counted, **settings(1.0))
    for part in memories:
        for memory, end in zip(part, ends, strict=True):
            assert bool((memory[:offset] == 3).all() and (memory[end:] == 3).all())


def test_one_object_takes_steps_over_other_tensors() -> None:
    """The gradients move at every step, and what is remembered of sizes is not used for others."""
    one, masters = adamw_kernel.SplitAdamW(), weights(BFLOAT)[0]
    found = []
    for step in (one.step, None):
        _, gradients, first, second = weights(MIXED)
        own, steps = split_all(masters), counts()
        state: Any = (own, gradients, first, second, steps)
        for chosen in (slice(None), slice(2), slice(1, None), slice(None)):
            state[1][:] = [2 * t for t in state[1]]
            how = settings(2.5, DECAYS[chosen])
            (step or adamw_kernel.SplitAdamW().step)(*(part[chosen] for part in state), **how)
        found.append((*(m.join() for m in own), *first, *second, *steps))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("divisor", [math.inf, -math.inf, math.nan])
@KINDS
def test_a_gradient_that_is_not_finite_changes_nothing(
    kinds: list[torch.dtype], divisor: float
) -> None:
    masters, gradients, first, second = weights(kinds)
    own, steps = split_all(masters), [torch.zeros((), device=DEVICE) for _ in SHAPES]
    adamw_kernel.SplitAdamW().step(own, gradients, first, second, steps, **settings(divisor))
    assert not any(steps)
    assert all(torch.equal(a.join(), b) for a, b in zip(own, masters, strict=True))
    _, _, *moments = weights(kinds)
    for after, before in zip((first, second), moments, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_tensors_without_any_weight_are_stepped_too() -> None:
    (own,) = split_all([torch.zeros(0, 4, device=DEVICE)])
    empty, count = [torch.zeros(0, 4, device=DEVICE)], torch.zeros((), device=DEVICE)
    adamw_kernel.SplitAdamW().step([own], empty, empty, empty, [count], **settings(1.0, [0.1]))
    assert count == 1


def test_halves_are_split_in_the_kernel_as_outside() -> None:
    """A gradient of 0 changes nothing, so only the split may."""
    near_ties = [high * 0x10000 + 0x8000 + n for high in (0, 1, 0x3F80, 0x7F7E) for n in (-1, 0, 1)]
    positive = torch.tensor(near_ties, dtype=torch.int32, device=DEVICE).view(torch.float32)
    masters = torch.cat((positive, -positive))
    (own,) = split_all([masters])
    rounded, remainder = own.rounded.clone(), own.remainder.clone()
    zeros = [[torch.zeros_like(masters)] for _ in range(3)]
    count = torch.zeros((), device=DEVICE)
    adamw_kernel.SplitAdamW().step([own], *zeros, [count], **settings(1.0, [0.0]))
    assert torch.equal(own.rounded, rounded) and torch.equal(own.remainder, remainder)
