"""Writer of a `ModelConfig` as config.json, such that `config_json` reads the same config back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from etude.model.config_json import FULL, LINEAR, LOCAL, PLAIN
from etude.model.families import DEFAULTS, Family
from etude.model.parts import ExpertsConfig, RopeScaling


def written(config: Any, family: Family) -> dict[str, Any]:
    """Keys of config.json for a `ModelConfig`, beyond its plain fields."""
    known = {**DEFAULTS, **family.defaults}
    said: dict[str, Any] = {name: getattr(config, name) for name in PLAIN if name in known}
    said["hidden_activation" if "hidden_activation" in known else "hidden_act"] = config.hidden_act
    if "qkv_bias" in known:
        said["qkv_bias"] = config.attention_bias
    if "attention_out_bias" in known:
        said["attention_out_bias"] = config.attention_out_bias
    said |= _windows_written(config, family)
    said |= _rope_written(config, family)
    if family.linear:
        recurrent = config.linear.layers if config.linear else ()
        depth = range(config.num_hidden_layers)
        said["layer_types"] = [LINEAR if n in recurrent else FULL for n in depth]
    if config.linear:
        said |= {f"linear_{k}": v for k, v in asdict(config.linear).items() if k != "layers"}
    if config.latent:
        said |= asdict(config.latent)
        if "rope_interleave" not in known:
            del said["rope_interleave"]
    else:
        said["head_dim"] = config.head_dim
    return said | _experts_written(config.experts, family, config.num_hidden_layers)


def _windows_written(config: Any, family: Family) -> dict[str, Any]:
    known = family.defaults
    said = dict[str, Any]()
    if "no_rope_layers" in known:
        depth = range(config.num_hidden_layers)
        said["no_rope_layers"] = [int(n not in config.unrotated_layers) for n in depth]
    if family.windows is None:
        return said
    if "use_sliding_window" in known:
        said["use_sliding_window"] = config.sliding_window is not None
    if config.sliding_window is not None or "layer_types" not in known:
        said["sliding_window"] = config.sliding_window
    if "layer_types" in known:
        said["layer_types"] = [
            LOCAL if n in config.sliding_layers else FULL for n in range(config.num_hidden_layers)
        ]
    return said


def _rope_written(config: Any, family: Family) -> dict[str, Any]:
    said: dict[str, Any] = {"rope_scaling": None}
    scaling: RopeScaling | None = config.rope_scaling
    if scaling is not None:
        optional = (
            *("mscale", "mscale_all_dim", "attention_factor"),
            *("short_factor", "long_factor"),
        )
        table = asdict(scaling)
        said["rope_scaling"] = {k: v for k, v in table.items() if k not in optional or v}
        if "original_max_position_embeddings" in family.defaults:
            said["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    elif family.architecture == "GptOssForCausalLM":
        said["rope_scaling"] = {"rope_type": "default"}
    if family.local_rope:
        said["rope_local_base_freq"] = config.local_rope_theta
    return said


def _experts_written(
    experts: ExpertsConfig | None, family: Family, num_layers: int
) -> dict[str, Any]:
    keys = family.experts
    if keys is None:
        return {}
    layers = experts.layers if experts else ()
    said: dict[str, Any] = {}
    if keys.layers == "after":
        said["first_k_dense_replace"] = layers[0] if layers else num_layers
    elif keys.layers == "every":
        said["mlp_only_layers"] = [n for n in range(num_layers) if n not in layers]
    said |= {key: values[0] for key, values in family.only.items() if key == "scoring_func"}
    if experts is None:
        return said
    said |= {key: getattr(experts, key) for key in ("num_experts_per_tok", *keys.keys)}
    if "topk_method" in family.defaults:
        said["topk_method"] = "group_limited_greedy" if experts.n_group > 1 else "greedy"
    if keys.size != "intermediate_size":
        said[keys.size] = experts.moe_intermediate_size
    return said | {keys.number[0]: experts.num_experts}
