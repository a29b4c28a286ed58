"""A config.json in which any one key has another legal value gives the result of transformers, or
is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from etude.model.attention import CausalAttention
from etude.model.config import ModelConfig
from etude.model.families import FAMILIES, HARMLESS
from etude.model.files import build_model, read_directory
from tests.model.test_families import LONGROPE, MODELS, SHAPE, SMALL, YARN, mean

BASES = [
    *("llama", "mistral", "mixtral window", "qwen2 window", "qwen2_moe window", "qwen3 window"),
    *("qwen3_moe window", "smollm3 window", "phi3 window", "granite", "olmo2", "olmo3", "seed_oss"),
    *("gemma2", "gemma3_text", "glm4_moe large", "gpt_oss", "deepseek_v2 groups", "deepseek_v3"),
    *("qwen3_next",),
]
BY_KEY: dict[str, list[Any]] = {
    "hidden_act": ["gelu_pytorch_tanh", "relu"],
    "hidden_activation": ["silu", "gelu"],
    "topk_method": ["greedy", "group_limited_greedy"],
    "scoring_func": ["softmax", "sigmoid"],
    "num_key_value_heads": [1, 6],
    "head_dim": [20],
    "layer_types": [
        ["full_attention"] * 3,
        ["sliding_attention"] * 3,
        ["full_attention", "linear_attention", "linear_attention"],
    ],
    "linear_num_value_heads": [2, 5],
    "linear_num_key_heads": [4, 1],
    "no_rope_layers": [[0, 1, 1], [1, 1, 1]],
    "mlp_only_layers": [[], [2]],
    "partial_rotary_factor": [1.0, 0.5],
    "num_hidden_layers": [2],
    "vocab_size": [110],
    "max_position_embeddings": [64],
    "sliding_window": [5, None],
    "q_lora_rank": [None, 12],
    "n_group": [1, 2],
    "topk_group": [1, 2],
    "qk_rope_head_dim": [4],
    "qk_nope_head_dim": [16],
    "kv_lora_rank": [24],
    "hidden_size": [72],
    "num_attention_heads": [4, 12],
    "intermediate_size": [96],
    "moe_intermediate_size": [32],
    "attn_logit_softcapping": [20.0, None],
    "final_logit_softcapping": [4.0, None],
}
"""Other values of keys whose legal values are not near the given ones."""
IGNORED = {"architectures", "model_type", "transformers_version", "rope_parameters", "dtype"}
"""Keys that are not mutated here: names, and the rope table, which has its own test."""
ROPES = [
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "llama3", "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
    | {"original_max_position_embeddings": 32},
    YARN,
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    LONGROPE,
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]


def other_values(key: str, value: Any) -> list[Any]:
    if key in BY_KEY:
        return [other for other in BY_KEY[key] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 1.5 + 0.25]
    if value is None:
        return [3, True]
    return []


def their_model(said: dict[str, Any]) -> Any:
    """The model of transformers; None if it has no such model."""
    rest = {key: value for key, value in said.items() if key != "model_type"}
    try:
        config = transformers.AutoConfig.for_model(
            said["model_type"], **json.loads(json.dumps(rest))
        )
        auto = transformers.AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation="eager").eval()
    except (StrictDataclassError, ValueError, TypeError, KeyError, AssertionError, RuntimeError):
        return None
    except (IndexError, AttributeError, ZeroDivisionError):
        return None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            shift = mean(said["model_type"], name)
            tensor.normal_(shift, 0.2 if tensor.ndim > 1 else 0.3, generator=generator)
    return model


def their_logits(model: Any, tokens_BT: Tensor) -> Tensor | None:
    try:
        with torch.no_grad():
            logits: Tensor = model(tokens_BT).logits
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    return logits


def compare(said: dict[str, Any], what: str, path: Path) -> str:
    """`equal`, `refused`, or `impossible` if transformers has no such model."""
    try:
        ModelConfig.from_json(json.dumps(said))
    except ValueError as e:
        assert "config.json" in str(e), (what, e)
        return "refused"
    theirs = their_model(said)
    tokens_BT = torch.randint(97, (1, 40), generator=torch.Generator().manual_seed(1))
    expected = None if theirs is None else their_logits(theirs, tokens_BT)
    if theirs is None or expected is None:
        return "impossible"
    theirs.save_pretrained(path)
    for name, data in SMALL.items():
        (path / name).write_bytes(data)
    # The original config, not the one that transformers completes.
    (path / "config.json").write_text(json.dumps(said))
    model = build_model(*read_directory(path)).requires_grad_(False)
    logits = model.logits(model(tokens_BT, torch.arange(40)[None], CausalAttention()))
    scale = float(expected.abs().max())
    torch.testing.assert_close(
        logits, expected, atol=1e-4 * scale, rtol=0, msg=lambda m: f"{what}: {m}"
    )
    return "equal"


def base(name: str) -> dict[str, Any]:
    """The config with every key that transformers fills in."""
    kind = name.split()[0]
    whole = transformers.AutoConfig.for_model(kind, **SHAPE | MODELS[name]).to_dict()
    whole |= {"model_type": kind, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {key: value for key, value in whole.items() if not key.startswith("_")}


@pytest.mark.parametrize("name", BASES)
def test_no_key_is_silently_computed_otherwise(name: str, tmp_path: Path) -> None:
    whole = base(name)
    assert compare(whole, "as it is", tmp_path / "whole") == "equal"
    harmless = HARMLESS | FAMILIES[whole["model_type"]].harmless
    found = {
        f"{key} = {other!r}": compare(
            whole | {key: other}, f"{name}: {key} = {other!r}", tmp_path / f"{key}{n}"
        )
        for key, value in whole.items()
        if key not in harmless | IGNORED
        for n, other in enumerate(other_values(key, value))
    }
    outcomes = list(found.values())
    assert outcomes.count("equal") > 5, found


@pytest.mark.parametrize("name", BASES)
def test_keys_that_are_said_to_change_nothing_change_nothing(name: str, tmp_path: Path) -> None:
    """Change all of them at once."""
    whole = base(name)
    harmless = (HARMLESS | FAMILIES[whole["model_type"]].harmless) - IGNORED
    changed = {
        key: others[0]
        for key, value in whole.items()
        if key in harmless and (others := other_values(key, value))
    }
    # keys about calling the model
    kept = {"return_dict", "is_encoder_decoder", "output_attentions"}
    assert len(changed) > 5
    whole |= {key: value for key, value in changed.items() if key not in kept}
    assert compare(whole, f"{name}: {changed}", tmp_path) == "equal"


@pytest.mark.parametrize("name", BASES)
def test_any_type_of_rope(name: str, tmp_path: Path) -> None:
    whole = base(name)
    whole.pop("rope_parameters")
    for n, rope in enumerate(ROPES):
        compare(whole | {"rope_scaling": rope}, f"{name}: {rope}", tmp_path / f"{n}")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_that_nobody_knows_is_refused_by_name(model_type: str) -> None:
    name = next((n for n in MODELS if n.split()[0] == model_type), "deepseek_v3")
    said = SHAPE | MODELS[name] | {"model_type": model_type}
    ModelConfig.from_json(json.dumps(said))
    with pytest.raises(ValueError, match="unknown keys for .*: router_temperature"):
        ModelConfig.from_json(json.dumps(said | {"router_temperature": 2.0}))
