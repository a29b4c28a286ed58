"""The shape of a model, as config.json of a Hugging Face directory says it.

One `ModelConfig` for every family. What sets a family apart is a few facts about its layers
(`FAMILIES`); what a model may have or not have is a part that is None or there: `latent` (MLA),
`experts` (mixture of experts), `rope_scaling`. Anything in config.json that would change the
computation and is not known here is refused, never skipped. A key that is left out means what it
means to transformers, or is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Facts about a model family that config.json does not say."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normed head by head before they are rotated."""
    latent: bool = False
    defaults: Mapping[str, Any]
    """What keys mean that config.json leaves out, beyond `DEFAULTS`: transformers' values for the
    family. A key without a default must be there, because what transformers assumes is the size of
    one model."""


DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": None,
    "beta_fast": None,
    "beta_slow": None,
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
}
NULLABLE = {
    *(
        "num_key_value_heads",
        "head_dim",
        "q_lora_rank",
        "mlp_only_layers",
        "factor",
        "partial_rotary_factor",
    ),
    *("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
}
"""Keys that may say null; to transformers it means the same as to us."""

_DEEPSEEK = Family(
    architecture="DeepseekV3ForCausalLM",
    latent=True,
    defaults={
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "router_aux_loss_coef": 0.0,
    },
)
FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM", defaults={"num_key_value_heads": None, "head_dim": None}
    ),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True, defaults={"head_dim": None}),
    "qwen3": Family(architecture="Qwen3ForCausalLM", qk_norm=True, defaults={"head_dim": 128}),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        qk_norm=True,
        defaults={
            "head_dim": None,
            "mlp_only_layers": None,
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
        },
    ),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """RoPE scaling to more positions than the model first learnt; the fields are those of
    `rope_scaling`."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float | None
    mscale: float
    mscale_all_dim: float
    truncate: bool
    low_freq_factor: float = 1.0
    """This and the next of llama3 alone, whose config.json says both."""
    high_freq_factor: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """MLA: keys and values of all heads are made from one short vector a token, and only that is
    cached."""

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
    """DeepSeek's router: a sigmoid for each expert, and a bias that only steers the choice.
    Otherwise a softmax."""
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    n_shared_experts: int = 0
    router_aux_loss_coef: float = 0.0
    """How much the loss that balances the experts weighs, in families that have one."""

    @property
    def id_dtype(self) -> str:
        """The dtype of recorded expert ids, by the name that torch and numpy give it."""
        return "uint8" if self.num_experts <= 256 else "int16"


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
        """Heads and size of what one token leaves in a cache of keys; values are as large, and with
        `latent` they are the first `kv_lora_rank` numbers of the key."""
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
        said |= {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("latent", "experts")
        }
        if self.rope_scaling:
            scaling = asdict(self.rope_scaling)
            optional = ("mscale", "mscale_all_dim", "attention_factor")
            said["rope_scaling"] = {k: v for k, v in scaling.items() if k not in optional or v}
        if self.latent:
            said |= asdict(self.latent)
            del said["head_dim"]
        said |= _experts_to_json(self.experts, self.model_type, self.num_hidden_layers)
        return json.dumps(said, indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelConfig:
        """Raises ValueError for a model that this package would compute wrongly, or not at all."""
        said = json.loads(text)
        if not isinstance(said, dict) or said.get("model_type") not in FAMILIES:
            found = said.get("model_type") if isinstance(said, dict) else None
            raise ValueError(
                f"config.json: model_type is {found!r}; this version reads {', '.join(FAMILIES)}"
            )
        family = FAMILIES[said["model_type"]]
        _refuse(said, family)
        read = _Reader(said, {**DEFAULTS, **family.defaults})
        # Rope stood in several keys until transformers 5, and stands in one since.
        around = {key: read(key) for key in ("rope_theta", "partial_rotary_factor")}
        around["original_max_position_embeddings"] = read("max_position_embeddings")
        rope = stated_rope(said)
        read_rope = _Reader(rope, {**DEFAULTS, **around})
        return cls(
            model_type=said["model_type"],
            vocab_size=read("vocab_size"),
            hidden_size=read("hidden_size"),
            num_hidden_layers=read("num_hidden_layers"),
            num_attention_heads=read("num_attention_heads"),
            num_key_value_heads=read("num_key_value_heads") or read("num_attention_heads"),
            intermediate_size=read("intermediate_size"),
            max_position_embeddings=read("max_position_embeddings"),
            head_dim=0 if family.latent else read("head_dim") or 0,
            rms_norm_eps=read("rms_norm_eps"),
            rope_theta=float(read_rope("rope_theta")),
            rope_scaling=_rope_scaling(rope_kind(rope), read_rope, read("max_position_embeddings")),
            tie_word_embeddings=read("tie_word_embeddings"),
            latent=LatentConfig(**{f.name: read(f.name) for f in fields(LatentConfig)})
            if family.latent
            else None,
            experts=_experts(read, said["model_type"]),
        )


def stated_rope(said: Mapping[str, Any]) -> dict[str, Any]:
    """The table of rope in what config.json says, under its name in transformers 4 or 5."""
    return said.get("rope_scaling") or said.get("rope_parameters") or {}


def rope_kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


class _Reader:
    """The keys of config.json, and for those that it leaves out what the family makes of it."""

    def __init__(self, said: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._said = said
        self._defaults = defaults

    def __call__(self, *names: str) -> Any:
        """The first of these names for one thing that is there."""
        for table in (self._said, self._defaults):
            for name in names:
                if name in table:
                    if table[name] is None and name not in NULLABLE:
                        raise ValueError(
                            f"config.json: {name} is null: write what the model was made with"
                        )
                    return table[name]
        raise ValueError(
            f"config.json: {' or '.join(names)} is missing, and cannot be assumed: add it"
        )


def _refuse(said: Mapping[str, Any], family: Family) -> None:
    wrong = {
        "hidden_act": said.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(said.get("attention_bias")),
        "mlp_bias": bool(said.get("mlp_bias")),
        "use_sliding_window": bool(said.get("use_sliding_window")),
        "layer_types": any(kind != "full_attention" for kind in said.get("layer_types") or ()),
        "quantization_config": bool(said.get("quantization_config")),
        # To transformers it overrules the same key in the table of rope.
        "original_max_position_embeddings": "original_max_position_embeddings" in said,
        "scoring_func": family.latent and said.get("scoring_func", "sigmoid") != "sigmoid",
        "topk_method": family.latent and said.get("topk_method", "noaux_tc") != "noaux_tc",
        "moe_layer_freq": family.latent and said.get("moe_layer_freq", 1) != 1,
    }
    if found := [f"{key} = {said[key]!r}" for key, is_wrong in wrong.items() if is_wrong]:
        raise ValueError(f"config.json: {', '.join(found)} is not supported")


def _rope_scaling(kind: str, rope: _Reader, context: int) -> RopeScaling | None:
    """`context`: of the model as it is, stretched."""
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn") or rope("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(
            f"config.json: rope scaling {kind!r} with partial_rotary_factor "
            f"{rope('partial_rotary_factor')} is not "
            f"supported; linear, llama3 and yarn of whole heads are"
        )
    factor, original = rope("factor"), rope("original_max_position_embeddings")
    if factor is None and kind != "yarn":
        raise ValueError(
            f"config.json: factor of the rope scaling {kind!r} is null: write how far it stretches"
        )
    bounds = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    return RopeScaling(
        rope_type=kind,
        factor=context / original if factor is None else factor,
        original_max_position_embeddings=original,
        beta_fast=rope("beta_fast") or 32.0,
        beta_slow=rope("beta_slow") or 1.0,
        attention_factor=rope("attention_factor"),
        mscale=rope("mscale") or 0.0,
        mscale_all_dim=rope("mscale_all_dim") or 0.0,
        truncate=rope("truncate"),
        **{name: rope(name) for name in bounds},
    )


def _experts(read: _Reader, model_type: str) -> ExpertsConfig | None:
    depth = range(read("num_hidden_layers"))
    keys = [
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "router_aux_loss_coef",
    ]
    latent = FAMILIES[model_type].latent
    if latent:
        number = ("n_routed_experts", "num_local_experts")
        layers = tuple(n for n in depth if n >= read("first_k_dense_replace"))
        keys += ["n_group", "topk_group", "routed_scaling_factor", "n_shared_experts"]
    elif model_type == "qwen3_moe":
        number = ("num_experts", "num_local_experts")
        dense, step = read("mlp_only_layers") or (), read("decoder_sparse_step")
        layers = tuple(n for n in depth if n not in dense and (n + 1) % step == 0)
    else:
        return None
    if not layers or not read(*number):
        return None
    if latent and read(*number) % read("n_group"):
        raise ValueError(
            f"config.json: {read(*number)} experts are not to be had in n_group = "
            f"{read('n_group')} groups"
        )
    return ExpertsConfig(
        num_experts=read(*number), layers=layers, sigmoid=latent, **{key: read(key) for key in keys}
    )


def _experts_to_json(experts: ExpertsConfig | None, model_type: str, depth: int) -> dict[str, Any]:
    layers = experts.layers if experts else ()
    if FAMILIES[model_type].latent:
        own = {"first_k_dense_replace": layers[0] if layers else depth, "scoring_func": "sigmoid"}
        number = "n_routed_experts"
    elif model_type == "qwen3_moe":
        own = {"mlp_only_layers": [n for n in range(depth) if n not in layers]}
        number = "num_experts"
    else:
        return {}
    if experts is None:
        return own
    said = {
        key: value
        for key, value in asdict(experts).items()
        if key not in ("num_experts", "layers", "sigmoid")
    }
    return said | own | {number: experts.num_experts}
