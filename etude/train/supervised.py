"""What the stages that learn from files minimise: one function each, of the model and a microbatch.

Such a loss is the sum over what counts in the microbatch (tokens, pairs), with sums of figures for people to see. The
learner divides by how many there are in all microbatches of the step, so that how rows were cut into microbatches
changes nothing.

Shapes: B rows, T tokens, N the tokens that count; 2 the chosen and the rejected answer of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from etude.model.transformer import Routing, Transformer
from etude.train.loss import token_logprobs
from etude.train.rows import Padded

Figures = dict[str, float]
FitLoss = Callable[[Transformer, Padded, Routing | None], tuple[Tensor, Figures]]


def cross_entropy(model: Transformer, rows: Padded, routing: Routing | None = None) -> tuple[Tensor, Figures]:
    """How surprising the tokens that count are."""
    logp_N, _ = token_logprobs(model, rows.tokens_BT, rows.mask_BT, routing=routing, starts_BT=rows.starts_BT)
    return -logp_N.sum(), {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(Padded):
    """In each row the chosen session and behind it the rejected one, which do not see each other."""

    reference_B2: Tensor
    """What `answer_logprobs` gave them under the weights that the stage started from."""

    @property
    def count(self) -> int:
        return len(self.tokens_BT)


def answer_logprobs(model: Transformer, rows: Padded, *, mean: bool, routing: Routing | None = None) -> Tensor:
    """For both sessions of a row the log-prob of all tokens that count together, or the mean of them, [B, 2]."""
    assert rows.starts_BT is not None
    logp_N, _ = token_logprobs(model, rows.tokens_BT, rows.mask_BT, routing=routing, starts_BT=rows.starts_BT)
    counts_BT, second_BT = rows.mask_BT[:, 1:], rows.starts_BT[:, 1:] > 0
    answer_N = (2 * torch.arange(len(counts_BT), device=logp_N.device)[:, None] + second_BT)[counts_BT]
    sums_A = logp_N.new_zeros(2 * len(counts_BT)).index_add(0, answer_N, logp_N)
    sizes_A = answer_N.bincount(minlength=len(sums_A)).clamp(min=1)
    return (sums_A / sizes_A if mean else sums_A).view(-1, 2)


def preference(*, beta: float, length_normalised: bool) -> FitLoss:
    """DPO: the chosen answer is to gain on the rejected one, as seen from the reference, with no reward model between.

    With `length_normalised` an answer is worth its mean log-prob, which takes away the reward for being long.
    """

    def loss(model: Transformer, pairs: Padded, routing: Routing | None = None) -> tuple[Tensor, Figures]:
        assert isinstance(pairs, Pairs)
        gain_B2 = answer_logprobs(model, pairs, mean=length_normalised, routing=routing) - pairs.reference_B2
        return sigmoid_loss(gain_B2, pairs.mask_BT.any(-1), beta)

    return loss


def sigmoid_loss(gain_B2: Tensor, counts_B: Tensor, beta: float) -> tuple[Tensor, Figures]:
    """Of how much likelier each answer has become than under the reference: -log sigmoid(beta (chosen - rejected)),
    over the rows that count."""
    margin_B = beta * (gain_B2[:, 0] - gain_B2[:, 1])
    wins_B, won_B = (margin_B > 0) & counts_B, margin_B.detach().double() * counts_B
    figures = {"accuracy": float(wins_B.sum()), "margin": won_B.sum().item()}
    return -(F.logsigmoid(margin_B) * counts_B).sum(), figures
