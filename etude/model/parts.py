"""The optional parts of a model's shape, and the features of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from etude.model.families import Norms


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """RoPE scaling to more positions than the model was first trained on; the fields are those of
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
    """This and the next field are for llama3 only, whose config.json has both."""
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    """This and the next field are for longrope only: a factor for each pair, within the original
    context and beyond it."""
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """MLA: keys and values of all heads are computed from one short vector for each token, and only
    that is cached."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope_interleave: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """Gated DeltaNet: layers that keep a state of fixed size instead of keys and values."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    layers: tuple[int, ...]
    """The recurrent layers; the others have attention."""

    @property
    def conv_dim(self) -> int:
        """Queries, keys and values of a token."""
        keys = self.num_key_heads * self.key_head_dim
        return 2 * keys + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    layers: tuple[int, ...]
    """The layers that have experts; the others have a plain MLP."""
    norm_topk_prob: bool = False
    sigmoid: bool = False
    """DeepSeek's router: a sigmoid for each expert, and a bias that affects only the choice.
    Otherwise a softmax."""
    router_bias: bool = False
    """The scores have a bias that is learnt like any weight."""
    n_group: int = 1
    topk_group: int = 1
    best_in_group: int = 2
    """The score of a group is the sum of this many of its best experts."""
    routed_scaling_factor: float = 1.0
    n_shared_experts: int = 0
    shared_expert_intermediate_size: int = 0
    """Size of one shared expert that each token weighs with its own gate; 0: none."""
    swiglu_limit: float | None = None
    """gpt-oss: gates are clamped to it, experts have biases, and 1 is added to the part that is
    gated."""
    swiglu_alpha: float = 1.702
    router_aux_loss_coef: float = 0.0
    """Weight of the loss that balances the experts, in families that have one."""

    @property
    def id_dtype(self) -> str:
        """The dtype of recorded expert ids, by its name in torch and numpy."""
        return "uint8" if self.num_experts <= 256 else "int16"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFeatures:
    """Features of a layer's computation, and of the steps before the first and after the last
    layer, but not sizes. The defaults are Llama's.

    A path that is faster than the model definition lists the values that it can compute beyond
    these (`ModelConfig.unsupported_features`), so that a model with any other feature is kept off
    it.
    """

    linear: bool = False
    """A recurrent state (Gated DeltaNet) instead of attention."""
    latent: bool = False
    gated_attention: bool = False
    """The attention output is multiplied by a sigmoid, for each number of each head."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["head", "row"] | None = None
    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D)."""
    softcap: float | None = None
    sinks: bool = False
    window: int | None = None
    """Number of tokens that a token sees, including itself; None: all before it."""
    rope: Literal["global", "local"] | None = "global"
    """Rope table of queries and keys; None: they are not rotated."""
    partial_rotary: bool = False
    """Only the first numbers of a head are rotated."""
    norms: Norms = "before"
    centred_norms: bool = False
    residual_scale: float = 1.0
    hidden_act: str = "silu"
    mlp_bias: bool = False
    router: Literal["softmax", "sigmoid", "biased softmax", "grouped softmax"] | None = None
    """None: a dense layer."""
    experts_scale: float = 1.0
    shared_experts: Literal["added", "gated"] | None = None
    clamped_gates: bool = False
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float | None = None
