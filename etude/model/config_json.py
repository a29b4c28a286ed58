"""Parser of config.json into the fields of a `ModelConfig`.

Every key is accounted for: it is read, it is known to change nothing (`HARMLESS`), or it has the
value that holds for every model of the family. Any other key is refused by name. A missing key has
the default of transformers, or is required.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from etude.model.families import DEFAULTS, FAMILIES, HARMLESS, REFUSED, Family
from etude.model.parts import ExpertsConfig, LatentConfig, LinearConfig, RopeScaling
from etude.model.quantization import check_quantization

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
PLAIN = {
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "use_qk_norm": True,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
"""Keys that some families read unchanged, with the values for families that do not read them."""
OFF = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0, None),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
"""Keys, and the values at which they change nothing in a family that does not read them."""
NULLABLE = {
    *("num_key_value_heads", "head_dim", "q_lora_rank", "mlp_only_layers", "layer_types"),
    *("sliding_window", "no_rope_layers", "attn_logit_softcapping", "final_logit_softcapping"),
    *("factor", "partial_rotary_factor", "use_sliding_window"),
    *("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
}
"""Keys that may be null, in addition to those whose default is null; null means the same to
transformers as to us."""
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
ROPE_DEFAULTS = {
    "beta_fast": None,
    "beta_slow": None,
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
}
ROPE_KEYS = {f.name for f in fields(RopeScaling)} | {
    "type",
    "rope_theta",
    "partial_rotary_factor",
}
"""Keys of a rope table; those that its type does not use change nothing."""
FULL, LOCAL, LINEAR = "full_attention", "sliding_attention", "linear_attention"


class _Reader:
    """The keys of config.json, with the family's defaults for those that it leaves out."""

    def __init__(self, said: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._said = said
        self._defaults = defaults
        self.asked: set[str] = set()

    def __call__(self, *names: str) -> Any:
        """Value of the first of these synonymous keys that is present."""
        self.asked.update(names)
        for table in (self._said, self._defaults):
            for name in names:
                if name in table:
                    nullable = name in NULLABLE or self._defaults.get(name, 0) is None
                    if table[name] is None and not nullable:
                        raise ValueError(
                            f"config.json: {name} is null: set it to the value that the model "
                            f"was trained with"
                        )
                    return table[name]
        raise ValueError(f"config.json: {' or '.join(names)} is missing and has no default: add it")

    def knows(self, name: str) -> bool:
        return name in self._defaults


def read_fields(said: object) -> dict[str, Any]:
    """Parse the fields of a `ModelConfig`. Raises ValueError for a model that this package would
    compute wrongly, or not at all."""
    if not isinstance(said, dict) or said.get("model_type") not in FAMILIES:
        found = said.get("model_type") if isinstance(said, dict) else None
        why = f" ({REFUSED[str(found)]})" if found in REFUSED else ""
        raise ValueError(
            f"config.json: model_type {found!r} is not supported{why}; supported: "
            f"{', '.join(FAMILIES)}"
        )
    family = FAMILIES[said["model_type"]]
    read = _Reader(said, {**DEFAULTS, **family.defaults})
    found = {
        "model_type": said["model_type"],
        **{name: read(name) for name in SIZES},
        "num_key_value_heads": read("num_key_value_heads") or read("num_attention_heads"),
        "head_dim": 0 if family.latent else read("head_dim") or 0,
        "rms_norm_eps": read("rms_norm_eps"),
        "tie_word_embeddings": read("tie_word_embeddings"),
        "hidden_act": _activation(read),
        **{name: read(name) for name in PLAIN if read.knows(name)},
        "latent": _latent(said, read, family),
        "linear": _linear(read, family),
        "experts": _experts(read, family),
    }
    if read.knows("qkv_bias"):
        found["attention_bias"] = read("qkv_bias")
    found["attention_out_bias"] = bool(family.out_bias) and bool(read(family.out_bias or ""))
    found |= _windows(read, family) | _rope(said, read, family)
    read.asked.add("quantization_config")
    check_quantization(said.get("quantization_config"))
    _refuse_unread(said, read, family)
    return found


def _activation(read: _Reader) -> str:
    name: str = read("hidden_activation") if read.knows("hidden_activation") else read("hidden_act")
    if name not in ACTIVATIONS:
        raise ValueError(
            f"config.json: hidden_act = {name!r} is not supported; supported: "
            f"{', '.join(ACTIVATIONS)}"
        )
    return name


def _refuse_unread(said: Mapping[str, Any], read: _Reader, family: Family) -> None:
    read_keys = (read.asked | family.defaults.keys()) - family.only.keys()
    unread = said.keys() - HARMLESS - family.harmless - read_keys
    allowed: dict[str, tuple[Any, ...]] = {**OFF, **family.only}
    wrong = [key for key in sorted(unread) if said[key] not in allowed.get(key, ())]
    if "layer_types" in wrong and not any(kind != FULL for kind in said["layer_types"] or ()):
        wrong.remove("layer_types")
    if not wrong:
        return
    known = [key for key in wrong if key in allowed or key == "layer_types"]
    if known:
        listed = ", ".join(f"{key} = {said[key]!r}" for key in known)
        raise ValueError(f"config.json: {listed} is not supported for {said['model_type']}")
    raise ValueError(
        f"config.json: unknown keys for {said['model_type']}: {', '.join(wrong)}; remove those "
        f"that do not affect the computation"
    )


def _latent(said: Mapping[str, Any], read: _Reader, family: Family) -> LatentConfig | None:
    if not family.latent:
        return None
    keys = [
        f.name
        for f in fields(LatentConfig)
        if f.name != "rope_interleave" or read.knows("rope_interleave")
    ]
    latent = LatentConfig(**{name: read(name) for name in keys})
    # transformers writes keys that follow from the others, and computes with the ones that it
    # reads.
    rotated = latent.qk_rope_head_dim
    follows = {"head_dim": rotated, "qk_head_dim": latent.qk_nope_head_dim + rotated}
    for name, size in follows.items():
        if said.get(name) not in (None, size):
            raise ValueError(
                f"config.json: {name} = {said[name]!r} is not supported; it must be {size}"
            )
    read.asked |= follows.keys()
    return latent


def _linear(read: _Reader, family: Family) -> LinearConfig | None:
    if not family.linear:
        return None
    depth, step = range(read("num_hidden_layers")), read("full_attention_interval")
    told = read("layer_types")
    if told is None:
        told = [FULL if (n + 1) % step == 0 else LINEAR for n in depth]
    if len(told) != len(depth) or not {FULL} <= set(told) <= {FULL, LINEAR}:
        raise ValueError(
            f"config.json: layer_types = {told!r} is not supported: it must name {FULL} or "
            f"{LINEAR} for each of {len(depth)} layers, and {FULL} at least once"
        )
    layers = tuple(n for n, kind in enumerate(told) if kind == LINEAR)
    names = [f.name for f in fields(LinearConfig) if f.name != "layers"]
    if not layers:
        read.asked |= {f"linear_{name}" for name in names}
        return None
    sizes = {name: read(f"linear_{name}") for name in names}
    if sizes["num_value_heads"] % sizes["num_key_heads"]:
        raise ValueError(
            f"config.json: linear_num_value_heads = {sizes['num_value_heads']} is not a "
            f"multiple of linear_num_key_heads = {sizes['num_key_heads']}"
        )
    return LinearConfig(layers=layers, **sizes)


# Windows


def _windows(read: _Reader, family: Family) -> dict[str, Any]:
    """The window, the layers that have it, and the layers without positions."""
    depth = range(read("num_hidden_layers"))
    unrotated = _unrotated(read, depth) if read.knows("no_rope_layers") else ()
    found: dict[str, Any] = {"unrotated_layers": unrotated}
    if family.windows is None:
        return found
    asked = not read.knows("use_sliding_window") or read("use_sliding_window")
    window = read("sliding_window") if asked else None
    by_rule: dict[str, Callable[[int], bool]] = {
        "all": lambda n: True,
        "asked": lambda n: True,
        "late": lambda n: n >= read("max_window_layers"),
        "odd": lambda n: n % 2 == 0 and n < read("max_window_layers"),
        "unrotated": lambda n: n in unrotated,
        "alternating": lambda n: n % 2 == 0,
        "pattern": lambda n: (n + 1) % read("sliding_window_pattern") != 0,
        "all but 4": lambda n: (n + 1) % 4 != 0,
    }
    layers = tuple(n for n in depth if by_rule[family.windows](n))
    told = read("layer_types") if read.knows("layer_types") else None
    if told is not None:
        if len(told) != len(depth) or any(kind not in (FULL, LOCAL) for kind in told):
            raise ValueError(
                f"config.json: layer_types = {told!r} is not supported: it must name {FULL} or "
                f"{LOCAL} for each of {len(depth)} layers"
            )
        layers = tuple(n for n, kind in enumerate(told) if kind == LOCAL)
        if layers and not window:
            raise ValueError(
                f"config.json: layer_types has {LOCAL}, but sliding_window is {window!r} "
                f"(use_sliding_window: {bool(asked)})"
            )
    if window is None or not layers:
        return found
    if window < 1:
        raise ValueError(f"config.json: sliding_window = {window!r} is not supported")
    return found | {"sliding_window": window, "sliding_layers": layers}


def _unrotated(read: _Reader, depth: Iterable[int]) -> tuple[int, ...]:
    told = read("no_rope_layers")
    step = read("no_rope_layer_interval")
    if told is None:
        return tuple(n for n in depth if (n + 1) % step == 0)
    return tuple(n for n in depth if not told[n])


# Rope


def stated_rope(said: Mapping[str, Any]) -> dict[str, Any]:
    """The rope table of config.json, under its name in transformers 4 or 5; if layers with a window
    have their own table, the one of the layers that see all tokens."""
    rope = said.get("rope_scaling") or said.get("rope_parameters") or {}
    return rope.get(FULL) or {} if FULL in rope or LOCAL in rope else rope


def rope_kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _rope(said: Mapping[str, Any], read: _Reader, family: Family) -> dict[str, Any]:
    read.asked |= {"rope_scaling", "rope_parameters"}
    rope = dict(stated_rope(said))
    found: dict[str, Any] = {}
    if family.local_rope:
        found["local_rope_theta"] = _local_theta(said, read)
    elif LOCAL in (said.get("rope_parameters") or {}):
        raise ValueError(
            f"config.json: rope_parameters of {LOCAL} are not supported for this model"
        )
    if not rope and said["model_type"] == "gpt_oss":
        rope = dict(GPT_OSS_ROPE)
    if unknown := rope.keys() - ROPE_KEYS:
        raise ValueError(f"config.json: unknown rope parameters: {', '.join(sorted(unknown))}")
    # The rope settings were several keys until transformers 5, and are one table since.
    context = read("max_position_embeddings")
    around = ROPE_DEFAULTS | {
        "rope_theta": read("rope_theta"),
        "original_max_position_embeddings": context,
    }
    if read.knows("original_max_position_embeddings"):
        # In transformers this key overrides the one in the table.
        original = read("original_max_position_embeddings")
        rope |= {"original_max_position_embeddings": original}
    if read.knows("partial_rotary_factor"):
        around["partial_rotary_factor"] = read("partial_rotary_factor")
    elif rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(
            f"config.json: partial_rotary_factor = {rope['partial_rotary_factor']!r} is not "
            f"supported for {said['model_type']}"
        )
    kind = rope_kind(rope)
    if family.architecture == "Phi3ForCausalLM" and kind in ("su", "yarn"):
        kind = "longrope"
    table = _Reader(rope, around | ({"factor": None} if kind == "longrope" else {}))
    if "partial_rotary_factor" in around:
        found["partial_rotary_factor"] = table("partial_rotary_factor")
    found["rope_theta"] = float(table("rope_theta"))
    if kind not in family.rope_types:
        raise ValueError(
            f"config.json: rope scaling {kind!r} is not supported for {said['model_type']}; "
            f"supported: {', '.join(family.rope_types)}"
        )
    return found | {"rope_scaling": _rope_scaling(kind, table, context)}


GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _local_theta(said: Mapping[str, Any], read: _Reader) -> float:
    rope = said.get("rope_parameters") or {}
    if rope and not {FULL, LOCAL} >= rope.keys():
        raise ValueError(
            f"config.json: rope_parameters has {', '.join(sorted(rope))}; {said['model_type']} "
            f"needs {FULL} and {LOCAL}"
        )
    local = rope.get(LOCAL) or {}
    if rope_kind(local) != "default" or local.keys() - {"rope_type", "type", "rope_theta"}:
        raise ValueError(f"config.json: rope_parameters of {LOCAL}, {local!r}, are not supported")
    theta = read("rope_local_base_freq")
    return float(local.get("rope_theta", theta))


def _rope_scaling(kind: str, rope: _Reader, context: int) -> RopeScaling | None:
    """`context`: the context length of the model after stretching."""
    if kind == "default":
        return None
    original = rope("original_max_position_embeddings")
    factor = rope("factor")
    if factor is None and kind not in ("yarn", "longrope"):
        raise ValueError(f"config.json: the factor of rope scaling {kind!r} is null: set it")
    more: dict[str, Any] = {}
    if kind == "llama3":
        more = {name: rope(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "longrope":
        more = {name: tuple(rope(name)) for name in ("short_factor", "long_factor")}
        if context > original:
            raise ValueError(
                f"config.json: longrope changes its angles once a sequence has more than "
                f"{original} tokens, so cached keys would be wrong: set max_position_embeddings "
                f"to {original} (model.max_context does this for a run), and factor = "
                f"{context / original:g} in rope_scaling"
            )
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
        **more,
    )


def pin_context(said: dict[str, Any]) -> None:
    """Make the rope table independent of the context length: write out what it states relative to
    the model's original context, so that the model may be given another one."""
    rope = stated_rope(said)
    if not rope:
        return
    context = said["max_position_embeddings"]
    own = said.get("original_max_position_embeddings") or rope.setdefault(
        "original_max_position_embeddings", context
    )
    kind = rope_kind(rope)
    if kind in ("longrope", "su") or (kind == "yarn" and "factor" in rope):
        rope["factor"] = rope.get("factor") or context / own


# Experts


def _experts(read: _Reader, family: Family) -> ExpertsConfig | None:
    keys = family.experts
    if keys is None:
        return None
    depth = range(read("num_hidden_layers"))
    layers = tuple(depth)
    if keys.layers == "after":
        layers = tuple(n for n in depth if n >= read("first_k_dense_replace"))
    elif keys.layers == "every":
        dense = read("mlp_only_layers") or ()
        step = read("decoder_sparse_step")
        if step < 1:
            raise ValueError(f"config.json: decoder_sparse_step = {step} is not supported")
        layers = tuple(n for n in depth if n not in dense and (n + 1) % step == 0)
    if not layers:
        read.asked |= {"num_experts_per_tok", *keys.number, keys.size, *keys.keys}
        return None
    number, size = read(*keys.number), read(keys.size)
    values = {key: read(key) for key in ("num_experts_per_tok", *keys.keys)} | dict(keys.fixed)
    if read.knows("topk_method"):
        values |= _groups_by_method(read("topk_method"), values)
    if not number:
        return None
    experts = ExpertsConfig(num_experts=number, moe_intermediate_size=size, layers=layers, **values)
    _check_groups(experts)
    return experts


def _groups_by_method(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    if method == "greedy":
        return {"n_group": 1, "topk_group": 1}
    if method != "group_limited_greedy" or None in (values["n_group"], values["topk_group"]):
        raise ValueError(
            f"config.json: topk_method = {method!r} with n_group = {values['n_group']!r} and "
            f"topk_group = {values['topk_group']!r} is not supported"
        )
    return {}


def _check_groups(experts: ExpertsConfig) -> None:
    number, groups = experts.num_experts, experts.n_group
    if number % groups:
        raise ValueError(
            f"config.json: {number} experts cannot be divided into n_group = {groups} groups of "
            f"equal size"
        )
    within = experts.topk_group * (number // groups)
    if not 1 <= experts.num_experts_per_tok <= within:
        raise ValueError(
            f"config.json: num_experts_per_tok = {experts.num_experts_per_tok} is not "
            f"supported: a token may choose from {within} experts (n_group, topk_group)"
        )
