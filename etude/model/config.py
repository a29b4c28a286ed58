"""The shape of a model, as given by the config.json of a Hugging Face directory.

One `ModelConfig` serves every family. A family differs from the others in a few features of its
layers (`families`). Optional parts of a model are fields that may be None: `latent` (MLA), `linear`
(recurrent layers), `experts` (mixture of experts), `rope_scaling`. `layer_features` states what one
layer computes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from etude.model.config_json import read_fields
from etude.model.config_written import written
from etude.model.families import FAMILIES, Family
from etude.model.parts import ExpertsConfig, LatentConfig, LayerFeatures, LinearConfig, RopeScaling

__all__ = [
    "ExpertsConfig",
    "LayerFeatures",
    "LatentConfig",
    "LinearConfig",
    "ModelConfig",
    "RopeScaling",
]

SupportedFeatures = Mapping[str, Collection[Any]]
"""The values beyond the defaults that a path computes, by the field names of `LayerFeatures`."""
WRITTEN_AS_IS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "intermediate_size", "max_position_embeddings", "model_type"),
    *("rms_norm_eps", "rope_theta", "tie_word_embeddings"),
)


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
    """0: the hidden size divided by the number of heads. Unused with `latent`."""
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    tie_word_embeddings: bool = True
    latent: LatentConfig | None = None
    linear: LinearConfig | None = None
    experts: ExpertsConfig | None = None
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    use_qk_norm: bool = True
    """Only for families that norm queries and keys."""
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    rope_theta: float = 100_000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0
    local_rope_theta: float | None = None
    """Rope base of layers with a window, in families where these rotate differently."""
    unrotated_layers: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    attention_multiplier: float | None = None
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        scaling = self.rope_scaling
        if scaling and scaling.rope_type == "longrope":
            pairs = self.rotary_dim // 2
            told = len(scaling.short_factor)
            if told != pairs:
                raise ValueError(
                    f"config.json: short_factor has {told} numbers, but {pairs} pairs of each "
                    f"head are rotated (head_dim, partial_rotary_factor)"
                )

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def rotary_dim(self) -> int:
        if self.latent:
            return self.latent.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def cached_heads(self) -> tuple[int, int]:
        """Number of heads and size of what one token stores in a key cache. Values have the same
        size; with `latent` they are the first `kv_lora_rank` numbers of the key."""
        if self.latent:
            return 1, self.latent.kv_lora_rank + self.latent.qk_rope_head_dim
        return self.num_key_value_heads, self.head_dim

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers that store keys and values in a cache."""
        recurrent = self.linear.layers if self.linear else ()
        return tuple(n for n in range(self.num_hidden_layers) if n not in recurrent)

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        """The cached layers that see no further back than the window."""
        if self.sliding_window is None:
            return ()
        return tuple(n for n in self.cached_layers if n in self.sliding_layers)

    def layer_features(self, layer: int) -> LayerFeatures:
        family = self.family
        windowed = layer in self.sliding_layers
        local = windowed and self.local_rope_theta is not None
        return LayerFeatures(
            linear=self.linear is not None and layer in self.linear.layers,
            latent=self.latent is not None,
            gated_attention=family.gated_attention,
            qkv_bias=family.qkv_bias or self.attention_bias,
            out_bias=self.attention_out_bias,
            qk_norm=family.qk_norm if self.use_qk_norm else None,
            scale=self._score_scale,
            softcap=self.attn_logit_softcapping,
            sinks=family.sinks,
            window=self.sliding_window if windowed else None,
            rope=None if layer in self.unrotated_layers else "local" if local else "global",
            partial_rotary=not self.latent and self.rotary_dim != self.head_dim,
            norms=family.norms,
            centred_norms=family.centred_norms,
            residual_scale=self.residual_multiplier,
            hidden_act=self.hidden_act,
            mlp_bias=self.mlp_bias,
            embedding_scale=self.embedding_multiplier
            * (self.hidden_size**0.5 if family.scaled_embeddings else 1.0),
            logits_scale=self.logits_scaling,
            logits_softcap=self.final_logit_softcapping,
            **(_expert_features(e) if (e := self.experts) and layer in e.layers else {}),
        )

    @property
    def _score_scale(self) -> float | None:
        if self.query_pre_attn_scalar is not None:
            return 1 / math.sqrt(self.query_pre_attn_scalar)
        return self.attention_multiplier

    def unsupported_features(self, supported: SupportedFeatures) -> list[str]:
        """Features of any layer, as text, that are neither defaults nor supported by a path."""
        plain = LayerFeatures()
        found = {
            name: value
            for layer in range(self.num_hidden_layers)
            for name, value in _values(self.layer_features(layer))
            if value != getattr(plain, name) and value not in supported.get(name, ())
        }
        return [f"{name} {value}" for name, value in found.items()]

    def to_json(self) -> str:
        said: dict[str, Any] = {
            "architectures": [self.family.architecture],
            "torch_dtype": "bfloat16",
            **{name: getattr(self, name) for name in WRITTEN_AS_IS},
        }
        return json.dumps(said | written(self, self.family), indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelConfig:
        """Parse config.json. Raises ValueError for a model that this package would compute wrongly,
        or not at all."""
        return cls(**read_fields(json.loads(text)))


def _values(features: LayerFeatures) -> list[tuple[str, Any]]:
    return [(f.name, getattr(features, f.name)) for f in fields(features)]


def _expert_features(e: ExpertsConfig) -> dict[str, Any]:
    router = "softmax"
    if e.sigmoid:
        router = "sigmoid"
    elif e.router_bias:
        router = "biased softmax"
    elif e.n_group != e.topk_group:
        router = "grouped softmax"
    gated = e.shared_expert_intermediate_size > 0
    return {
        "router": router,
        "experts_scale": e.routed_scaling_factor,
        "shared_experts": "gated" if gated else "added" if e.n_shared_experts else None,
        "clamped_gates": e.swiglu_limit is not None,
    }
