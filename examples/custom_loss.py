"""A custom policy loss: negative advantages count for less than positive ones."""

from __future__ import annotations

import torch
from torch import Tensor

from etude.train.loss import Clip, LossInputs, PolicyLoss


def gentle(tokens: LossInputs, clip: Clip) -> Tensor:
    """Plain policy gradient with negative advantages scaled to a fifth: a small policy that is
    pushed away from its own samples drifts into regions that it has never explored."""
    adv_N = torch.where(tokens.adv_N < 0, 0.2 * tokens.adv_N, tokens.adv_N)
    return -adv_N * tokens.logp_N


GENTLE = PolicyLoss(function=gentle, correction="truncated")
