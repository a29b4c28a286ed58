"""One definition, two ways to run it, and the Hugging Face layout around it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from etude.model.attention import CausalAttention
from etude.model.files import (
    build_model,
    hf_state_dict,
    hf_tensors,
    load_weights,
    read_directory,
    write_directory,
)
from etude.model.transformer import ModelConfig, init_from_scratch
from tests.engine.reference import FAMILIES
from tests.small_model import config, sharp, small_files


def test_no_token_sees_a_later_one() -> None:
    model = sharp(config(), seed=0)
    tokens = torch.randint(61, (1, 20), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 61
    one, other = (model(t, torch.arange(20)[None], CausalAttention()) for t in (tokens, changed))
    assert torch.equal(one[:, :10], other[:, :10])
    assert not torch.equal(one[:, 10:], other[:, 10:])


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_one_behind_the_other_do_not_see_each_other(family: str) -> None:
    """Values and gradients of each sequence are the same as when it is alone."""
    model, lengths = sharp(FAMILIES[family], seed=0).requires_grad_(), [9, 1, 20, 4]
    tokens = torch.randint(61, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])
    alone = [
        model(own[None], torch.arange(len(own))[None], CausalAttention())[0]
        for own in tokens.split(lengths)
    ]
    together, expected = model(tokens, positions, CausalAttention(lengths)), torch.cat(alone)
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-5)
    slope = torch.randn(together.shape, generator=torch.Generator().manual_seed(1))
    parameters = list(model.parameters())
    gradients = (
        torch.autograd.grad(x, parameters, slope, allow_unused=True) for x in (together, expected)
    )
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_the_config_is_that_of_hugging_face() -> None:
    text = config().to_json()
    assert ModelConfig.from_json(text) == config()
    said = json.loads(text)
    assert (said["model_type"], said["architectures"], said["head_dim"]) == (
        "llama",
        ["LlamaForCausalLM"],
        8,
    )
    with pytest.raises(ValueError, match="'gpt2'"):
        ModelConfig.from_json('{"model_type": "gpt2"}')


def test_the_tensor_names_are_those_of_hugging_face() -> None:
    names = set(hf_tensors(init_from_scratch(config(), 0)))
    layer = {
        "input_layernorm",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    }
    layer |= {f"self_attn.{projection}_proj" for projection in "qkvo"}
    assert names == {f"model.layers.{n}.{part}.weight" for n in (0, 1) for part in layer} | {
        "model.embed_tokens.weight",
        "model.norm.weight",
    }


def test_a_directory_gives_back_the_model(tmp_path: Path) -> None:
    small = small_files()
    model = init_from_scratch(ModelConfig.from_json(small["config.json"]), seed=3)
    write_directory(tmp_path / "m", small, hf_state_dict(model))
    files, tensors = read_directory(tmp_path / "m")
    assert files == small
    again = build_model(files, tensors)
    assert all(
        torch.equal(hf_state_dict(again)[name], tensor)
        for name, tensor in hf_state_dict(model).items()
    )
    with pytest.raises(
        FileNotFoundError, match=r"config.json, tokenizer.json, model.safetensors missing"
    ):
        read_directory(tmp_path)


def test_tensors_that_do_not_fit_are_named() -> None:
    model = init_from_scratch(config(), 0)
    tensors = hf_state_dict(model)
    tensors["model.extra"] = tensors.pop("model.norm.weight")
    with pytest.raises(
        ValueError, match=r"missing \['model.norm.weight'\], unknown \['model.extra'\]"
    ):
        load_weights(model, tensors)


def test_the_seed_makes_the_weights() -> None:
    one, same, other = (
        init_from_scratch(config(), 1),
        init_from_scratch(config(), 1),
        init_from_scratch(config(), 2),
    )
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_what_writes_to_the_residual_stream_begins_smaller_by_its_depth() -> None:
    shape = replace(config(), hidden_size=64, intermediate_size=256, num_hidden_layers=8)
    tensors = hf_tensors(init_from_scratch(shape, 0))

    def deviation(name: str) -> float:
        return float(tensors[f"model.layers.3.{name}.weight"].std())

    assert deviation("mlp.gate_proj") == pytest.approx(1 / 64**0.5, rel=0.05)
    assert deviation("mlp.down_proj") == pytest.approx(1 / 256**0.5 / 16**0.5, rel=0.05)
    assert deviation("self_attn.v_proj") == pytest.approx(1 / 64**0.5, rel=0.1)
    assert float(tensors["model.embed_tokens.weight"].std()) == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_may_have_one_layer(family: str) -> None:
    shape = replace(FAMILIES[family], num_hidden_layers=1)
    if shape.linear or shape.experts:
        pytest.skip("which layers are of which kind is said by number")
    model = sharp(shape, seed=0)
    tokens = torch.arange(9)[None]
    hidden = model(tokens, torch.arange(9)[None], CausalAttention())
    assert hidden.shape == (1, 9, shape.hidden_size) and hidden.isfinite().all()
