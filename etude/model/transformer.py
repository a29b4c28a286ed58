"""A decoder-only transformer in the Hugging Face layout of the Llama family: same config keys, same tensor names.

The trainer and the engine run this one definition. What differs between them is how a token sees the tokens before it,
so attention is handed in: `attend(layer, q, k, v)` is `attention.Causal` in training, `attention.Cached` in inference.

Shapes: B rows, T tokens, H query heads, K key/value heads, D head size, E hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The keys of config.json that shape the computation."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 100_000.0
    tie_word_embeddings: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def to_json(self) -> str:
        kind = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
        }
        return json.dumps(kind | asdict(self) | {"head_dim": self.head_dim}, indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelConfig:
        values = json.loads(text)
        if values.get("model_type") != "llama":
            raise ValueError(f"config.json: model_type is {values.get('model_type')!r}; this version reads 'llama'")
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})


class Attend(Protocol):
    def __call__(self, layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        """What every token takes from the tokens that it sees, as BTHD."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """Rotary positions, the two halves of a head paired with each other."""
    left, right = x_BTHD.chunk(2, dim=-1)
    return x_BTHD * cos_BTD.unsqueeze(-2) + torch.cat((-right, left), dim=-1) * sin_BTD.unsqueeze(-2)


class SelfAttention(nn.Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x_BTE: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, attend: Attend) -> Tensor:
        q, k, v = (p(x_BTE).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        mixed = attend(self.layer, rotate(q, cos_BTD, sin_BTD), rotate(k, cos_BTD, sin_BTD), v)
        return self.o_proj(mixed.flatten(-2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = SelfAttention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x_BTE: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, attend: Attend) -> Tensor:
        x_BTE = x_BTE + self.self_attn(self.input_layernorm(x_BTE), cos_BTD, sin_BTD, attend)
        return x_BTE + self.mlp(self.post_attention_layernorm(x_BTE))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Everything but the head; a module of its own because the tensor names begin with `model.`"""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c, layer) for layer in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Transformer(nn.Module):
    """`hidden = model(tokens, positions, attend)`, then `model.logits(hidden)` for the positions that need them."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        # The angles are computed in float64 and rounded once: every device and build starts from the same table.
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        angles = torch.outer(
            torch.arange(config.max_position_embeddings, dtype=torch.float64), config.rope_theta**-steps
        )
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos().float(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin().float(), persistent=False)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, attend: Attend) -> Tensor:
        x_BTE = self.model.embed_tokens(tokens_BT)
        cos_BTD, sin_BTD = self.cos[positions_BT], self.sin[positions_BT]
        for block in self.model.layers:
            x_BTE = block(x_BTE, cos_BTD, sin_BTD, attend)
        return self.model.norm(x_BTE)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(hidden, head).float()


def fresh(config: ModelConfig, seed: int) -> Transformer:
    """Random weights, scaled by what goes into each matrix, and by depth for what writes to the residual stream.

    The output of each head starts as the transpose of its values, so that a head begins by copying what it looks at and
    only has to learn where to look. A small model discovers copying in about half the steps that way.
    """
    model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    depth = math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                deviation = 0.05 if "embed" in name else 1 / math.sqrt(parameter.shape[1])
                parameter.normal_(
                    0.0, deviation / depth if name.endswith("down_proj.weight") else deviation, generator=generator
                )
        group = config.num_attention_heads // config.num_key_value_heads
        for block in model.model.layers:
            attention = block.self_attn
            assert isinstance(attention, SelfAttention)
            values_KDE = attention.v_proj.weight.reshape(-1, config.head_dim, config.hidden_size)
            attention.o_proj.weight.copy_(0.5 * values_KDE.repeat_interleave(group, 0).flatten(0, 1).T)
    return model
