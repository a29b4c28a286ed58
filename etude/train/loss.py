"""What is minimised. Policy losses are functions in `LOSS`; adding one is adding a function.

A policy loss gives one number for each sampled token; the learner adds them up over the whole batch and divides by the
number of sampled tokens of the whole batch, so that how rows were cut into microbatches changes nothing.

Shapes: B rows, T tokens, E hidden size; N the tokens that count, in the order in which they stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.model.attention import Causal
from etude.model.tiled_attention import CausalInTiles
from etude.model.transformer import Routing, Transformer
from etude.train.head import head_logprobs

PolicyLoss = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(logp_N, old_logp_N, adv_N, ratio_cap) -> loss_N"""


def truncated(logp_N: Tensor, old_logp_N: Tensor, adv_N: Tensor, ratio_cap: float) -> Tensor:
    """Policy gradient, weighted by how much likelier the token has become since it was sampled, up to a cap.

    The weight corrects for the weights (and the numerics) that sampled the token not being the ones that learn. The cap
    bounds the variance; since the weight is a constant to the gradient, a capped token still teaches, where PPO's clip
    would silence it.
    """
    return -_ratio(logp_N, old_logp_N).clamp(max=ratio_cap) * adv_N * logp_N


def masked(logp_N: Tensor, old_logp_N: Tensor, adv_N: Tensor, ratio_cap: float) -> Tensor:
    """Like `truncated`, but a token beyond the cap (or as far below it) is left out: for models whose numerics make a
    few tokens' ratios meaningless rather than large."""
    ratio_N = _ratio(logp_N, old_logp_N)
    trusted_N = (ratio_N <= ratio_cap) & (ratio_N >= 1 / ratio_cap)
    return -(ratio_N * trusted_N) * adv_N * logp_N


LOSS: dict[str, PolicyLoss] = {"truncated": truncated, "masked": masked}


def _ratio(logp_N: Tensor, old_logp_N: Tensor) -> Tensor:
    return (logp_N.detach() - old_logp_N).exp()


def token_logprobs(
    model: Transformer,
    tokens_BT: Tensor,
    mask_BT: Tensor,
    temperature: float = 1.0,
    routing: Routing | None = None,
    starts_BT: Tensor | None = None,
    *,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """For each token that counts: its log-prob, and if it is wanted the entropy of what could have stood there.

    `starts_BT` is as in `rows.Padded`.

    Only positions that predict a counted token reach the head: every other token costs no logits and gets no gradient.
    """
    hidden_NE, tokens_N = predicted(model, tokens_BT, mask_BT, routing, starts_BT)
    return head_logprobs(model, hidden_NE, tokens_N, temperature, with_entropy=with_entropy)


def predicted(
    model: Transformer,
    tokens_BT: Tensor,
    mask_BT: Tensor,
    routing: Routing | None = None,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """For each token that counts: the hidden state before it, and the token (NE, N)."""
    starts_BT = None if starts_BT is None else starts_BT[:, :-1]
    positions_BT = torch.arange(tokens_BT.shape[1] - 1, device=tokens_BT.device).expand(len(tokens_BT), -1)
    if starts_BT is not None:
        positions_BT = positions_BT - starts_BT
    # What an engine sampled never shares a row with another document.
    attend = CausalInTiles() if model.invariant and starts_BT is None else Causal(starts_BT)
    hidden_BTE = model(tokens_BT[:, :-1], positions_BT, attend, routing)
    counts_BT = mask_BT[:, 1:]
    return hidden_BTE[counts_BT], tokens_BT[:, 1:][counts_BT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How far the learning policy is from the one that sampled, over the sampled tokens of a batch."""

    k1: float
    """Mean of old minus new log-prob: an unbiased estimate of KL(old, new), of either sign."""
    k3: float
    """Mean of ratio - 1 - log ratio: the same estimate, never negative and of smaller variance."""
    k3_p99: float
    capped: float
    """Share of the tokens whose ratio is above the cap."""


def drift(logp_N: Tensor, old_logp_N: Tensor, ratio_cap: float) -> Drift:
    log_ratio_N = (logp_N - old_logp_N).double()
    k3_N = log_ratio_N.expm1() - log_ratio_N
    return Drift(
        k1=-log_ratio_N.mean().item(),
        k3=k3_N.mean().item(),
        k3_p99=k3_N.kthvalue(math.ceil(0.99 * len(k3_N))).values.item(),
        capped=(log_ratio_N.exp() > ratio_cap).double().mean().item(),
    )
