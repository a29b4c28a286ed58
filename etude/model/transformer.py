"""A decoder-only transformer, for every family that `config` knows.

The trainer and the engine run this one definition. They differ in how a token sees earlier tokens,
so attention is passed in: `attend` is `attention.CausalAttention` in training, and another class of
that module in inference.

Shapes: .. any leading dimensions (B rows of T tokens, or N tokens of many sequences one after the
other), E hidden size, V vocabulary, D rotated part of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from etude.core.errors import EtudeError
from etude.model.config import ModelConfig
from etude.model.delta_net import GatedDeltaNet
from etude.model.experts import Routing, SparseMoE
from etude.model.fp8 import quantise_rows
from etude.model.heads import AttentionBackend, GroupedQueryAttention, LatentAttention
from etude.model.layers import MLP, Embedding, Linear, RMSNorm
from etude.model.numerics import PLAIN, Arithmetic
from etude.model.rope import local_table, table

__all__ = ["AttentionBackend", "ModelConfig", "Routing", "Transformer", "init_from_scratch"]


NORMS: dict[str, tuple[str | None, str | None, str | None, str | None]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""The norms of a block by their names in the files: before and after attention, before and after
the MLP."""


class Block(nn.Module):
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        features = c.layer_features(layer)
        self._norms = NORMS[features.norms]
        self._residual_scale = features.residual_scale

        def add_norms(names: tuple[str | None, ...]) -> None:
            for name in filter(None, names):
                norm = RMSNorm(c.hidden_size, c.rms_norm_eps, features.centred_norms)
                self.add_module(name, norm)

        add_norms(self._norms[:1])
        self.self_attn: GroupedQueryAttention | LatentAttention | None = None
        self.linear_attn: GatedDeltaNet | None = None
        if c.linear and features.linear:
            self.linear_attn = GatedDeltaNet(c, c.linear, layer)
        elif c.latent:
            self.self_attn = LatentAttention(c, c.latent, layer)
        else:
            self.self_attn = GroupedQueryAttention(c, layer)
        add_norms(self._norms[1:])
        if c.experts and layer in c.experts.layers:
            place = c.experts.layers.index(layer)
            self.mlp: nn.Module = SparseMoE(c.hidden_size, c.experts, place, c.hidden_act)
        else:
            self.mlp = MLP(
                c.hidden_size,
                c.intermediate_size,
                act=features.hidden_act,
                bias=features.mlp_bias,
                fused_files=c.family.fused_files,
            )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: AttentionBackend, routing: Routing | None
    ) -> Tensor:
        before, after, before_mlp, after_mlp = self._norms
        normed = self._normed(before, x)
        if self.self_attn is not None:
            y = self.self_attn(normed, cos, sin, attend)
        else:
            assert self.linear_attn is not None
            y = self.linear_attn(normed, attend)
        x = x + self._scaled(self._normed(after, y))
        normed = self._normed(before_mlp, x)
        y = self.mlp(normed, routing) if isinstance(self.mlp, SparseMoE) else self.mlp(normed)
        return x + self._scaled(self._normed(after_mlp, y))

    def _normed(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else getattr(self, name)(x)

    def _scaled(self, y: Tensor) -> Tensor:
        return y if self._residual_scale == 1 else y * self._residual_scale


class Decoder(nn.Module):
    """Everything but the head; a separate module because tensor names begin with `model.`"""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c, layer) for layer in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, c.family.centred_norms)


class Transformer(nn.Module):
    """`hidden = model(tokens, positions, attend)`, then `model.logits(hidden)` for the positions
    that need them."""

    rope: Tensor
    local_rope: Tensor | None
    """Table of the layers with a window, if these have their own rope."""
    arithmetic = PLAIN
    fused = False
    """Layers and head are compiled."""
    gradient_checkpointing = False
    """Layers keep only their inputs, and are computed again in the backward pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.register_buffer("rope", table(config), persistent=False)
        self.register_buffer("local_rope", local_table(config), persistent=False)
        features = [config.layer_features(layer) for layer in range(config.num_hidden_layers)]
        self._is_local = [layer.rope == "local" for layer in features]
        self._embedding_scale = features[0].embedding_scale
        self._logits_scale = features[0].logits_scale
        self._logits_softcap = features[0].logits_softcap

    @property
    def invariant(self) -> bool:
        """True if every value computed for a token has the same bits whatever else is in the
        batch."""
        return self.arithmetic.invariant

    def rope_of(self, layer: int) -> Tensor:
        """The rope table of a layer."""
        local = self.local_rope if self._is_local[layer] else None
        return self.rope if local is None else local

    def compute_with(self, arithmetic: Arithmetic) -> Transformer:
        """Use this arithmetic in all parts from now on; returns the model."""
        if arithmetic.fp8_kv and (self.config.latent or self.config.linear):
            kept = "a latent" if self.config.latent else "states of recurrent layers"
            raise EtudeError(
                f"an FP8 KV cache is not available for {self.config.model_type}, which caches "
                f"{kept}: remove kv_cache_dtype"
            )
        for module in self.modules():
            module.arithmetic = arithmetic  # type: ignore[assignment]
        return self

    def quantised_layers(self) -> list[Linear]:
        """The layers that multiply in FP8."""
        return [own for own in self.model.modules() if isinstance(own, Linear) and own.in_fp8]

    @torch.no_grad()
    def quantise(self) -> None:
        """Store their weights in FP8, for inference. Repeat after every change of the weights."""
        for own in self.quantised_layers():
            own.quantised = quantise_rows(own.weight)

    def cast(self, dtype: torch.dtype) -> Transformer:
        """Cast parameters to this dtype, but not tables and router biases; returns the model."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: AttentionBackend,
        routing: Routing | None = None,
    ) -> Tensor:
        x = self.model.embed_tokens(tokens)
        if self._embedding_scale != 1:
            # The factor is rounded too, as it is where such models were trained.
            x = x * float(torch.tensor(self._embedding_scale, dtype=x.dtype))
        turns = self.rope[positions].to(x.dtype).unbind(-3)
        local = turns
        if self.local_rope is not None:
            local = self.local_rope[positions].to(x.dtype).unbind(-3)
        again = self.gradient_checkpointing and torch.is_grad_enabled()
        if again and routing is None and self.config.experts:
            routing = Routing()  # keeps the choices: rounding must not change them the second time
        for block, is_local in zip(self.model.layers, self._is_local, strict=True):
            inputs = x, *(local if is_local else turns), attend, routing
            x = checkpoint(block, *inputs, use_reentrant=False) if again else block(*inputs)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def logprobs(
        self, hidden_NE: Tensor, tokens_N: Tensor, temperature_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of the token after each hidden state, and of every token of the vocabulary
        (NV). `temperature_N`: sampling temperature of each; None: all at 1."""
        logits_NV = self.logits(hidden_NE)
        if temperature_N is not None:
            # A tensor even if all are equal: on CUDA, division by a Python number is multiplication
            # by its inverse, which rounds differently.
            logits_NV = logits_NV / temperature_N[:, None]
        logp_NV = torch.log_softmax(logits_NV, dim=-1)
        # `gather` would give the same, but compiled, its gradient needs a tensor as large as all
        # logits.
        return -F.nll_loss(logp_NV, tokens_N, reduction="none"), logp_NV

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return self.bent(self.arithmetic.linear(hidden, head, None).float())

    def bent(self, logits: Tensor) -> Tensor:
        """The family's transformation of logits after the head."""
        if self._logits_scale != 1:
            logits = logits / self._logits_scale
        if self._logits_softcap is not None:
            logits = self._logits_softcap * self.arithmetic.tanh(logits / self._logits_softcap)
        return logits


def init_from_scratch(config: ModelConfig, seed: int) -> Transformer:
    """Random weights, scaled by the input size of each matrix, and by depth for matrices that write
    to the residual stream.

    The output matrix of each head starts as the transpose of its values, so that a head begins by
    copying the tokens it attends to and only has to learn where to look. A small model discovers
    copying in about half the steps this way, and more reliably with embeddings of this size: with
    smaller ones, tokens are hard to tell apart until the embeddings have grown.
    """
    model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    depth = math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim >= 2:
                deviation = 0.2 if "embed" in name else 1 / math.sqrt(parameter.shape[-1])
                parameter.normal_(
                    0.0,
                    deviation / depth if "down_proj" in name else deviation,
                    generator=generator,
                )
        group = config.num_attention_heads // config.num_key_value_heads
        for block in model.model.layers:
            assert isinstance(block, Block)
            if isinstance(attention := block.self_attn, GroupedQueryAttention):
                values_KDE = attention.qkv_proj.weight.view(
                    -1, config.head_dim, config.hidden_size
                )[-config.num_key_value_heads :]
                attention.o_proj.weight.copy_(
                    0.5 * values_KDE.repeat_interleave(group, 0).flatten(0, 1).T
                )
    return model
