"""The losses of the supervised stages against numbers worked out in float64, including gradients by
autograd."""

from __future__ import annotations

import math

import pytest
import torch

from etude.model.transformer import init_from_scratch
from etude.train.loss import token_logprobs
from etude.train.packing import TokenSequence, pack_batch
from etude.train.supervised import (
    PackedPairs,
    PreferencePair,
    cross_entropy,
    dpo_loss,
    pack_pairs,
    sequence_logprobs,
    sigmoid_loss,
)
from tests.small_model import config

CHOSEN = [([5, 6, 7, 8, 0], [0, 0, 1, 1, 1]), ([5, 6, 9, 0], [0, 0, 1, 1])]
REJECTED = [([5, 6, 1, 2, 3], [0, 0, 1, 1, 1]), ([5, 6, 4], [0, 0, 1])]
REFERENCE = [(-9.0, -8.5), (-6.0, -4.0)]


def pairs() -> PackedPairs:
    texts = [
        (TokenSequence(*chosen), TokenSequence(*rejected))
        for chosen, rejected in zip(CHOSEN, REJECTED, strict=True)
    ]
    return pack_pairs(
        [PreferencePair(*both, reference) for both, reference in zip(texts, REFERENCE, strict=True)]
    )


def test_the_sigmoid_loss_by_hand() -> None:
    gain = torch.tensor([[2.0, -1.0], [-1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    loss, figures = sigmoid_loss(gain, beta=0.5)
    margins = [0.5 * 3.0, 0.5 * -2.0]
    assert loss.item() == pytest.approx(
        sum(math.log1p(math.exp(-margin)) for margin in margins), rel=1e-12
    )
    assert figures == {"accuracy": 1.0, "margin": pytest.approx(sum(margins))}
    loss.backward()
    slopes = [-0.5 / (1 + math.exp(margin)) for margin in margins]
    assert gain.grad is not None and gain.grad[:, 0].tolist() == pytest.approx(slopes, rel=1e-12)
    assert gain.grad[:, 1].tolist() == pytest.approx([-slope for slope in slopes], rel=1e-12)


@pytest.mark.parametrize("mean", [False, True])
def test_preference_is_the_formula_over_whole_answers(mean: bool) -> None:
    """Every answer alone, by a loop in float64."""
    model = init_from_scratch(config(), 1).double()
    loss, _ = dpo_loss(beta=0.3, length_normalised=mean)(model, pairs(), None)

    def worth(tokens: list[int], mask: list[int]) -> torch.Tensor:
        logp_N, _ = token_logprobs(model, pack_batch([TokenSequence(tokens, mask)]))
        return logp_N.mean() if mean else logp_N.sum()

    expected = torch.zeros((), dtype=torch.float64)
    for chosen, rejected, (told_chosen, told_rejected) in zip(
        CHOSEN, REJECTED, REFERENCE, strict=True
    ):
        margin = (worth(*chosen) - told_chosen) - (worth(*rejected) - told_rejected)
        expected = expected + torch.log1p(torch.exp(-0.3 * margin))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # logits are float32

    weight = model.model.norm.weight
    (grad,), (by_hand,) = torch.autograd.grad(loss, weight), torch.autograd.grad(expected, weight)
    torch.testing.assert_close(grad, by_hand, rtol=1e-4, atol=1e-6)


def test_what_counts() -> None:
    model, rows = init_from_scratch(config(), 1), pairs()
    assert rows.num_loss_tokens == 9 and rows.lengths == (4, 4, 3, 2)
    assert sequence_logprobs(model, rows, mean=False).shape == (2, 2)
    logp_N, _ = token_logprobs(model, rows)
    assert cross_entropy(model, rows)[0].item() == pytest.approx(-logp_N.sum().item())


def test_a_pair_that_nobody_judged_is_seen_from_nowhere() -> None:
    """Equivalent to a reference with probability 1 for both answers."""
    texts = TokenSequence(*CHOSEN[0]), TokenSequence(*REJECTED[0])
    told = pack_pairs([PreferencePair(*texts), PreferencePair(*texts, (0.0, 0.0))]).reference_B2
    assert told.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_a_tie_is_no_preference() -> None:
    _, figures = sigmoid_loss(torch.tensor([[1.0, 1.0], [2.0, 1.0], [0.0, 1.0]]), beta=1.0)
    assert figures == {"accuracy": 1.0, "margin": 0.0}
