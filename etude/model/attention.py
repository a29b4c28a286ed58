"""How a token sees the tokens before it: the two ways in which one model definition is run.

Shapes as in `transformer`: B rows, T new tokens, H query heads, K key/value heads, D head size; S tokens in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from etude.model.transformer import ModelConfig


class Causal:
    """Training: whole rows at once. Padding stands at the end of a row, so no real token ever sees it."""

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        group = q_BTHD.shape[2] // k_BTKD.shape[2]
        k, v = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (k_BTKD, v_BTKD))
        return F.scaled_dot_product_attention(q_BTHD.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)


class KVCache:
    """Keys and values of up to `rows` sequences of up to `length` tokens."""

    def __init__(self, config: ModelConfig, rows: int, length: int) -> None:
        shape = (config.num_hidden_layers, rows, length, config.num_key_value_heads, config.head_dim)
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)
        self.group = config.num_attention_heads // config.num_key_value_heads

    def read(self, row: int, length: int) -> Tensor:
        """A copy of the first `length` tokens of a row, to be put back by `write`."""
        return torch.stack((self.k[:, row, :length], self.v[:, row, :length]))

    def write(self, row: int, kv: Tensor) -> None:
        length = kv.shape[2]
        self.k[:, row, :length], self.v[:, row, :length] = kv[0], kv[1]

    def move(self, source: int, target: int, length: int) -> None:
        self.write(target, self.read(source, length))


class Cached:
    """Inference: T new tokens at the end of each of B neighbouring rows of the cache, row b starting at `start_B[b]`.

    Rows may carry padding at the end of their T tokens; what it writes into the cache lies past the row's length,
    where no real token looks before a later one has overwritten it. (Padding past the end of the cache is put on its
    last place, which no token of a prompt ever takes.)
    """

    def __init__(self, cache: KVCache, start_B: Tensor, num_new: int, first_row: int = 0) -> None:
        self.cache = cache
        self.positions_BT = (start_B[:, None] + torch.arange(num_new)).clamp_(max=cache.k.shape[2] - 1)
        self._rows = slice(first_row, first_row + len(start_B))
        self._rows_B1 = torch.arange(first_row, first_row + len(start_B))[:, None]
        self._length = int(self.positions_BT.max()) + 1
        visible_BTS = torch.arange(self._length) <= self.positions_BT[:, :, None]
        # Alone and one token at a time, every cached token is visible: no mask, and the same bits as without a batch.
        self._mask_B1TS: Tensor | None = None
        if not bool(visible_BTS.all()):
            # In the form that attention adds to its scores, made once and not in every layer.
            mask_BTS = torch.zeros(visible_BTS.shape).masked_fill_(~visible_BTS, -torch.inf)
            self._mask_B1TS = (mask_BTS if num_new == 1 else mask_BTS.repeat(1, cache.group, 1))[:, None]

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        rows, new, _, size = q_BTHD.shape
        cached_k, cached_v = self.cache.k[layer], self.cache.v[layer]
        cached_k[self._rows_B1, self.positions_BT] = k_BTKD
        cached_v[self._rows_B1, self.positions_BT] = v_BTKD
        k, v = (x[self._rows, : self._length].transpose(1, 2) for x in (cached_k, cached_v))
        # The query heads that share a key head stand in for extra queries, so the cache is read once and never copied.
        kv_heads, group = k.shape[1], self.cache.group
        q_BTKGD = q_BTHD.reshape(rows, new, kv_heads, group, size)
        q = q_BTKGD.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * new, size)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask_B1TS)
        return out.reshape(rows, kv_heads, group, new, size).permute(0, 3, 1, 2, 4).flatten(2, 3)
