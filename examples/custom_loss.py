"""A policy loss of one's own: what went badly counts for less than what went well."""

from __future__ import annotations

import torch
from torch import Tensor

from etude.train.loss import Clip, LossInputs, PolicyLoss


def gentle(tokens: LossInputs, clip: Clip) -> Tensor:
    """Plain policy gradient, but blame is a fifth of praise: a small policy that is pushed away
    from what it said drifts to where nobody has looked."""
    adv_N = torch.where(tokens.adv_N < 0, 0.2 * tokens.adv_N, tokens.adv_N)
    return -adv_N * tokens.logp_N


GENTLE = PolicyLoss(function=gentle, correction="truncated")
