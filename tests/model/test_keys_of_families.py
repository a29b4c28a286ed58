"""Effect of each key of config.json, family by family: the fields that it changes, or that it is
refused.

The results are kept in `keys_of_families.json`. After an intended change, write them again, and
read the difference:

    ETUDE_WRITE_ANSWERS=1 python -m pytest tests/model/test_keys_of_families.py
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from etude.model.config import LayerFeatures, ModelConfig
from etude.model.families import FAMILIES
from tests.model.test_families import EXPERTS, LATENT, MODELS, NEXT, SHAPE, YARN

KEPT = Path(__file__).with_name("keys_of_families.json")
FULL, LOCAL, LINEAR = "full_attention", "sliding_attention", "linear_attention"
BASES: dict[str, dict[str, Any]] = {
    "kimi_k2": {**EXPERTS, **LATENT, "q_lora_rank": 20},
    "qwen3_next": NEXT | {"full_attention_interval": 3},
}
VALUES: dict[str, list[Any]] = {
    "attention_bias": [True, False],
    "attention_out_bias": [True],
    "qkv_bias": [True, False],
    "mlp_bias": [True],
    "hidden_act": ["gelu_pytorch_tanh", "silu", "relu"],
    "hidden_activation": ["silu"],
    "rms_norm_eps": [1e-3],
    "tie_word_embeddings": [True, False],
    "head_dim": [20, None],
    "num_key_value_heads": [1, None],
    "rope_theta": [77.0],
    "rope_local_base_freq": [78.0],
    "partial_rotary_factor": [0.5],
    "rope_scaling": [YARN, {"type": "linear", "factor": 2.0}, {"type": "none"}],
    "rope_parameters": [
        {"rope_theta": 79.0},
        {FULL: {"rope_theta": 79.0}, LOCAL: {"rope_theta": 80.0}},
        {LOCAL: {"rope_type": "linear", "factor": 2.0}},
        {LOCAL: {"rope_theta": 80.0, "factor": 2.0}},
        {FULL: {"rope_type": "linear", "factor": 2.0}},
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "default", "partial_rotary_factor": 0.25},
        {"rope_type": "default", "unheard_of": 1},
    ],
    "original_max_position_embeddings": [64],
    "quantization_config": [None, {"quant_method": "fp8"}, {"quant_method": "awq"}],
    "rope_interleave": [False],
    "use_qk_norm": [True, False],
    "use_sliding_window": [True],
    "sliding_window": [5, None],
    "sliding_window_pattern": [2],
    "max_window_layers": [1],
    "layer_types": [[FULL] * 3, [LOCAL, FULL, LOCAL], [LINEAR, FULL, LINEAR], [FULL] * 2],
    "no_rope_layers": [[1, 0, 1]],
    "no_rope_layer_interval": [2],
    "embedding_multiplier": [2.0],
    "logits_scaling": [2.0],
    "residual_multiplier": [2.0],
    "attention_multiplier": [2.0],
    "query_pre_attn_scalar": [30],
    "attn_logit_softcapping": [20.0, None],
    "final_logit_softcapping": [20.0, None],
    "use_bidirectional_attention": [True, False],
    "norm_topk_prob": [True, False],
    "scoring_func": ["softmax", "sigmoid"],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "n_group": [2],
    "topk_group": [1],
    "n_shared_experts": [3],
    "routed_scaling_factor": [1.25],
    "first_k_dense_replace": [2],
    "moe_layer_freq": [1, 2],
    "mlp_only_layers": [[1]],
    "decoder_sparse_step": [2, 0],
    "router_aux_loss_coef": [0.5],
    "shared_expert_intermediate_size": [44],
    "swiglu_limit": [3.0],
    "num_experts": [4],
    "num_local_experts": [4],
    "n_routed_experts": [4],
    "num_experts_per_tok": [1, 99],
    "moe_intermediate_size": [20],
    "q_lora_rank": [None, 24],
    "full_attention_interval": [2],
    "linear_conv_kernel_dim": [3],
}


def base(model_type: str) -> dict[str, Any]:
    return SHAPE | (BASES.get(model_type) or MODELS[model_type]) | {"model_type": model_type}


def outcome(said: dict[str, Any], plain: ModelConfig) -> str:
    try:
        config = ModelConfig.from_json(json.dumps(said))
    except ValueError:
        return "refused"
    changed = [f.name for f in fields(config) if getattr(config, f.name) != getattr(plain, f.name)]
    assert ModelConfig.from_json(config.to_json()) == config, said
    return " ".join(changed) or "as it is"


def outcomes() -> dict[str, dict[str, list[str]]]:
    """A key with its value -> outcome -> the families that have this outcome."""
    found: dict[str, dict[str, list[str]]] = {}
    for model_type in FAMILIES:
        said = base(model_type)
        plain = ModelConfig.from_json(json.dumps(said))
        for key, values in VALUES.items():
            for value in values:
                of = found.setdefault(f"{key} = {json.dumps(value)}", {})
                of.setdefault(outcome(said | {key: value}, plain), []).append(model_type)
    return found


def test_each_key_changes_what_it_is_for() -> None:
    found = {
        key: {what: " ".join(families) for what, families in of.items()}
        for key, of in outcomes().items()
    }
    if os.environ.get("ETUDE_WRITE_ANSWERS"):
        KEPT.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(KEPT.read_text())


def test_a_plain_layer_is_a_layer_of_llama() -> None:
    """The supported features of a path are stated relative to Llama."""
    llama = ModelConfig.from_json(json.dumps(base("llama")))
    assert all(llama.layer_features(layer) == LayerFeatures() for layer in range(3))
    assert llama.unsupported_features({}) == []


def test_what_a_path_does_not_support_is_named() -> None:
    gemma = ModelConfig.from_json(json.dumps(base("gemma2")))
    found = gemma.unsupported_features({"norms": ("around",), "centred_norms": (True,)})
    assert "window 8" in found and "softcap 50.0" in found and "logits_softcap 30.0" in found
    assert not any(feature.startswith(("norms", "centred_norms", "linear")) for feature in found)
