"""Supervised losses: cross entropy and DPO, each a function of the model and a microbatch.

Such a loss is a sum over the loss terms of the microbatch (tokens, pairs), with sums of metrics.
The learner divides by the number of terms in the whole step, so that the division into microbatches
changes nothing.

Shapes: B pairs, 2 the chosen and the rejected answer of each, A = 2B; N the tokens that the loss
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from etude.model.transformer import Routing, Transformer
from etude.train.loss import token_logprobs
from etude.train.packing import PackedMicrobatch, TokenSequence, pack_batch

Metrics = dict[str, float]
SupervisedLoss = Callable[[Transformer, PackedMicrobatch, Routing | None], tuple[Tensor, Metrics]]


def cross_entropy(
    model: Transformer, packed: PackedMicrobatch, routing: Routing | None = None
) -> tuple[Tensor, Metrics]:
    """Cross entropy of the tokens that the loss counts."""
    logp_N, _ = token_logprobs(model, packed, routing=routing)
    return -logp_N.sum(), {}


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """A chosen and a rejected session with a common beginning."""

    chosen: TokenSequence
    rejected: TokenSequence
    reference: tuple[float, float] = (0.0, 0.0)
    """The `sequence_logprobs` of both under the reference weights."""

    @property
    def length(self) -> int:
        return self.chosen.length + self.rejected.length

    @property
    def num_loss_tokens(self) -> int:
        return self.chosen.num_loss_tokens + self.rejected.num_loss_tokens

    @property
    def num_loss_terms(self) -> int:
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPairs(PackedMicrobatch):
    """A microbatch of preference pairs: the chosen, then the rejected session of each."""

    reference_B2: Tensor


def pack_pairs(pairs: Sequence[PreferencePair]) -> PackedPairs:
    packed = pack_batch([text for pair in pairs for text in (pair.chosen, pair.rejected)])
    reference_B2 = torch.tensor([pair.reference for pair in pairs]).view(-1, 2)
    return PackedPairs(
        **{f.name: getattr(packed, f.name) for f in fields(packed)}, reference_B2=reference_B2
    )


def sequence_logprobs(
    model: Transformer, pairs: PackedPairs, *, mean: bool, routing: Routing | None = None
) -> Tensor:
    """The log-probs of the chosen and the rejected session of each pair, [B, 2]: the sum over the
    tokens that the loss counts, or their mean."""
    logp_N, _ = token_logprobs(model, pairs, routing=routing)
    sums_A = logp_N.new_zeros(pairs.reference_B2.numel()).index_add(0, pairs.sequence_N, logp_N)
    sizes_A = (
        torch.zeros_like(sums_A)
        .index_add(0, pairs.sequence_N, torch.ones_like(logp_N))
        .clamp(min=1)
    )
    return (sums_A / sizes_A if mean else sums_A).view(-1, 2)


def dpo_loss(*, beta: float, length_normalised: bool) -> SupervisedLoss:
    """DPO: the chosen answer should gain over the rejected one, relative to the reference, without
    a reward model.

    With `length_normalised` an answer is scored by its mean log-prob, which removes the reward for
    length.
    """

    def loss(
        model: Transformer, pairs: PackedMicrobatch, routing: Routing | None = None
    ) -> tuple[Tensor, Metrics]:
        assert isinstance(pairs, PackedPairs)
        gain_B2 = (
            sequence_logprobs(model, pairs, mean=length_normalised, routing=routing)
            - pairs.reference_B2
        )
        return sigmoid_loss(gain_B2, beta)

    return loss


def sigmoid_loss(gain_B2: Tensor, beta: float) -> tuple[Tensor, Metrics]:
    """The DPO loss -log sigmoid(beta (chosen - rejected)) of the log-prob gains over the
    reference."""
    margin_B = beta * (gain_B2[:, 0] - gain_B2[:, 1])
    metrics = {
        "accuracy": float((margin_B > 0).sum()),
        "margin": margin_B.detach().double().sum().item(),
    }
    return -F.logsigmoid(margin_B).sum(), metrics
