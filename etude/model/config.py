"""The shape of a model, as config.json of a Hugging Face directory says it.

One `ModelConfig` for every family. What sets a family apart is a few facts about its layers (`FAMILIES`); what a model
may have or not have is a part that is None or there: `latent` (MLA), `experts` (mixture of experts), `rope_scaling`.
Anything in config.json that would change the computation and is not known here is refused, never skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the code of a family does in every model of it, so that config.json does not say it."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normed head by head before they are rotated."""
    latent: bool = False


_DEEPSEEK = Family(architecture="DeepseekV3ForCausalLM", latent=True)
FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family(architecture="Qwen3ForCausalLM", qk_norm=True),
    "qwen3_moe": Family(architecture="Qwen3MoeForCausalLM", qk_norm=True),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How a model was stretched to more positions than it first learnt; the fields are those of `rope_scaling`."""

    rope_type: str
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """0: the context of the model itself."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """MLA: keys and values of all heads are made from one short vector a token, and only that is cached."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope_interleave: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    layers: tuple[int, ...]
    """The layers that have experts; the others have a plain MLP."""
    norm_topk_prob: bool = False
    sigmoid: bool = False
    """DeepSeek's router: a sigmoid for each expert, and a bias that only steers the choice. Otherwise a softmax."""
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    n_shared_experts: int = 0
    router_aux_loss_coef: float = 0.0
    """How much the loss that balances the experts weighs, in families that have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    max_position_embeddings: int
    model_type: str = "llama"
    head_dim: int = 0
    """0: the hidden size shared among the heads. Of no meaning with `latent`."""
    rms_norm_eps: float = 1e-5
    rope_theta: float = 100_000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = True
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def rotary_dim(self) -> int:
        return self.latent.qk_rope_head_dim if self.latent else self.head_dim

    @property
    def cached_heads(self) -> tuple[int, int]:
        """Heads and size of what one token leaves in a cache of keys; values are as large, and with `latent` they are
        the first `kv_lora_rank` numbers of the key."""
        if self.latent:
            return 1, self.latent.kv_lora_rank + self.latent.qk_rope_head_dim
        return self.num_key_value_heads, self.head_dim

    def to_json(self) -> str:
        said: dict[str, Any] = {
            "architectures": [self.family.architecture],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
        }
        said |= {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("latent", "experts")}
        if self.rope_scaling:
            scaling = asdict(self.rope_scaling)
            optional = ("original_max_position_embeddings", "mscale", "mscale_all_dim", "attention_factor")
            said["rope_scaling"] = {k: v for k, v in scaling.items() if k not in optional or v}
        if self.latent:
            said |= asdict(self.latent)
            del said["head_dim"]
        if self.experts:
            said |= _experts_to_json(self.experts, self.num_hidden_layers)
        return json.dumps(said, indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelConfig:
        """Raises ValueError for a model that this package would compute wrongly, or not at all."""
        said = json.loads(text)
        if not isinstance(said, dict) or said.get("model_type") not in FAMILIES:
            found = said.get("model_type") if isinstance(said, dict) else None
            raise ValueError(f"config.json: model_type is {found!r}; this version reads {', '.join(FAMILIES)}")
        family = FAMILIES[said["model_type"]]
        _refuse(said, family)
        # Rope stood in two keys until transformers 5, and stands in one since.
        rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
        given: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0}
        given |= {f.name: said[f.name] for f in fields(cls) if said.get(f.name) is not None}
        given |= {
            "num_key_value_heads": said.get("num_key_value_heads") or said["num_attention_heads"],
            "rope_theta": float(rope.get("rope_theta") or given["rope_theta"]),
            "rope_scaling": _rope_scaling(rope),
            "experts": _experts_from_json(said),
            "latent": _part(LatentConfig, said) if family.latent else None,
        }
        if family.latent:
            given["head_dim"] = 0
        return cls(**given)


def _part(kind: type, said: Mapping[str, Any]) -> Any:
    return kind(**{f.name: said[f.name] for f in fields(kind) if said.get(f.name) is not None})


def _refuse(said: Mapping[str, Any], family: Family) -> None:
    wrong = {
        "hidden_act": said.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(said.get("attention_bias")),
        "mlp_bias": bool(said.get("mlp_bias")),
        "use_sliding_window": bool(said.get("use_sliding_window")),
        "quantization_config": bool(said.get("quantization_config")),
        "scoring_func": family.latent and said.get("scoring_func", "sigmoid") != "sigmoid",
        "topk_method": family.latent and said.get("topk_method", "noaux_tc") != "noaux_tc",
        "moe_layer_freq": family.latent and said.get("moe_layer_freq", 1) != 1,
    }
    if found := [f"{key} = {said[key]!r}" for key, is_wrong in wrong.items() if is_wrong]:
        raise ValueError(f"config.json: {', '.join(found)} is not supported")


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config.json: rope scaling {dict(rope)} is not supported; linear, llama3 and yarn are")
    scaling: RopeScaling = _part(RopeScaling, {**rope, "rope_type": kind})
    return scaling


def _experts_from_json(said: Mapping[str, Any]) -> ExpertsConfig | None:
    depth = range(said["num_hidden_layers"])
    if said["model_type"] == "qwen3_moe":
        dense, step = said.get("mlp_only_layers") or [], said.get("decoder_sparse_step", 1)
        own: dict[str, Any] = {
            "num_experts": said.get("num_experts") or said.get("num_local_experts"),
            "layers": tuple(n for n in depth if n not in dense and (n + 1) % step == 0),
        }
    elif FAMILIES[said["model_type"]].latent:
        own = {
            "num_experts": said.get("n_routed_experts") or said.get("num_local_experts"),
            "layers": tuple(n for n in depth if n >= said.get("first_k_dense_replace", 0)),
            "sigmoid": True,
        }
    else:
        return None
    part: ExpertsConfig = _part(ExpertsConfig, {**said, **own})
    return part if part.num_experts and part.layers else None


def _experts_to_json(experts: ExpertsConfig, depth: int) -> dict[str, Any]:
    said = asdict(experts)
    num, layers, sigmoid = said.pop("num_experts"), said.pop("layers"), said.pop("sigmoid")
    if sigmoid:
        return said | {"n_routed_experts": num, "first_k_dense_replace": layers[0], "scoring_func": "sigmoid"}
    return said | {"num_experts": num, "mlp_only_layers": [n for n in range(depth) if n not in layers]}
