"""The arithmetic of a model: plain, or batch-invariant, in which a token does not depend on its
neighbours in the batch. Either may compute the products of its layers in FP8, and round keys and
values to FP8.

A matrix product with one row and one with twenty sum in different orders, and so do attention over
a prompt and attention over a cache. `PLAIN` lets the library choose. With `INVARIANT` every value
computed for a token has the same bits alone or among others, processed at once, in chunks or token
by token, in the engine or in the trainer:

- products are computed in tiles of `TILE_ROWS` rows, the last one padded, so that every row sees
  the same kernel;
- attention sums over tiles of keys of a fixed size, in order (`tiled_attention`);
- elementwise functions consist of steps that IEEE 754 defines to the bit. The library's own `silu`
  treats numbers that fill a vector register differently from the rest, and which numbers these are
  depends on how many come before them.

Norms and softmax are computed row by row anyway. All this depends on the libraries of a machine;
tests/engine/test_batch_invariance.py checks it. Bits are not the same on another kind of processor.

Shapes: N rows, C inputs, M outputs, H heads, Q and R inputs and outputs of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LN2_HIGH = 0.693359375
LN2_LOW = math.log(2) - LN2_HIGH
"""LN2_HIGH has few enough digits that a multiple of it is exact."""
TILE_ROWS = 32
"""Enough for an efficient product, few enough that a lone token does not pay much for the empty
rows."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """(x [.., C], w [M, C], bias [M]) -> [.., M]"""
    per_head: Callable[[Tensor, Tensor], Tensor]
    """(x [.., H, Q], w [H, Q, R]) -> [.., H, R]: each head has its own matrix."""
    sigmoid: Callable[[Tensor], Tensor]
    silu: Callable[[Tensor], Tensor]
    gelu_tanh: Callable[[Tensor], Tensor]
    tanh: Callable[[Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """(x, cos, other, sin) -> x cos + other sin"""
    invariant: bool = False
    """A token has the same bits whatever else is in the batch."""
    fp8: bool = False
    """Products of layers are computed in FP8 (`model.fp8`)."""
    fp8_kv: bool = False
    """Keys and values are rounded to FP8, and a KV cache stores them in FP8."""

    @staticmethod
    def of(*, invariant: bool, fp8: bool, fp8_kv: bool = False) -> Arithmetic:
        return replace(INVARIANT if invariant else PLAIN, fp8=fp8, fp8_kv=fp8_kv)

    def but(self, *, invariant: bool) -> Arithmetic:
        """The same arithmetic with or without batch invariance."""
        return Arithmetic.of(invariant=invariant, fp8=self.fp8, fp8_kv=self.fp8_kv)

    def activation(self, name: str) -> Callable[[Tensor], Tensor]:
        """Activation function by its name in config.json."""
        return {"silu": self.silu, "gelu_pytorch_tanh": self.gelu_tanh}[name]


def value_of(exact: Callable[[], Tensor], *, gradient_of: Callable[[], Tensor]) -> Tensor:
    """The value of `exact`, with the gradient of the other function in the backward pass; the two
    are equal except for rounding. Gradients need not be invariant, and are faster this way."""
    if not torch.is_grad_enabled():
        return exact()
    with torch.no_grad():
        value = exact()
    instead: Tensor = _Instead.apply(gradient_of(), value)  # type: ignore[no-untyped-call]
    return instead


class _Instead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def value_of_later(
    exact: Callable[[], Tensor], gradient_of: Callable[..., Tensor], *inputs: Tensor
) -> Tensor:
    """Like `value_of`, but the other function is computed only in the backward pass, and until then
    only its inputs are kept; the gradient reaches these inputs alone."""
    value: Tensor = _Later.apply(exact, gradient_of, *inputs)  # type: ignore[no-untyped-call]
    return value


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exact: Callable[[], Tensor], plain: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return exact()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        with torch.enable_grad():
            plain = ctx.plain(*inputs)
        found = iter(torch.autograd.grad(plain, [x for x in inputs if x.requires_grad], grad))
        return None, None, *(next(found) if x.requires_grad else None for x in inputs)


def product_of(
    exact: Callable[[], Tensor], x: Tensor, w_MC: Tensor, bias_M: Tensor | None = None
) -> Tensor:
    """The value of `exact`, with the gradient of x wᵀ + bias in the backward pass; the two are
    equal except for rounding. The gradient needs x and w alone, so the plain product is not
    computed."""
    if not torch.is_grad_enabled():
        return exact()
    with torch.no_grad():
        value = exact()
    product: Tensor = _Product.apply(x, w_MC, bias_M, value)  # type: ignore[no-untyped-call]
    return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_MC: Tensor, bias_M: Tensor | None, value: Tensor) -> Tensor:
        ctx.save_for_backward(x, w_MC)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w_MC = ctx.saved_tensors
        wants_x, wants_w, wants_bias, _ = ctx.needs_input_grad
        grad_NM = grad.flatten(0, -2)
        return (
            grad @ w_MC if wants_x else None,
            grad_NM.T @ x.flatten(0, -2) if wants_w else None,
            grad_NM.sum(0) if wants_bias else None,
            None,
        )


def tiled_linear(x: Tensor, w_MC: Tensor, bias_M: Tensor | None = None) -> Tensor:
    def exact() -> Tensor:
        return _in_row_tiles(x.flatten(0, -2), w_MC).view(*x.shape[:-1], -1)

    product = product_of(exact, x, w_MC)
    return product if bias_M is None else product + bias_M


def _in_row_tiles(x_NC: Tensor, w_MC: Tensor) -> Tensor:
    rows = len(x_NC)
    x_NC = F.pad(x_NC, (0, 0, 0, -rows % TILE_ROWS)).contiguous()
    out_NM = x_NC.new_empty(len(x_NC), len(w_MC))
    for start in range(0, len(x_NC), TILE_ROWS):
        tile = slice(start, start + TILE_ROWS)
        torch.mm(x_NC[tile], w_MC.T, out=out_NM[tile])
    return out_NM[:rows]


def tiled_per_head(x: Tensor, w_HQR: Tensor) -> Tensor:
    return value_of(lambda: _heads_in_row_tiles(x, w_HQR), gradient_of=lambda: _per_head(x, w_HQR))


def _heads_in_row_tiles(x: Tensor, w_HQR: Tensor) -> Tensor:
    x_NHQ = x.flatten(0, -3)
    padded_HNQ = F.pad(x_NHQ, (0, 0, 0, 0, 0, -len(x_NHQ) % TILE_ROWS)).transpose(0, 1)
    tiles = [
        torch.bmm(tile_HNQ.contiguous(), w_HQR)
        for tile_HNQ in torch.split(padded_HNQ, TILE_ROWS, 1)
    ]
    return torch.cat(tiles, 1)[:, : len(x_NHQ)].transpose(0, 1).reshape(*x.shape[:-1], -1)


def _per_head(x: Tensor, w_HQR: Tensor) -> Tensor:
    return torch.einsum("...hq,hqr->...hr", x, w_HQR)


def _turn(x: Tensor, cos: Tensor, other: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, other, sin)


def _turn_in_steps(x: Tensor, cos: Tensor, other: Tensor, sin: Tensor) -> Tensor:
    # Each step is rounded separately, as IEEE 754 defines it; whether one fused instruction does
    # both depends on the position.
    return x * cos + other * sin


def _stepwise_sigmoid(x: Tensor) -> Tensor:
    return value_of(
        lambda: (1 / (1 + _stepwise_exp(-x.float().clamp(-80, 80)))).to(x.dtype),
        gradient_of=lambda: torch.sigmoid(x),
    )


def _stepwise_silu(x: Tensor) -> Tensor:
    return x * _stepwise_sigmoid(x)


def _stepwise_tanh(x: Tensor) -> Tensor:
    return value_of(lambda: 2 * _stepwise_sigmoid(2 * x) - 1, gradient_of=lambda: torch.tanh(x))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _stepwise_gelu_tanh(x: Tensor) -> Tensor:
    def exact() -> Tensor:
        # x (1 + tanh(y)) / 2 = x sigmoid(2 y)
        wide = x.float()
        y = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
        return (wide * _stepwise_sigmoid(2 * y)).to(x.dtype)

    return value_of(exact, gradient_of=lambda: _gelu_tanh(x))


def _stepwise_exp(x: Tensor) -> Tensor:
    """2^n e^r, for finite results: every step is rounded separately, so the position of a number
    does not matter."""
    n = torch.round(x * (1 / math.log(2)))
    r = x - n * LN2_HIGH - n * LN2_LOW
    series = torch.full_like(r, 1 / math.factorial(7))
    for degree in range(6, -1, -1):
        series.mul_(r).add_(1 / math.factorial(degree))
    return series * ((n.int() + 127) << 23).view(torch.float32)


PLAIN = Arithmetic(
    linear=F.linear,
    per_head=_per_head,
    sigmoid=torch.sigmoid,
    silu=F.silu,
    gelu_tanh=_gelu_tanh,
    tanh=torch.tanh,
    rotate=_turn,
)
INVARIANT = Arithmetic(
    linear=tiled_linear,
    per_head=tiled_per_head,
    sigmoid=_stepwise_sigmoid,
    silu=_stepwise_silu,
    gelu_tanh=_stepwise_gelu_tanh,
    tanh=_stepwise_tanh,
    rotate=_turn_in_steps,
    invariant=True,
)
