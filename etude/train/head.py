"""From hidden states to the log-probs of given tokens, a part of the vocabulary's logits at a time.

All logits of a batch are by far its largest tensor: a hundred thousand numbers for each token, of which one is wanted.
So the tokens go through the head in parts, and the backward pass computes the logits of a part again.

Shapes: N tokens, V vocabulary, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from etude.model.transformer import Transformer

MAX_LOGITS = 2**24  # numbers at once: 64 MB


def head_logprobs(
    model: Transformer, hidden_NE: Tensor, tokens_N: Tensor, temperature: float = 1.0, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """The log-prob of each token, and if it is wanted the entropy of what could have stood in its place, which carries
    no gradient."""
    size = max(1, MAX_LOGITS // model.config.vocab_size)
    if len(tokens_N) <= size:
        return _part(model, hidden_NE, tokens_N, temperature, with_entropy)
    parts = [
        checkpoint(
            _part, model, hidden, tokens, temperature, with_entropy, use_reentrant=False, preserve_rng_state=False
        )
        for hidden, tokens in zip(torch.split(hidden_NE, size), torch.split(tokens_N, size), strict=True)
    ]
    logp, entropy = zip(*parts, strict=True)
    return torch.cat(logp), torch.cat(entropy)


def _part(
    model: Transformer, hidden_NE: Tensor, tokens_N: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    logp_N, logp_NV = model.logprobs(hidden_NE, tokens_N, temperature)
    with torch.no_grad():
        entropy_N = -(logp_NV.exp() * logp_NV).sum(-1) if with_entropy else logp_NV.new_zeros(0)
    return logp_N, entropy_N
