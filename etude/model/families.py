"""The model families: facts about their layers that config.json does not state, and defaults of the
keys that it may leave out.

`FAMILIES` is the complete list. The default of a key is that of transformers for the family; a key
without a default is required, because transformers assumes the size of one particular model.
`config_json` refuses a key that is in no list; it never skips one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Norms = Literal["before", "after", "around"]
"""Position of a block's norms: before attention and MLP, after them, or both."""
Windows = Literal["all", "asked", "late", "odd", "unrotated", "alternating", "pattern", "all but 4"]
"""Rule for which layers have a window, if `layer_types` does not state it: see `config_json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKeys:
    """Config keys of a family's experts and of its router."""

    number: tuple[str, ...]
    """Synonyms of one key; the first is written."""
    size: str = "moe_intermediate_size"
    layers: Literal["all", "after", "every"] = "all"
    """`after`: from `first_k_dense_replace` on. `every`: by `decoder_sparse_step` and
    `mlp_only_layers`."""
    keys: tuple[str, ...] = ()
    """Keys read unchanged: fields of `ExpertsConfig`."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ExpertsConfig` that no key states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Facts about a model family that config.json does not state. The defaults are Llama's."""

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys that the family reads beyond `DEFAULTS`, or with other defaults, and their default
    values."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that may only have one of these values."""
    harmless: frozenset[str] = frozenset()
    """Keys of its files that change nothing."""
    rope_types: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

    qkv_bias: bool = False
    """Queries, keys and values have a bias, whatever `attention_bias` is."""
    out_bias: str | None = None
    """Config key that gives the attention output a bias."""
    qk_norm: Literal["head", "row"] | None = None
    """Queries and keys are normed before they are rotated, head by head or all heads as one row."""
    sinks: bool = False
    """Every head has a score that takes a share of the attention and contributes nothing."""
    windows: Windows | None = None
    local_rope: bool = False
    """Layers with a window have their own rope."""
    norms: Norms = "before"
    centred_norms: bool = False
    """Norms multiply by 1 plus their weight."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""
    latent: bool = False
    linear: bool = False
    """Some layers are recurrent: Gated DeltaNet."""
    gated_attention: bool = False
    """Queries come with a gate on the attention output."""
    experts: ExpertKeys | None = None
    fused_files: bool = False
    """Files hold queries, keys and values in one matrix and gate and up in another, as we do."""
    renames: tuple[tuple[str, str], ...] = ()
    """Parts of tensor names: ours, and theirs."""


DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "head_dim": None,
}
"""Keys that every family reads."""

_BIASES = {"attention_bias": False, "mlp_bias": False}
_OWN_KEYS = {"num_key_value_heads": None}
_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_CAPPED = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "attention_bias": False,
}
_SPARSE = {
    "mlp_only_layers": None,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
_CAUSAL = {"use_bidirectional_attention": (False, None)}
_GROUPS = ("norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor", "n_shared_experts")
_QWEN_EXPERTS = ExpertKeys(
    number=("num_experts", "num_local_experts"),
    layers="every",
    keys=("norm_topk_prob", "router_aux_loss_coef"),
)
_QWEN_SHARED_EXPERTS = ExpertKeys(
    number=("num_experts",),
    layers="every",
    keys=("norm_topk_prob", "router_aux_loss_coef", "shared_expert_intermediate_size"),
)
_SHARED_EXPERT = ((".shared_experts.", ".shared_expert."),)
_DEEPSEEK_EXPERTS = ExpertKeys(
    number=("n_routed_experts", "num_local_experts", "num_experts"),
    layers="after",
    keys=(*_GROUPS, "router_aux_loss_coef"),
    fixed={"sigmoid": True},
)
_LATENT_ONLY = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "hidden_act": ("silu",),
}
_LATENT_HARMLESS = frozenset({"ep_size", "aux_loss_alpha", "seq_aux"})

_DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    latent=True,
    experts=_DEEPSEEK_EXPERTS,
    only=_LATENT_ONLY | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    harmless=_LATENT_HARMLESS,
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
        architecture="LlamaForCausalLM",
        out_bias="attention_bias",
        only={"rope_interleaved": (False,)},
        defaults=_OWN_KEYS | _BIASES,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM", windows="all", defaults={"sliding_window": 4096}
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        windows="all",
        experts=ExpertKeys(
            number=("num_local_experts", "num_experts"),
            size="intermediate_size",
            keys=("router_aux_loss_coef",),
            fixed={"norm_topk_prob": True},
        ),
        renames=(
            (".mlp.", ".block_sparse_moe."),
            (".gate_proj.", ".w1."),
            (".down_proj.", ".w2."),
            (".up_proj.", ".w3."),
        ),
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "router_aux_loss_coef": 0.001,
        },
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        windows="late",
        defaults=_WINDOW | {"max_window_layers": 28, "layer_types": None},
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        windows="odd",
        experts=_QWEN_SHARED_EXPERTS,
        renames=_SHARED_EXPERT,
        defaults=_WINDOW
        | _SPARSE
        | {"max_window_layers": 28, "layer_types": None, "qkv_bias": True},
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        qk_norm="head",
        out_bias="attention_bias",
        windows="late",
        defaults=_WINDOW
        | {
            "head_dim": 128,
            "max_window_layers": 28,
            "layer_types": None,
            "attention_bias": False,
        },
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        qk_norm="head",
        out_bias="attention_bias",
        windows="asked",
        experts=_QWEN_EXPERTS,
        # keys of the previous family; transformers reads none of them
        only={
            "qkv_bias": (False,),
            "shared_expert_intermediate_size": (0,),
            "use_qk_norm": (True,),
        },
        harmless=frozenset({"max_window_layers"}),
        defaults=_WINDOW | _SPARSE | {"attention_bias": False},
    ),
    "qwen3_next": Family(
        architecture="Qwen3NextForCausalLM",
        qk_norm="head",
        out_bias="attention_bias",
        centred_norms=True,
        gated_attention=True,
        linear=True,
        experts=_QWEN_SHARED_EXPERTS,
        renames=_SHARED_EXPERT,
        defaults=_SPARSE
        | {
            "head_dim": 256,
            "attention_bias": False,
            "partial_rotary_factor": 0.25,
            "norm_topk_prob": True,
            "layer_types": None,
            "full_attention_interval": 4,
        },
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        out_bias="attention_bias",
        windows="unrotated",
        harmless=frozenset({"max_window_layers"}),
        defaults=_BIASES
        | {
            "tie_word_embeddings": True,
            "rope_theta": 2_000_000.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        windows="all",
        fused_files=True,
        rope_types=("default", "longrope"),
        # keys of code other than transformers, which reads none of the last three
        only={
            "attention_bias": (False,),
            "full_attn_mod": (1,),
            "interpolate_factor": (1,),
            "lm_head_bias": (False,),
        },
        defaults=_OWN_KEYS
        | {
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        out_bias="attention_bias",
        defaults=_OWN_KEYS
        | _BIASES
        | {
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        out_bias="attention_bias",
        qk_norm="row",
        norms="after",
        defaults=_OWN_KEYS | {"rms_norm_eps": 1e-5, "attention_bias": False},
    ),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        out_bias="attention_bias",
        qk_norm="row",
        norms="after",
        windows="all but 4",
        local_rope=True,
        defaults=_OWN_KEYS
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_local_base_freq": 500_000.0,
            "attention_bias": False,
            "sliding_window": 4096,
            "layer_types": None,
        },
    ),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        out_bias="attention_out_bias",
        defaults={
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
            "head_dim": 128,
        },
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        out_bias="attention_bias",
        windows="alternating",
        norms="around",
        centred_norms=True,
        scaled_embeddings=True,
        only=_CAUSAL,
        harmless=frozenset({"hidden_act"}),
        defaults=_CAPPED | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        out_bias="attention_bias",
        qk_norm="head",
        windows="pattern",
        local_rope=True,
        norms="around",
        centred_norms=True,
        scaled_embeddings=True,
        # transformers does not use its own key for capped scores here.
        only=_CAUSAL | {"attn_logit_softcapping": (None,)},
        harmless=frozenset({"_sliding_window_pattern"}),
        defaults=_CAPPED
        | {
            "final_logit_softcapping": None,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        qk_norm="head",
        experts=ExpertKeys(
            number=("n_routed_experts", "num_local_experts"),
            layers="after",
            keys=_GROUPS,
            fixed={"sigmoid": True},
        ),
        only={"scoring_func": ("sigmoid",)},
        defaults={
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "attention_bias": False,
            "use_qk_norm": False,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        out_bias="attention_bias",
        sinks=True,
        windows="alternating",
        experts=ExpertKeys(
            number=("num_local_experts", "num_experts"),
            size="intermediate_size",
            keys=("router_aux_loss_coef", "swiglu_limit", "swiglu_alpha"),
            fixed={"norm_topk_prob": True, "router_bias": True},
        ),
        renames=((".mlp.gate.", ".mlp.router."),),
        only={"hidden_act": ("silu",)},
        harmless=frozenset({"experts_per_token", "initial_context_length"}),
        defaults={
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "attention_bias": True,
            "sliding_window": 128,
            "layer_types": None,
            "router_aux_loss_coef": 0.001,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
        },
    ),
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        latent=True,
        experts=ExpertKeys(
            number=("n_routed_experts", "num_experts"),
            layers="after",
            keys=_GROUPS[1:],
            fixed={"best_in_group": 1},
        ),
        # transformers reads neither of the last two.
        only=_LATENT_ONLY | {"scoring_func": ("softmax",), "norm_topk_prob": (False, None)},
        harmless=_LATENT_HARMLESS,
        defaults=_OWN_KEYS
        | {
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "n_group": None,
            "topk_group": None,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
        },
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
}

_CHUNKED = (
    "chunked attention, scores scaled by position, norms after the rotation and weighted expert "
    "inputs are not supported, and the family has no models without images"
)
REFUSED: Mapping[str, str] = {
    "llama4": _CHUNKED,
    "llama4_text": _CHUNKED,
    "gemma3": "it sees images; the text-only models of the family are gemma3_text",
    "mistral3": "it sees images; the text-only models of the family are mistral",
}
"""Model types that people ask for and that are not supported, with the reason."""

HARMLESS = frozenset(
    {
        *("architectures", "model_type", "auto_map", "_name_or_path", "name_or_path"),
        *("torch_dtype", "dtype", "transformers_version", "transformers.js_config"),
        *("unsloth_version", "unsloth_fixed", "is_llama_config", "_attn_implementation_autoset"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
        *("use_cache", "cache_implementation", "return_dict", "torchscript", "pretraining_tp"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
        *("id2label", "label2id", "problem_type", "task_specific_params", "finetuning_task"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "tokenizer_class", "prefix"),
        # used in training only; Etude trains without noise
        *("initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop"),
        *("residual_dropout", "hidden_dropout", "router_jitter_noise", "aux_loss_alpha"),
        # layers that predict further tokens, which are not loaded
        *("num_nextn_predict_layers", "num_mtp_layers"),
    }
)
"""Keys that change nothing about the computation of any model."""
