"""Random rounding: unbiased, of the right size, and exact where nothing is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from etude.model.attention import CausalAttention
from etude.model.rounding import RandomRounding, StepwiseCausal, upper_bound
from etude.model.transformer import Transformer
from tests.engine.reference import EXPERTS, FAMILIES
from tests.small_model import sharp

FP32, BF16 = torch.float32, torch.bfloat16


def test_one_of_the_two_neighbours_and_right_on_average() -> None:
    x = torch.full((10_000,), 1.0, dtype=BF16)
    with RandomRounding(0):
        y = x * torch.full_like(x, 1.0078125) * torch.full_like(x, 1.0078125)  # 1 + 2 eps + eps²
    assert set(y.tolist()) == {1.015625, 1.0234375}
    assert float(y.double().mean()) == pytest.approx(1.0078125**2, rel=1e-5)


@pytest.mark.parametrize("kind", [FP32, BF16], ids=str)
def test_what_moves_numbers_is_exact(kind: torch.dtype) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).to(kind)

    def moved() -> Tensor:
        y = torch.cat((x.T.reshape(8, 6)[[3, 1]], -x[:2]), -1).roll(2, -1)
        return torch.where(y > 0, y, y.float().to(kind)).repeat_interleave(2, 0)

    with RandomRounding(0):
        y = moved()
    assert torch.equal(y, moved()) and y.dtype == kind


@pytest.mark.parametrize("size", [64, 4096])
def test_products_differ_by_no_less_than_the_order_of_adding_up_makes(size: int) -> None:
    a, b = (torch.randn(16, size, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    exact = a.double() @ b.double().T
    in_order = torch.zeros(16, 16)
    for place in range(size):
        in_order += a[:, place, None] * b[None, :, place]
    with RandomRounding(0):
        drawn = a @ b.T
    assert float((drawn - exact).norm()) > float((in_order - exact).norm()) > 0
    assert float((drawn - exact).norm() / exact.norm()) < size**0.5 * 1e-6


WINDOWED = replace(FAMILIES["llama"], sliding_window=8, sliding_layers=(0, 2))
SCORED = {
    "gemma2": replace(
        WINDOWED,
        model_type="gemma2",
        hidden_act="gelu_pytorch_tanh",
        query_pre_attn_scalar=6.0,
        attn_logit_softcapping=2.0,
    ),
    "gpt_oss": replace(
        WINDOWED,
        model_type="gpt_oss",
        experts=replace(EXPERTS, layers=(0, 1, 2), router_bias=True, swiglu_limit=7.0),
    ),
}
"""Models with capped scores, and with sinks."""


@pytest.mark.parametrize("name", FAMILIES | SCORED)
def test_a_model_is_near_itself(name: str) -> None:
    """Rows computed one after the other equal those computed alone; each seed gives its own draw,
    always the same one."""
    model = sharp((FAMILIES | SCORED)[name], seed=0, factor=1.5)
    rows = [torch.arange(1, 30), torch.arange(20, 40)]
    plain = [model(row[None], torch.arange(len(row))[None], CausalAttention())[0] for row in rows]

    def draw(model: Transformer, seed: int) -> Tensor:
        positions = torch.cat([torch.arange(len(row)) for row in rows])
        with RandomRounding(seed):
            return model(torch.cat(rows), positions, StepwiseCausal([len(row) for row in rows]))

    def off(drawn: Tensor) -> float:
        return float((drawn.float() - torch.cat(plain)).norm() / torch.cat(plain).norm())

    assert 0 < off(draw(model, 0)) < 1e-5
    assert torch.equal(draw(model, 1), draw(model, 1)) and not torch.equal(
        draw(model, 1), draw(model, 2)
    )
    assert 1e-4 < off(draw(model.to(BF16), 0)) < 0.3


def test_the_bound_of_equal_draws_is_what_they_are() -> None:
    assert upper_bound([2.0] * 8) == 2.0 and upper_bound([1.0, 3.0] * 4) > 3.0
