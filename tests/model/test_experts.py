"""The experts of a token when some are replayed: the plausible ones of these, and the router's best
for the rest."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from etude.model.config import ExpertsConfig
from etude.model.experts import ClampedExperts, Router, Routing, StackedExperts, read_ids

NUM, TOP, HIDDEN = 12, 3, 16
SOFTMAX = ExpertsConfig(
    num_experts=NUM, num_experts_per_tok=TOP, moe_intermediate_size=8, layers=(0,)
)
GROUPED = ExpertsConfig(
    num_experts=NUM, num_experts_per_tok=TOP, moe_intermediate_size=8, layers=(0,), sigmoid=True,
    n_group=4, topk_group=2, norm_topk_prob=True,
)  # fmt: skip


def router(config: ExpertsConfig, seed: int) -> Router:
    made = Router(HIDDEN, config)
    generator = torch.Generator().manual_seed(seed)
    torch.nn.init.normal_(made.weight, std=0.3, generator=generator)
    if made.e_score_correction_bias is not None:
        made.e_score_correction_bias.normal_(std=0.1, generator=generator)
    return made


def scores_of(made: Router, x_NE: Tensor) -> Tensor:
    logits = x_NE @ made.weight.T
    return (logits.sigmoid() if made.c.sigmoid else logits.softmax(-1)).detach()


def by_hand(
    told: list[int], own: list[int], scores: list[float], ranked: list[int], least: float
) -> list[int]:
    floor = least * min(scores[expert] for expert in own)
    holds = [expert >= 0 and scores[expert] >= floor for expert in told]
    kept = {expert for expert, hold in zip(told, holds, strict=True) if hold}
    others = iter(expert for expert in ranked if expert not in kept)
    return [expert if hold else next(others) for expert, hold in zip(told, holds, strict=True)]


@pytest.mark.parametrize("config", [SOFTMAX, GROUPED], ids=["softmax", "sigmoid in groups"])
@pytest.mark.parametrize("least", [0.0, 0.5, 1.0])
def test_against_a_plain_loop(config: ExpertsConfig, least: float) -> None:
    rng = random.Random(0)
    made, x_NE = (
        router(config, 1),
        torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(2)),
    )
    told = [[-1] * TOP if rng.random() < 0.1 else rng.sample(range(NUM), TOP) for _ in range(200)]
    plain, replay = Routing(), Routing(torch.tensor(told)[:, None].short(), min_score=least)
    made(x_NE, 0, plain)
    ids_Nk, weights_Nk = made(x_NE, 0, replay)
    own, scores_NX = plain.chosen()[:, 0], scores_of(made, x_NE)
    ranks_NX = made._ranks(scores_NX)
    num_replaced, differing = 0, []
    for n in range(200):
        ranked = [
            x for x in ranks_NX[n].argsort(descending=True).tolist() if ranks_NX[n, x] > -torch.inf
        ]
        expected = by_hand(told[n], own[n].tolist(), scores_NX[n].tolist(), ranked, least)
        assert ids_Nk[n].tolist() == expected
        assert len(set(expected)) == TOP
        is_told = told[n][0] >= 0
        num_replaced += is_told * sum(a != b for a, b in zip(told[n], expected, strict=True))
        differing.append(is_told and set(told[n]) != set(own[n].tolist()))
    assert replay.mismatches().tolist() == differing and any(differing) and not all(differing)
    assert int(replay.replaced().sum()) == num_replaced
    assert (num_replaced > 0) == (least > 0)
    expected_weights = scores_NX.gather(-1, ids_Nk)
    if config.norm_topk_prob:
        expected_weights = expected_weights / expected_weights.sum(-1, keepdim=True)
    torch.testing.assert_close(weights_Nk.detach(), expected_weights)


def test_a_router_that_agrees_keeps_every_place_and_bit() -> None:
    made, x_NE = (
        router(GROUPED, 3),
        torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(4)),
    )
    plain = Routing()
    ids, weights = made(x_NE, 0, plain)
    again = Routing(plain.chosen().to(torch.uint8), min_score=1.0)
    assert torch.equal(made(x_NE, 0, again)[0], ids) and torch.equal(
        made(x_NE, 0, again)[1], weights
    )
    assert not again.mismatches().any() and not again.replaced().any()


def test_the_gate_learns_through_whoever_was_used() -> None:
    """Gradients reach the rows of the replayed experts and of those that replaced an implausible
    one, and no others."""
    made = router(GROUPED, 5)
    x_NE = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(6))
    ranked = made._ranks(scores_of(made, x_NE))[0].argsort(descending=True).tolist()
    worst = min(range(NUM), key=lambda expert: scores_of(made, x_NE)[0, expert])
    ids, weights = made(
        x_NE, 0, Routing(torch.tensor([[[ranked[1], worst, ranked[0]]]]), min_score=0.9)
    )
    assert ids[0].tolist() == [ranked[1], ranked[2], ranked[0]]
    (weights * torch.tensor([1.0, 2.0, 4.0])).sum().backward()
    assert made.weight.grad is not None
    assert {row for row in range(NUM) if made.weight.grad[row].any()} == set(ids[0].tolist())


def test_ids_are_read_as_they_were_written() -> None:
    ids = torch.randint(NUM, (7, 1, TOP), dtype=torch.uint8)
    assert torch.equal(read_ids(ids.numpy().tobytes(), SOFTMAX), ids)
    many = ExpertsConfig(
        num_experts=384, num_experts_per_tok=8, moe_intermediate_size=8, layers=(1, 2, 5)
    )
    wide = torch.randint(384, (7, 3, 8), dtype=torch.int16)
    assert torch.equal(read_ids(wide.numpy().tobytes(), many), wide)


@pytest.mark.parametrize(
    ("data", "message"), [(b"", "0 bytes"), (b"\0" * 4, "4 bytes"), (b"\0\1\14", "expert 12")]
)
def test_what_cannot_be_ids_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_ids(data, SOFTMAX)


class OnDevice(torch.Tensor):
    """A tensor that claims to be on a device."""

    is_cuda = True


@pytest.mark.parametrize("kind", [StackedExperts, ClampedExperts])
def test_one_product_of_all_experts_is_that_of_each(kind: type[StackedExperts]) -> None:
    """The first expert has no tokens, the last has more than one."""
    c = replace(SOFTMAX, num_experts=4, moe_intermediate_size=16, swiglu_limit=0.5)
    made = kind(HIDDEN, c).to(torch.bfloat16).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.normal_(std=0.5, generator=generator)
    x_ME = torch.randn(7, HIDDEN, generator=generator).bfloat16()
    ends_X = torch.tensor([0, 3, 3, 7])
    alone = made._each(x_ME, ends_X)
    together = made._each(x_ME.as_subclass(OnDevice), ends_X)
    assert isinstance(together, OnDevice)
    torch.testing.assert_close(together.as_subclass(Tensor), alone, rtol=0.05, atol=0.05)
