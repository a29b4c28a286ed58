"""The composed parts of an RL step, each against numbers worked out by hand or by autograd in
float64."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from etude.core.checks import LARGEST, LEAST_LOGPROB, MOST_LOGPROB
from etude.core.types import Row
from etude.train.correction import CORRECTION
from etude.train.loss import LOSS, Clip
from etude.train.objective import AGGREGATE, RlObjective

NEW = torch.tensor([0.5, 0.9, 0.2], dtype=torch.float64).log()
OLD = torch.tensor([0.25, 0.1, 0.4], dtype=torch.float64).log()  # ratios 2, 9 and 0.5
ADV = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
ROW_N = torch.tensor([0, 1, 1])


def slopes(objective: RlObjective, ref: Tensor | None = None) -> list[float]:
    leaf = NEW.clone().requires_grad_()
    objective.token_losses(leaf, OLD, ADV, ROW_N, ref).loss_N.sum().backward()
    assert leaf.grad is not None
    return leaf.grad.tolist()


def test_the_default_by_hand() -> None:
    losses = RlObjective(correction_cap=3.0).token_losses(NEW, OLD, ADV, ROW_N)
    expected = [-2 * 1 * math.log(0.5), -3 * -2 * math.log(0.9), -0.5 * 3 * math.log(0.2)]
    assert losses.loss_N.tolist() == pytest.approx(expected)
    assert losses.corrected_N.tolist() == [False, True, False] and not losses.zero_grad_N.any()
    assert slopes(RlObjective(correction_cap=3.0)) == pytest.approx([-2.0, 6.0, -1.5])


def test_the_default_is_one_rounding_from_the_formula_and_no_more() -> None:
    """In fp32, exact to the bit: the expected value is the formula written out."""
    generator = torch.Generator().manual_seed(0)
    new, old, adv = (torch.randn(1000, generator=generator) for _ in range(3))
    plain = -(new - old).exp().clamp(max=2.0) * adv * new
    assert torch.equal(
        RlObjective().token_losses(new, old, adv, torch.zeros(1000, dtype=torch.int64)).loss_N,
        plain,
    )


def test_masked_tokens_are_silent() -> None:
    losses = RlObjective(correction="masked", correction_cap=3.0).token_losses(NEW, OLD, ADV, ROW_N)
    assert losses.corrected_N.tolist() == losses.zero_grad_N.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("correction", "weights"), [("none", [1, 1, 1]), ("sequence_truncated", [2, 3, 3])]
)
def test_each_correction_weighs_the_gradient(correction: str, weights: list[int]) -> None:
    expected = [-w * a for w, a in zip(weights, ADV.tolist(), strict=True)]
    assert slopes(RlObjective(correction=correction, correction_cap=3.0)) == pytest.approx(expected)


def test_without_a_correction_the_loss_clips_the_whole_ratio() -> None:
    ppo = RlObjective(loss=LOSS["ppo_clip"], clip=Clip(0.2, 0.2), correction="none")
    # 2 up: zero gradient. 9 down: not clipped, its advantage is negative. 0.5 up: not clipped.
    assert slopes(ppo) == pytest.approx([0.0, 9 * 2.0, -0.5 * 3])
    assert ppo.token_losses(NEW, OLD, ADV, ROW_N).zero_grad_N.tolist() == [True, False, False]


@pytest.mark.parametrize("name", ["ppo_clip", "grpo", "dapo", "dr_grpo", "cispo"])
def test_behind_a_correction_no_clip_acts(name: str) -> None:
    """With one step for each batch the policy that learns is the proximal one, so only the
    importance weight remains."""
    objective = RlObjective(
        loss=LOSS[name], clip=LOSS[name].clip, correction="truncated", correction_cap=3.0
    )
    assert slopes(objective) == pytest.approx(slopes(RlObjective(correction_cap=3.0)))


def test_cispo_is_reinforce_with_weights_cut_on_both_sides() -> None:
    cispo = RlObjective(loss=LOSS["cispo"], clip=Clip(1.0, 2.0), correction="none")
    assert slopes(cispo) == pytest.approx(slopes(RlObjective(correction_cap=3.0)))


def test_the_kl_is_a_price_on_each_token() -> None:
    ref = torch.tensor([0.25, 0.9, 0.4], dtype=torch.float64).log()  # k1: log 2, 0 and -log 2
    priced = RlObjective(correction="none", kl_coef=0.1)
    expected = [-(1.0 - 0.1 * math.log(2)), 2.0, -(3.0 + 0.1 * math.log(2))]
    assert slopes(priced, ref) == pytest.approx(expected)


def test_the_policy_gradient_of_k1_is_the_gradient_of_the_kl() -> None:
    """Averaged over all answers, weighted by their probability: exact, without sampling, in
    float64."""
    generator = torch.Generator().manual_seed(1)
    logits, ref_logits = (
        torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    logits.requires_grad_()
    logp, ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)

    every = torch.arange(5)
    no_reward = torch.zeros(5, dtype=torch.float64)
    loss = (
        RlObjective(correction="none", kl_coef=1.0)
        .token_losses(logp, logp.detach(), no_reward, every, ref)
        .loss_N
    )
    (got,) = torch.autograd.grad((logp.detach().exp() * loss).sum(), logits, retain_graph=True)
    torch.testing.assert_close(got, expected)

    (in_the_loss,) = torch.autograd.grad((logp.detach().exp() * (logp - ref)).sum(), logits)
    assert in_the_loss.abs().max() < 1e-15 < expected.abs().max()  # why it is not there


@pytest.mark.parametrize("correction", ["none", *CORRECTION])
@pytest.mark.parametrize("name", LOSS)
def test_all_that_the_checks_admit_has_a_finite_loss_and_slope(name: str, correction: str) -> None:
    """In float32, for every log-prob and advantage of the engine that passes the checks, whatever
    the log-probs of learner and reference are."""
    engine = [LEAST_LOGPROB, -20.0, -1e-3, MOST_LOGPROB]
    own = [0.0, -1e-3, -20.0, LEAST_LOGPROB, -89.0, -1e4]
    adv = [LARGEST, 1.0, 0.0, -1.0, -LARGEST]
    old, new, worth, ref = torch.tensor(list(product(engine, own, adv, own))).T
    assert old.dtype == torch.float32
    for row_N in (
        torch.arange(len(old)),
        torch.zeros(len(old), dtype=torch.int64),
        torch.arange(len(old)) // 7,
    ):
        for kl_coef in (0.0, 0.1):
            objective = RlObjective(
                loss=LOSS[name], clip=LOSS[name].clip, correction=correction, kl_coef=kl_coef
            )
            leaf = new.clone().requires_grad_()
            loss_N = objective.token_losses(leaf, old, worth, row_N, ref).loss_N
            (slope_N,) = torch.autograd.grad(loss_N, leaf, torch.ones_like(loss_N))
            assert loss_N.isfinite().all() and slope_N.isfinite().all()


def rows(*sizes: tuple[str, int]) -> list[Row]:
    return [
        Row(
            sample=name,
            tokens=(0,) * (n + 1),
            mask=(False, *[True] * n),
            logprobs=(),
            advantages=(),
            versions=(),
        )
        for name, n in sizes
    ]


@pytest.mark.parametrize(
    ("name", "weights", "divisor"),
    [
        ("token", [1.0, 1.0, 1.0], 8.0),
        # The attempt `a` has two segments and six tokens in all.
        ("sequence", [1 / 6, 1 / 2, 1 / 6], 2.0),
        ("constant", [1.0, 1.0, 1.0], 2 * 100.0),
    ],
)
def test_how_tokens_add_up(name: str, weights: list[float], divisor: float) -> None:
    assert AGGREGATE[name](rows(("a", 2), ("b", 2), ("a", 4)), 100) == (
        pytest.approx(weights),
        divisor,
    )
