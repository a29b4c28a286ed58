"""Products in FP8: what is rounded, what is not, and what the gradient sees."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from etude.core.errors import EtudeError
from etude.model.config import ExpertsConfig, LatentConfig, LinearConfig
from etude.model.fp8 import LARGEST, linear, quantise_kv, quantise_rows, rounded_kv
from etude.model.layers import Linear
from etude.model.numerics import INVARIANT, PLAIN, Arithmetic
from etude.model.transformer import Transformer, init_from_scratch
from tests.small_model import config

IN_FP8 = Arithmetic.of(invariant=False, fp8=True)
FP8_KV = Arithmetic.of(invariant=False, fp8=False, fp8_kv=True)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_row_that_is_all_but_nothing_is_nothing() -> None:
    x = torch.full((1, 8), 1e-36)
    x[0, 3] = 0.0
    values, scales = quantise_rows(x)
    assert values.float().tolist() == [[0.0] * 8] and scales.tolist() == [1.0]


def test_a_row_is_rounded_by_its_own_scale() -> None:
    x = normal(5, 40) * torch.tensor([1e-6, 1.0, 3e4, 0.0, 2.0])[:, None]
    values, scales = quantise_rows(x)
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    assert values.float().abs().amax(-1).tolist() == [LARGEST] * 3 + [0.0, LARGEST]
    read = values.float() * scales[:, None]
    # three binary digits after the point; below that, steps of 2^-9 of the scale
    assert ((read - x).abs() <= torch.maximum(x.abs() / 16, scales[:, None] / 512)).all()
    for row, value, scale in zip(x, values, scales, strict=True):
        alone = quantise_rows(row)
        assert torch.equal(alone.values.float(), value.float()) and alone.scales == scale


def test_keys_and_values_have_the_smallest_power_of_2_with_which_they_fit() -> None:
    over = torch.nextafter(torch.tensor(LARGEST), torch.tensor(math.inf))
    for largest, scale in ((448.0, 1.0), (float(over), 2.0), (224.0, 0.5), (1.0, 2.0**-8)):
        values, scales = quantise_kv(torch.tensor([[0.1, -largest]]))
        assert scales.tolist() == [scale] and values.float()[0, 1] == -round(largest / scale)
    x = normal(6, 40) * torch.tensor([1e-6, 1.0, 3e4, 0.0, 1e-36, 2.0])[:, None]
    values, scales = quantise_kv(x)
    assert torch.equal(scales.log2(), scales.log2().round())
    top = values.float().abs().amax(-1)
    assert (top[[0, 1, 2, 5]] >= LARGEST / 2).all() and top[[3, 4]].tolist() == [0, 0]
    read = values.float() * scales[:, None]
    assert ((read - x).abs() <= torch.maximum(x.abs() / 16, scales[:, None] / 512)).all()
    for row, value, scale in zip(x, values, scales, strict=True):
        alone = quantise_kv(row)
        assert torch.equal(alone.values.float(), value.float()) and alone.scales == scale


def test_what_is_read_of_keys_and_values_is_exact_in_bf16_and_rounded_to_itself() -> None:
    x = normal(4000, 8) * 10 ** normal(4000, 1, seed=1)
    read = rounded_kv(x)
    assert not torch.equal(read, x)
    assert torch.equal(read.bfloat16().float(), read) and torch.equal(rounded_kv(read), read)
    halves = rounded_kv(x.bfloat16())
    assert halves.dtype == torch.bfloat16 and torch.equal(rounded_kv(halves), halves)


@pytest.mark.slow  # compiling takes a while
def test_compiled_code_rounds_from_bf16() -> None:
    """Compiled code does not round from the digits that numbers had before bf16."""

    def work(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *quantise_kv(x * y), *quantise_rows(x * y)

    inputs = [normal(200, 64, seed=seed).bfloat16() for seed in (0, 1)]
    for one, other in zip(torch.compile(work)(*inputs), work(*inputs), strict=True):
        assert torch.equal(one.float(), other.float())


def test_the_gradient_of_keys_and_values_is_as_without_rounding() -> None:
    x, upstream = normal(3, 16).requires_grad_(), normal(3, 16, seed=1)
    assert torch.equal(torch.autograd.grad(rounded_kv(x), x, upstream)[0], upstream)


def test_models_that_keep_something_else_have_no_kv_cache_in_fp8() -> None:
    latent = LatentConfig(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    linear = LinearConfig(
        num_key_heads=1, num_value_heads=2, key_head_dim=4, value_head_dim=4, conv_kernel_dim=3,
        layers=(0,),
    )  # fmt: skip
    for name, shape in (
        ("deepseek_v3", replace(config(), model_type="deepseek_v3", latent=latent)),
        ("qwen3_next", replace(config(), model_type="qwen3_next", linear=linear)),
    ):
        with pytest.raises(EtudeError, match=f"FP8 KV cache is not available for {name}"):
            Transformer(shape).compute_with(FP8_KV)


@pytest.mark.parametrize("arithmetic", [PLAIN, INVARIANT])
def test_a_product_is_that_of_the_rounded_numbers(arithmetic: Arithmetic) -> None:
    x, w, bias = normal(2, 7, 48), normal(24, 48, seed=1), normal(24, seed=2)
    (a, row), (b, column) = quantise_rows(x), quantise_rows(w)
    exact = (a.double() * row.double()[..., None]) @ (b.double() * column.double()[:, None]).T
    out = linear(x, quantise_rows(w), bias, arithmetic)
    torch.testing.assert_close(out.double(), exact + bias.double(), rtol=1e-5, atol=1e-5)
    assert (exact - x.double() @ w.double().T).norm() > 0.01 * exact.norm()


def test_gradients_are_those_of_the_unrounded_product() -> None:
    x, layer = normal(3, 16).requires_grad_(), Linear(16, 8)
    with torch.no_grad():
        layer.weight.copy_(normal(8, 16, seed=1))
        layer.bias.copy_(normal(8, seed=2))
    asked = x, layer.weight, layer.bias
    upstream = normal(3, 8, seed=3)
    expected = torch.autograd.grad(F.linear(*asked), asked, upstream)
    layer.arithmetic = IN_FP8
    out = layer(x)
    assert not torch.allclose(out, F.linear(*asked))
    for ours, plain in zip(torch.autograd.grad(out, asked, upstream), expected, strict=True):
        torch.testing.assert_close(ours, plain)


def test_what_decides_between_close_scores_keeps_its_type() -> None:
    experts = ExpertsConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, layers=(1,)
    )
    latent = LatentConfig(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    c = replace(config(), model_type="deepseek_v3", experts=experts, latent=latent)
    model = Transformer(replace(c, tie_word_embeddings=False))
    assert model.quantised_layers() == []
    rounded = model.compute_with(IN_FP8).quantised_layers()
    names = {name for name, module in model.named_modules() if module in rounded}
    layer = {"self_attn.a_proj", "self_attn.o_proj"}
    assert names == {f"model.layers.{n}.{name}" for n in (0, 1) for name in layer} | {
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
    }


def test_kept_weights_are_those_that_a_pass_would_round() -> None:
    model = init_from_scratch(config(), 0).requires_grad_(False).compute_with(IN_FP8)
    layer, x = model.quantised_layers()[0], normal(3, 32)
    passing = layer(x)
    model.quantise()
    assert layer.quantised is not None and torch.equal(layer(x), passing)
    model.compute_with(PLAIN)
    assert torch.equal(layer(x), F.linear(x, layer.weight)), "its arithmetic decides"
