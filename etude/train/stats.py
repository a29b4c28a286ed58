"""Statistics of optimizer steps, as the learner returns them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from etude.core.events import MismatchStats
from etude.core.types import RecomputedRow
from etude.train.supervised import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RlStats:
    """Statistics of one optimizer step of RL, as `Learner.rl_step` returns them."""

    loss: float
    mismatch: MismatchStats
    """Train/inference mismatch of the sampled tokens."""
    corrected_frac: float
    """Share of the sampled tokens whose importance weight was truncated or masked."""
    zero_grad_frac: float
    """Share of the sampled tokens with zero gradient although their advantage was not 0."""
    entropy: float
    """Mean over the sampled tokens, in nats."""
    grad_norm: float
    """The norm of the gradient before clipping."""
    lr: float
    num_rows: int
    num_loss_tokens: int
    """Sampled tokens."""
    num_forward_tokens: int
    """Tokens that went through the model, prompts included."""
    router_mismatch_frac: float | None = None
    """Share of the tokens with replayed experts for which a router would have chosen another
    expert."""
    experts_replaced_frac: float | None = None
    """Share of the replayed experts that scored below `router_replay_min_score`, and were
    replaced."""
    recomputed: tuple[RecomputedRow, ...] = ()
    """The log-probs recomputed by the trainer, for each row of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedStats:
    """Statistics of one supervised optimizer step, as `Learner.supervised_step` returns them."""

    loss: float
    grad_norm: float
    lr: float
    num_loss_tokens: int
    metrics: Metrics
    """Further metrics of the loss, each a mean over the terms of the loss."""


def recomputed_rows(seen_N5: Tensor, num_rows: int) -> tuple[RecomputedRow, ...]:
    """The recomputed values of each row, from columns of its tokens: row number, old and new
    log-prob, argmax, router mismatch."""
    number_N = seen_N5[:, 0].long()
    sizes = number_N.bincount(minlength=num_rows).tolist()
    rows = torch.split(seen_N5[number_N.argsort(stable=True)], sizes)
    return tuple(
        RecomputedRow(
            logprobs=tuple(row[:, 2].tolist()),
            argmax=tuple(row[:, 3].long().tolist()),
            router_mismatch=None if row[:, 4].isnan().any() else tuple(row[:, 4].bool().tolist()),
        )
        for row in rows
    )
