"""Drawing tokens. B rows, V vocabulary."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def draws(seed: int, max_tokens: int) -> list[float]:
    """All the randomness of one request, fixed before it starts: neither the batch nor a swap of weights changes it."""
    return np.random.Generator(np.random.PCG64(seed)).random(max_tokens).tolist()  # type: ignore[no-any-return]


def sample(logits_BV: Tensor, temperature_B: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row, by the inverse of the cumulative distribution at `u` in [0, 1), and its log-prob under the
    distribution that it was drawn from. Temperature 0 takes the likeliest token; nothing is drawn then, and the
    log-prob is the model's own.

    The sum runs in float64: over a large vocabulary, float32 would shift the boundaries by more than the width of a
    rare token.
    """
    greedy_B = temperature_B == 0
    divisor_B = torch.where(greedy_B, 1.0, temperature_B)
    logprobs_BV = torch.log_softmax(logits_BV.float() / divisor_B[:, None].float(), dim=-1)
    cumulative_BV = logprobs_BV.double().exp_().cumsum_(-1)
    # u < 1, so the target is below the total: the first entry above it belongs to a token of positive probability.
    target_B1 = u_B.double()[:, None] * cumulative_BV[:, -1:]
    drawn_B = torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0]
    tokens_B = torch.where(greedy_B, logits_BV.argmax(-1), drawn_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
