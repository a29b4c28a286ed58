"""LoRA: the computation and training of a model with an adapter, and the files of adapters."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from etude.core.errors import EtudeError
from etude.model.attention import CausalAttention
from etude.model.config import ExpertsConfig, LatentConfig
from etude.model.files import hf_state_dict, load_weights
from etude.model.lora import (
    Adapter,
    LoraConfig,
    add_adapter,
    layer_pairs,
    merged,
    read_adapter,
    split_tensors,
    write_adapter,
)
from etude.model.transformer import Transformer
from tests.adapters_of import ALL, random_adapter
from tests.small_model import ROUNDING, config, sharp

SOME = ("q_proj", "v_proj", "down_proj")


def logits(model: Transformer) -> Tensor:
    tokens = torch.arange(1, 25).view(2, 12)
    return model.logits(model(tokens, torch.arange(12).expand(2, -1), CausalAttention()))


def with_adapter(adapter: Adapter) -> Transformer:
    model = add_adapter(sharp(config(), 0), adapter.config, seed=0)
    load_weights(model, hf_state_dict(sharp(config(), 0), torch.float32) | dict(adapter.tensors))
    return model


@pytest.mark.parametrize("targets", [ALL, SOME])
def test_an_adapter_computes_what_the_merged_weights_do(targets: tuple[str, ...]) -> None:
    adapter = random_adapter(config(), seed=1, targets=targets)
    base = sharp(config(), 0)
    whole = merged(hf_state_dict(base, torch.float32) | dict(adapter.tensors), adapter.config)
    before = logits(base)
    load_weights(base, whole)
    found = logits(with_adapter(adapter))
    assert torch.allclose(found, logits(base), atol=ROUNDING)
    assert (found - before).abs().max() > 20 * ROUNDING


def test_a_fresh_adapter_changes_nothing_and_alone_learns() -> None:
    model, base = sharp(config(), 0), sharp(config(), 0)
    add_adapter(model, LoraConfig(rank=4, alpha=8.0, targets=SOME), seed=3)
    assert torch.equal(logits(model), logits(base))
    logits(model).square().mean().backward()
    learns = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learns == {name for name, p in model.named_parameters() if p.grad is not None}
    assert {name.rpartition(".")[2] for name in learns} == {"lora_A", "lora_B"}
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    # B is zero, so A does not matter yet, while B does
    assert all(grad.any() == name.endswith("lora_B") for name, grad in grads.items())


def test_tensors_are_named_as_peft_names_them() -> None:
    tensors = random_adapter(config(), 1, targets=SOME).tensors
    sizes = {n.removeprefix("model.layers.1."): tuple(t.shape) for n, t in tensors.items()}
    assert {n: s for n, s in sizes.items() if not n.startswith("model")} == {
        "self_attn.q_proj.lora_A.weight": (4, 32),
        "self_attn.q_proj.lora_B.weight": (32, 4),
        "self_attn.v_proj.lora_A.weight": (4, 32),
        "self_attn.v_proj.lora_B.weight": (16, 4),
        "mlp.down_proj.lora_A.weight": (4, 48),
        "mlp.down_proj.lora_B.weight": (32, 4),
    }


def test_an_adapter_directory_is_read_as_it_was_written(tmp_path: Path) -> None:
    adapter = random_adapter(config(), 1)
    write_adapter(tmp_path, adapter, base="the/base")
    said = json.loads((tmp_path / "adapter_config.json").read_bytes())
    assert (said["r"], said["lora_alpha"], said["peft_type"]) == (4, 8.0, "LORA")
    assert all(n.startswith("base_model.model.model.layers.") for n in load_file(
        tmp_path / "adapter_model.safetensors"
    ))  # fmt: skip
    read = read_adapter(tmp_path)
    assert read.config == replace(adapter.config, targets=tuple(sorted(ALL)))
    assert read.tensors.keys() == adapter.tensors.keys()
    assert all(torch.equal(read.tensors[n], t) for n, t in adapter.tensors.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "does not describe a LoRA"),
        ({"target_modules": "all-linear"}, "target_modules"),
        ({"r": 0}, "r = 0"),
        ({"lora_alpha": math.nan}, "lora_alpha = nan"),
        ({"alora_invocation_tokens": [7]}, "alora_invocation_tokens"),
    ],
)
def test_other_adapters_are_refused_by_name(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    write_adapter(tmp_path, random_adapter(config(), 1), base="")
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | change))
    with pytest.raises(EtudeError, match=said):
        read_adapter(tmp_path)


def test_an_adapter_of_another_model_is_refused() -> None:
    adapter = random_adapter(config(), 1)
    wider = Transformer(replace(config(), hidden_size=64))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj have .*model needs"):
        dict(layer_pairs(wider, adapter, wider.model.norm.weight))
    shorter = Transformer(replace(config(), num_hidden_layers=1))
    with pytest.raises(ValueError, match="model.layers.1"):
        dict(layer_pairs(shorter, adapter, shorter.model.norm.weight))


def test_what_takes_no_adapter_is_refused_by_name() -> None:
    lora = LoraConfig(rank=4, alpha=8.0, targets=ALL)
    latent = LatentConfig(
        kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, q_lora_rank=None
    )
    with pytest.raises(EtudeError, match="MLA"):
        add_adapter(
            Transformer(replace(config(), model_type="deepseek_v3", latent=latent)), lora, 0
        )
    experts = ExpertsConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, layers=(1,)
    )
    sparse = Transformer(replace(config(), model_type="qwen3_moe", experts=experts))
    with pytest.raises(EtudeError, match="down_proj, gate_proj, up_proj.*experts take no adapters"):
        add_adapter(sparse, lora, 0)
    add_adapter(sparse, replace(lora, targets=ALL[:4]), 0)
    base, own = split_tensors(hf_state_dict(sparse))
    assert len(own) == 2 * 4 * 2 and not any("lora" in name for name in base)
