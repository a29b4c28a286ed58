"""The LM head in chunks: hidden states to log-probs of given tokens, without all logits at once.

The logits of a batch are by far its largest tensor: a hundred thousand numbers for each token, and
only one of them is needed. So if there are too many, the tokens go through the head in chunks, and
the backward pass recomputes the logits of a chunk. A compiled chunk keeps only the logits
themselves, in the model's dtype, so the limit is far higher.

Shapes: N tokens, V vocabulary, E hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from etude.model.transformer import Transformer

MAX_LOGITS = {"cpu": 2**25, "cuda": 2**28}  # numbers at once: 128 MB, 1 GB
MAX_FUSED_LOGITS = 2**32  # 8 GB, and as much for their gradient


class TokenDistributionStats(NamedTuple):
    """Entropy and argmax of the distribution at each token; without gradient, and empty if not
    requested."""

    entropy_N: Tensor
    argmax_N: Tensor


Part = Callable[
    [Transformer, Tensor, Tensor, Tensor | None, bool], tuple[Tensor, TokenDistributionStats]
]


def head_logprobs(
    model: Transformer,
    hidden_NE: Tensor,
    tokens_N: Tensor,
    temperature_N: Tensor | None = None,
    *,
    with_stats: bool = False,
) -> tuple[Tensor, TokenDistributionStats]:
    """The log-prob of each token, and with `with_stats` the statistics of its distribution."""
    part = _fused_part() if model.fused else _part
    most = MAX_FUSED_LOGITS if model.fused else MAX_LOGITS[hidden_NE.device.type]
    size = max(1, most // model.config.vocab_size)
    if len(tokens_N) <= size:
        return part(model, hidden_NE, tokens_N, temperature_N, with_stats)
    temperatures: Iterable[Tensor | None] = (
        itertools.repeat(None) if temperature_N is None else torch.split(temperature_N, size)
    )
    parts = [
        checkpoint(
            part,
            model,
            hidden,
            tokens,
            temperature,
            with_stats,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for hidden, tokens, temperature in zip(
            torch.split(hidden_NE, size), torch.split(tokens_N, size), temperatures, strict=False
        )
    ]
    logps, others = zip(*parts, strict=True)
    return torch.cat(logps), TokenDistributionStats(*map(torch.cat, zip(*others, strict=True)))


@cache
def _fused_part() -> Part:
    return torch.compile(_part, dynamic=True)


def _part(
    model: Transformer,
    hidden_NE: Tensor,
    tokens_N: Tensor,
    temperature_N: Tensor | None,
    with_stats: bool,
) -> tuple[Tensor, TokenDistributionStats]:
    logp_N, logp_NV = model.logprobs(hidden_NE, tokens_N, temperature_N)
    if not with_stats:
        return logp_N, TokenDistributionStats(logp_N.new_zeros(0), tokens_N.new_zeros(0))
    with torch.no_grad():
        return logp_N, TokenDistributionStats(
            -(logp_NV.exp() * logp_NV).sum(-1), logp_NV.argmax(-1)
        )
