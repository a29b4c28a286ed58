"""Shared parts of the kernel checks: random inputs, and plain float64 functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class Inputs:
    device: str
    dtype: torch.dtype
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device)
        self.generator.seed()

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=self.device, generator=self.generator) * scale).to(
            self.dtype
        )

    def poison(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, math.nan, device=self.device, dtype=dtype or self.dtype)

    def ints(self, values: object) -> Tensor:
        return torch.tensor(values, device=self.device, dtype=torch.int32)

    def shuffled(self, count: int) -> Tensor:
        return torch.randperm(count, device=self.device, generator=self.generator)


def error(out: Tensor, reference: Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm())


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.double(), gain.shape, gain.double(), eps)


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up
