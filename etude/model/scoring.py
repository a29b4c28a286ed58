"""Changes to attention scores beyond causal softmax: a window, capped scores, sinks.

One plain computation for all backends; kernels take layers without any of these.

Shapes: B rows, H query heads, K key/value heads, t queries, S keys, D head size, V size of a value,
G query heads that share a key head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

QUERIES = 512
"""Queries of a long sequence that are scored at once."""


@dataclass(frozen=True, slots=True)
class Scoring:
    window: int | None = None
    """Number of tokens that a token sees, including itself; None: all before it."""
    softcap: float | None = None
    """Scores are bent to stay below it."""
    sinks_H: Tensor | None = None
    """A score of each head in addition to those of the keys; its share of the attention contributes
    nothing."""

    def hides(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Mask [.., t, S]: True where the tokens at positions `queries` [.., t] do not see those at
        `keys` [S]."""
        hidden = keys > queries.unsqueeze(-1)
        if self.window is None:
            return hidden
        return hidden | (keys <= queries.unsqueeze(-1) - self.window)


def attend_scored(
    q_tHD: Tensor, k_SKD: Tensor, v_SKV: Tensor, scale: float | None, scoring: Scoring
) -> Tensor:
    """Attend the last t of S tokens, in pieces that look no further back than necessary."""
    first = len(k_SKD) - len(q_tHD)
    window = scoring.window
    parts = []
    for start in range(0, len(q_tHD), QUERIES):
        end = min(start + QUERIES, len(q_tHD))
        low = 0 if window is None else max(0, first + start - window + 1)
        places = torch.arange(low, first + end, device=q_tHD.device)
        hidden_tS = scoring.hides(places[first + start - low :], places)
        q, k, v = (
            x.transpose(0, 1)[None]
            for x in (q_tHD[start:end], k_SKD[low : first + end], v_SKV[low : first + end])
        )
        parts.append(attend_hidden(q, k, v, hidden_tS, scale, scoring)[0].transpose(0, 1))
    return torch.cat(parts)


def attend_hidden(
    q_BHtD: Tensor,
    k_BKSD: Tensor,
    v_BKSV: Tensor,
    hidden: Tensor,
    scale: float | None,
    scoring: Scoring,
) -> Tensor:
    """Returns BHtV. `hidden`: [.., t, S], True where a query does not see a key."""
    if scoring.softcap is None and scoring.sinks_H is None:
        return F.scaled_dot_product_attention(
            q_BHtD, k_BKSD, v_BKSV, attn_mask=~hidden, scale=scale, enable_gqa=True
        )
    (rows, heads, new, size), keys = q_BHtD.shape, k_BKSD.shape[1]
    # Scores are float32, as in every fused kernel.
    q_BKGtD = q_BHtD.reshape(rows, keys, heads // keys * new, size).float()
    scores = q_BKGtD @ k_BKSD.transpose(-1, -2).float() * (size**-0.5 if scale is None else scale)
    scores = scores.view(rows, heads, new, -1)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(hidden, -torch.inf)
    if scoring.sinks_H is not None:
        sinks = scoring.sinks_H.float().view(1, heads, 1, 1).expand(rows, heads, new, 1)
        weights = torch.cat((sinks, scores), -1).softmax(-1)[..., 1:]
    else:
        weights = scores.softmax(-1)
    grouped = weights.to(v_BKSV.dtype).view(rows, keys, heads // keys * new, -1)
    return (grouped @ v_BKSV).view(rows, heads, new, -1)
