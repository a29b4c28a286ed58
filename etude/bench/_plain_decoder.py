"""A plain but fast PyTorch decoder as the baseline for the trainer of dense models.

It has compiled layers in bf16, torch's own attention on whole rows, cross entropy in chunks, and
fused AdamW on the bf16 weights. It learns nothing sensible and checks nothing.

Shapes: B rows, T tokens in each, N tokens in all, E hidden size, H query heads, K key heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etude.model.config import ModelConfig
from etude.train.flops import BACKWARD_COST, forward_flops

HEAD_TOKENS = 8192


class Layer(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        heads = c.num_attention_heads
        keys = c.num_key_value_heads
        self.before = nn.RMSNorm(c.hidden_size)
        self.between = nn.RMSNorm(c.hidden_size)
        self.q_norm = nn.RMSNorm(c.head_dim)
        self.k_norm = nn.RMSNorm(c.head_dim)
        self.qkv = nn.Linear(c.hidden_size, (heads + 2 * keys) * c.head_dim, bias=False)
        self.out = nn.Linear(heads * c.head_dim, c.hidden_size, bias=False)
        self.gate_up = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x_BTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, (rows, length, _) = self.c, x_BTE.shape
        heads = self.qkv(self.before(x_BTE)).view(rows, length, -1, c.head_dim)
        q, k, v = heads.split(
            [c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads], 2
        )
        q, k = (_turned(x, cos, sin).to(v.dtype) for x in (self.q_norm(q), self.k_norm(k)))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BTE = x_BTE + self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        gate, up = self.gate_up(self.between(x_BTE)).chunk(2, -1)
        return x_BTE + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Decoder(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed(tokens_BT)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]


def _loss(hidden_NE: Tensor, head_VE: Tensor, tokens_N: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_NE, head_VE).float(), tokens_N, reduction="sum")


def steps(c: ModelConfig, rows: int, length: int) -> Callable[[], tuple[int, float]]:
    """Return a function that takes one step and returns its number of tokens and of FLOPs."""
    with torch.device("cuda"):
        model = Decoder(c).to(torch.bfloat16)
        places, speeds = (
            torch.arange(length).float(),
            torch.arange(0, c.head_dim, 2).float() / c.head_dim,
        )
        angles = torch.outer(places, c.rope_theta**-speeds).repeat(1, 2)[:, None]
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    for layer in model.layers:
        layer.compile()
    loss, optimizer = torch.compile(_loss), torch.optim.AdamW(model.parameters(), 1e-5, fused=True)

    def step() -> tuple[int, float]:
        tokens_BT = torch.randint(0, c.vocab_size, (rows, length), device="cuda")
        hidden_NE = model(tokens_BT, cos, sin).flatten(0, 1)
        leaf_NE = hidden_NE.detach().requires_grad_()
        parts = (torch.split(x, HEAD_TOKENS) for x in (leaf_NE, tokens_BT.flatten()))
        for hidden, tokens in zip(*parts, strict=True):
            torch.autograd.backward(loss(hidden, model.head.weight, tokens) / (rows * length))
        torch.autograd.backward(hidden_NE, leaf_NE.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return rows * length, rows * (1 + BACKWARD_COST) * forward_flops(c, length, length)

    return step
