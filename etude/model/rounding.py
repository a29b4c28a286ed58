"""Random rounding: an estimate of how much rounding alone changes the output of a model, on the
data at hand.

Two implementations of one model in one floating-point type differ because each operator rounds its
result, and because sums are taken in different orders. `RandomRounding` runs a model as one more
implementation, drawn at random (stochastic, or Monte Carlo, arithmetic):

- the result of each operator is computed in a wider type and rounded to one of its two neighbours
  in its own type, with the probability that makes the rounding unbiased. Its expected square error
  is at least that of rounding to the nearest;
- a product that sums n numbers in float32 gets the error of summing them in an arbitrary order: up
  to sqrt(n) times the unit roundoff relative to each number (Higham and Mary, 2019). A product in
  bfloat16 sums in float32, where this is negligible compared to rounding the result.

Operators that only move numbers stay exact. `upper_bound` computes, from a metric of several draws,
how large it may be in another one.

Shapes: N tokens of all rows, T of one row, H query heads, K key/value heads, D head size, V size of
a value.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from etude.model.recurrence import Recur, Recurrence, Span
from etude.model.scoring import Scoring

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Index of the argument that is the left factor."""
MOVES = {
    f"aten::{name}"
    for name in (
        "cat", "clone", "embedding", "gather", "index", "index_copy", "index_select", "masked_fill",
        "roll", "_unsafe_view",
    )
}  # fmt: skip
"""Operators that are exact in any type and need not be widened. Other exact operators are widened,
and stay exact."""

NUM_DRAWS = 8
QUANTILE = 4.785
"""Quantile of Student's distribution with 7 degrees of freedom: exceeded once in a thousand
times."""


def upper_bound(draws: Sequence[float]) -> float:
    """The one-sided 99.9 % prediction bound for another draw."""
    assert len(draws) == NUM_DRAWS
    spread = statistics.stdev(draws) * math.sqrt(1 + 1 / NUM_DRAWS)
    return statistics.fmean(draws) + QUANTILE * spread


class RandomRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which operators round at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler alone takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kind = _result_type(func, args, kwargs)
        if kind is None:
            return func(*args, **kwargs)

        wide = WIDER[kind]
        if "dtype" in kwargs:
            kwargs["dtype"] = wide
        inputs = [x.to(wide) if _is_rounded(x) else x for x in args]
        place = PRODUCTS.get(func._schema.name)
        if place is not None and wide == torch.float64:
            inputs[place] = self._any_order(inputs[place], kind)
        result = func(*inputs, **kwargs)
        if isinstance(result, tuple):
            return tuple(self._rounded(x, kind) if _is_wide(x, wide) else x for x in result)
        return self._rounded(result, kind) if _is_wide(result, wide) else result

    def _any_order(self, left: Tensor, kind: torch.dtype) -> Tensor:
        size = math.sqrt(left.shape[-1]) * torch.finfo(kind).eps / 2
        return left * (1 + size * (2 * self._uniform(left) - 1))

    def _rounded(self, x: Tensor, kind: torch.dtype) -> Tensor:
        nearest = x.to(kind)
        error = x - nearest
        beyond = torch.nextafter(nearest, torch.where(error > 0, torch.inf, -torch.inf).to(kind))
        share = error / (beyond.to(x.dtype) - nearest)
        return torch.where(self._uniform(x) < share, beyond, nearest)

    def _uniform(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, dtype=like.dtype, generator=self._generator)


def _result_type(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.dtype | None:
    """The floating-point type of an operator's result; None if it computes nothing."""
    schema = func._schema
    if schema.is_mutable or schema.name in MOVES or any(r.alias_info for r in schema.returns):
        return None
    found = [x for x in args if _is_rounded(x)]
    if (told := kwargs.get("dtype")) is not None:
        return told if told in WIDER and found else None
    # A zero-dimensional tensor does not decide the type.
    kinds = {x.dtype for x in found if x.ndim} or {x.dtype for x in found}
    return max(kinds, key=lambda kind: kind.itemsize) if kinds else None


def _is_rounded(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype in WIDER


def _is_wide(x: object, wide: torch.dtype) -> bool:
    return isinstance(x, Tensor) and x.dtype == wide


class StepwiseCausal:
    """`attention.CausalAttention` for rows one after the other, computed step by step, so that each
    step is rounded. Scores are float32, as in every fused kernel; weights have the dtype of the
    model."""

    latent = True

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def __call__(
        self,
        layer: int,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKV: Tensor,
        scale: float | None = None,
        scoring: Scoring | None = None,
    ) -> Tensor:
        scale = scale or q_NHD.shape[-1] ** -0.5
        group = q_NHD.shape[1] // k_NKD.shape[1]
        rows = zip(*(x.split_with_sizes(self._lengths) for x in (q_NHD, k_NKD, v_NKV)), strict=True)
        return torch.cat([_attend(q, k, v, group, scale, scoring or Scoring()) for q, k, v in rows])

    def recurrence(self, shape: torch.Size) -> Recur:
        return Recurrence([Span(*ends) for ends in pairwise([0, *accumulate(self._lengths)])])


def _attend(
    q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, group: int, scale: float, scoring: Scoring
) -> Tensor:
    k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k_TKD, v_TKV))
    scores_HTT = q_THD.transpose(0, 1).float() @ k.transpose(1, 2).float() * scale
    if scoring.softcap is not None:
        scores_HTT = scoring.softcap * torch.tanh(scores_HTT / scoring.softcap)
    places_T = torch.arange(len(q_THD))
    scores_HTT = scores_HTT.masked_fill(scoring.hides(places_T, places_T), -torch.inf)
    if scoring.sinks_H is None:
        weights_HTT = scores_HTT.softmax(-1).to(v.dtype)
    else:
        sinks = scoring.sinks_H.float().view(-1, 1, 1).expand(-1, len(q_THD), 1)
        weights_HTT = torch.cat((sinks, scores_HTT), -1).softmax(-1)[..., 1:].to(v.dtype)
    return (weights_HTT @ v).transpose(0, 1)
