"""The initial model of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from etude.core.errors import EtudeError
from etude.model.config import ExpertsConfig, LinearConfig
from etude.model.files import hf_state_dict, hf_tensors, write_directory
from etude.model.transformer import Transformer, init_from_scratch
from etude.train.start import compile_layers, initial_model
from tests.small_model import config, small_files


def test_without_a_directory_it_is_fresh_and_the_same_for_a_seed() -> None:
    told = config().to_json().encode()
    first, again, other = (initial_model(None, told, seed) for seed in (1, 1, 2))
    tensors = [hf_tensors(model) for model in (first, again, other)]
    name = "model.embed_tokens.weight"
    assert torch.equal(tensors[0][name], tensors[1][name])
    assert not torch.equal(tensors[0][name], tensors[2][name])
    assert compile_layers(first) is first and not first.fused, "a CPU compiles nothing"


EXPERTS = ExpertsConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, layers=(1,))
LINEAR = LinearConfig(
    num_key_heads=2,
    num_value_heads=2,
    key_head_dim=8,
    value_head_dim=8,
    conv_kernel_dim=4,
    layers=(0,),
)


@pytest.mark.parametrize(
    ("changes", "compiled"),
    [
        ({}, ["layers.0", "layers.1"]),
        # no router
        (
            {"model_type": "qwen3_moe", "experts": EXPERTS},
            ["layers.0", "layers.1.self_attn", "layers.1.mlp.experts"],
        ),
        # no loop over sequences, chunks or experts
        ({"sliding_window": 8, "sliding_layers": (0,)}, ["layers.0.mlp", "layers.1"]),
        ({"model_type": "qwen3_next", "linear": LINEAR}, ["layers.0.mlp", "layers.1"]),
        (
            {
                "model_type": "gpt_oss",
                "experts": replace(EXPERTS, router_bias=True, swiglu_limit=7.0),
            },
            ["layers.0.mlp"],
        ),
    ],
)
def test_a_device_compiles_what_is_no_loop(
    changes: dict[str, Any], compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[nn.Module, dict[str, bool]]] = []
    model = Transformer(replace(config(), **changes))
    names = {module: name for name, module in model.model.named_modules()}
    on_device = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(model, "parameters", lambda: iter([on_device]))
    monkeypatch.setattr(nn.Module, "compile", lambda part, **how: told.append((part, how)))
    assert compile_layers(model) is model and model.fused
    assert [names[part] for part, _ in told] == compiled
    assert all(how == {"dynamic": True} for _, how in told)


def test_a_directory_is_read_or_told_of(tmp_path: Path) -> None:
    model, files = init_from_scratch(config(300, 256), 3), small_files()
    write_directory(tmp_path, files, hf_state_dict(model, torch.float32))
    told = (tmp_path / "config.json").read_bytes()
    read = initial_model(tmp_path, told, 0)
    expected = hf_tensors(model)
    assert all(torch.equal(each, expected[name]) for name, each in hf_tensors(read).items())
    wider = json.dumps(json.loads(told) | {"hidden_size": 64, "head_dim": 8}).encode()
    for directory, shape in ((tmp_path / "gone", told), (tmp_path, wider)):
        with pytest.raises(EtudeError, match=f"the model in {directory} cannot be read"):
            initial_model(directory, shape, 0)
