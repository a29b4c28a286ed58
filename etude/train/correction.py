"""Importance-sampling corrections for tokens that another policy sampled.

The engine that sampled a token had older weights and other numerics. The learner recomputes the
token's log-prob with its own weights; e to the difference of the two is the importance weight of
the token. A correction bounds it: raw weights are unbounded, and one of them can outweigh a whole
batch.

    token level      each token by its own ratio: little variance, and the bias of ignoring the
                     tokens before it
    sequence level   every token of a row by the product of the row's ratios: unbiased except for
                     the bound, but with a large variance for long rows

    truncated        weights above the cap are set to it: such a token still teaches
    masked           weights above the cap, or below its inverse, are set to 0 (IcePop): for models
                     whose numerics make a few ratios meaningless rather than large

Weights are constants for the gradient. Shapes: N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.train.loss import sum_by_row


def truncate(ratio_N: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling (TIS): ratios above the cap become the cap."""
    return ratio_N.clamp(max=cap)


def mask(ratio_N: Tensor, cap: float) -> Tensor:
    """Masked importance sampling (IcePop): ratios above the cap, or below its inverse, become 0."""
    # Not a product: a ratio may have overflowed, and infinity times 0 is NaN.
    return torch.where((ratio_N <= cap) & (ratio_N >= 1 / cap), ratio_N, 0.0)


def token_ratio(log_ratio_N: Tensor, row_N: Tensor) -> Tensor:
    return log_ratio_N.exp()


def sequence_ratio(log_ratio_N: Tensor, row_N: Tensor) -> Tensor:
    return sum_by_row(log_ratio_N, row_N).exp()


@dataclass(frozen=True, slots=True)
class ImportanceSamplingCorrection:
    """An importance-sampling correction: the ratio of each token, and the function that bounds
    it."""

    ratio: Callable[[Tensor, Tensor], Tensor]
    bound: Callable[[Tensor, float], Tensor]


CORRECTION: dict[str, ImportanceSamplingCorrection] = {
    "truncated": ImportanceSamplingCorrection(token_ratio, truncate),
    "masked": ImportanceSamplingCorrection(token_ratio, mask),
    "sequence_truncated": ImportanceSamplingCorrection(sequence_ratio, truncate),
    "sequence_masked": ImportanceSamplingCorrection(sequence_ratio, mask),
}
