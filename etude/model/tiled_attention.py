"""Batch-invariant attention: every token's sums are taken in the same way, whatever else is in the
batch.

Queries are taken in tiles of a few tokens, keys and values in tiles of `KEYS` tokens from the first
one on. A product of two tiles always has the same shape, and so the same kernel; sums over the
tiles of keys are taken in order. Keys that a query does not see get weight 0, which changes no sum,
so their number does not matter. `TiledCausalAttention` and `TiledPagedAttention` differ only in
where the keys are. Both take the latent of an MLA layer, not the expanded heads.

Shapes as in `attention`, and U tiles, W tokens of a tile of queries, J of a tile of keys, S tokens
of the longest sequence rounded up to whole tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from etude.model.attention import CausalAttention, KVCache
from etude.model.numerics import INVARIANT, value_of
from etude.model.scoring import Scoring

KEYS = 64
QUERIES = 16
"""Rows of a tile of queries: this many pairs of a token and a head of a group, or one token with
all its heads."""

PRODUCTS = 64

Ints = NDArray[np.int64]
Slots = Callable[[Tensor], Tensor]
"""Keys or values of all heads at the given slots."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of query tokens, and the slots of the keys that they see. The last tile of a sequence
    is padded with tokens that are not real."""

    tokens_UW: Tensor
    real_UW: Tensor
    positions_UW: Tensor
    hidden_UWS: Tensor
    slot_mapping_US: Tensor

    @classmethod
    def lay_out(
        cls,
        *,
        starts_B: Ints,
        ends_B: Ints,
        lengths_B: Ints,
        slot_mapping_BS: Ints,
        width: int,
        device: torch.device | None,
    ) -> Tiles:
        """Tokens `starts_B` to `ends_B` are the last ones of sequences of `lengths_B` tokens."""
        tiles = [
            (b, first)
            for b, (s, e) in enumerate(zip(starts_B, ends_B, strict=True))
            for first in range(s, e, width)
        ]
        sequence_U, first_U = np.array(tiles).T
        tokens_UW = first_U[:, None] + np.arange(width)
        real_UW = tokens_UW < ends_B[sequence_U, None]
        positions_UW = (lengths_B - ends_B)[sequence_U, None] + tokens_UW
        arrays = (
            np.where(real_UW, tokens_UW, first_U[:, None]),
            real_UW,
            positions_UW,
            np.arange(slot_mapping_BS.shape[1]) > positions_UW[:, :, None],
            slot_mapping_BS[sequence_U],
        )
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


def attend_in_tiles(
    tiles: Tiles,
    scale: float,
    q_NHD: Tensor,
    k: Slots,
    v: Slots,
    groups: int,
    scoring: Scoring | None = None,
) -> Tensor:
    """Attention in float32, whatever the dtype: the result is rounded once. `groups`: number of key
    heads."""
    num_tiles, width = tiles.tokens_UW.shape
    heads = q_NHD.shape[1]

    def tile(x: Slots, slots_UJ: Tensor) -> Tensor:
        return x(slots_UJ).transpose(1, 2).flatten(0, 1).float()

    q_UKWGD = (
        q_NHD[tiles.tokens_UW].view(num_tiles, width, groups, -1, q_NHD.shape[-1]).transpose(1, 2)
    )
    q = q_UKWGD.reshape(num_tiles * groups, -1, q_NHD.shape[-1]).float()
    places = torch.split(tiles.slot_mapping_US, KEYS, 1)
    scores = (
        torch.cat([products(q, tile(k, slots_UJ).transpose(1, 2)) for slots_UJ in places], -1)
        * scale
    )
    scores_UKWGS = scores.view(num_tiles, groups, width, heads // groups, -1)
    weights = _weights(tiles, scores_UKWGS, scoring)
    mixed = torch.zeros((), device=q.device)
    for part, slots_UJ in zip(
        torch.split(weights.view(scores.shape), KEYS, -1), places, strict=True
    ):
        mixed = mixed + products(part, tile(v, slots_UJ))
    mixed_UWHV = (
        mixed.view(num_tiles, groups, width, heads // groups, -1).transpose(1, 2).flatten(2, 3)
    )
    return mixed_UWHV[tiles.real_UW].to(q_NHD.dtype)


def _weights(tiles: Tiles, scores_UKWGS: Tensor, scoring: Scoring | None) -> Tensor:
    hidden_UWS = tiles.hidden_UWS
    if scoring is None:
        return shares(scores_UKWGS.masked_fill(hidden_UWS[:, None, :, None], -torch.inf))
    places_S = torch.arange(scores_UKWGS.shape[-1], device=scores_UKWGS.device)
    hidden_UWS = scoring.hides(tiles.positions_UW, places_S)
    if (cap := scoring.softcap) is not None:
        scores_UKWGS = cap * INVARIANT.tanh(scores_UKWGS / cap)
    scores_UKWGS = scores_UKWGS.masked_fill(hidden_UWS[:, None, :, None], -torch.inf)
    if (sinks_H := scoring.sinks_H) is None:
        return shares(scores_UKWGS)
    # A separate tile in front, so that the keys keep the positions that they have without sinks.
    groups, each = scores_UKWGS.shape[1], scores_UKWGS.shape[3]
    sinks_KGJ = F.pad(sinks_H.float().view(groups, each, 1), (0, KEYS - 1), value=-torch.inf)
    sinks = sinks_KGJ[None, :, None].expand(*scores_UKWGS.shape[:-1], KEYS)
    return shares(torch.cat((sinks, scores_UKWGS), -1))[..., KEYS:].contiguous()


def products(a: Tensor, b: Tensor) -> Tensor:
    """`torch.bmm` with a fixed number of products and a fixed layout, because its kernel on CUDA
    depends on both."""
    if not a.is_cuda:
        return torch.bmm(a, b)
    padded = (
        torch.split(F.pad(x, (0, 0, 0, 0, 0, -len(x) % PRODUCTS)).contiguous(), PRODUCTS)
        for x in (a, b)
    )
    return torch.cat([torch.bmm(*pair) for pair in zip(*padded, strict=True)])[: len(a)]


def shares(scores: Tensor) -> Tensor:
    """Softmax over the last axis, a multiple of `KEYS`, in which scores of -inf at the end change
    nothing. On a CPU the library's softmax has this property; on CUDA the order of its sum depends
    on the length."""
    if not scores.is_cuda:
        return torch.softmax(scores, -1)
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    total = torch.zeros((), device=scores.device)
    for part in torch.split(powers, KEYS, -1):
        while part.shape[-1] > 1:
            part = part[..., 0::2] + part[..., 1::2]
        total = total + part
    return powers / total


def tokens_of_a_tile(num_heads: int, num_keys: int) -> int:
    return max(1, QUERIES // (num_heads // num_keys))


class TiledCausalAttention:
    """Attention for training: whole sequences of these `lengths` one after the other."""

    latent = True

    def __init__(self, lengths: Sequence[int], device: torch.device | None = None) -> None:
        self.lengths = lengths
        self._device = device
        self._plain = CausalAttention(lengths, device)
        self._tiles: Tiles | None = None  # the same for all layers

    def __call__(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKV: Tensor,
        scale: float | None = None,
        scoring: Scoring | None = None,
    ) -> Tensor:
        if self._tiles is None:
            self._tiles = self._lay_out(tokens_of_a_tile(q_THD.shape[1], k_TKD.shape[1]))
        tiles = self._tiles
        factor = scale or q_THD.shape[-1] ** -0.5
        return value_of(
            lambda: attend_in_tiles(
                tiles, factor, q_THD, k_TKD.__getitem__, v_TKV.__getitem__, k_TKD.shape[1], scoring
            ),
            gradient_of=lambda: self._plain(layer, q_THD, k_TKD, v_TKV, scale, scoring),
        )

    def _lay_out(self, width: int) -> Tiles:
        lengths_B = np.array(self.lengths)
        ends_B = lengths_B.cumsum()
        places_S = np.arange(-(-int(lengths_B.max()) // KEYS) * KEYS)
        return Tiles.lay_out(
            starts_B=ends_B - lengths_B,
            ends_B=ends_B,
            lengths_B=lengths_B,
            width=width,
            device=self._device,
            slot_mapping_BS=(ends_B - lengths_B)[:, None]
            + places_S.clip(max=lengths_B[:, None] - 1),
        )


class TiledPagedAttention:
    """Attention for inference, over the blocks of a `KVCache`. `engine.batch` documents the
    arguments."""

    latent = True

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        *,
        slot_mapping_GN: Ints,
        starts_B: Ints,
        lengths_B: Ints,
        block_table_GBM: Ints,
    ) -> None:
        self._cache = cache
        device = cache.like.device
        size = cache.block_size
        self._slot_mapping_GN = torch.from_numpy(slot_mapping_GN).to(device)
        # Slots past the end of a sequence are hidden from it.
        places_S = np.arange(-(-int(lengths_B.max()) // KEYS) * KEYS).clip(
            max=block_table_GBM.shape[2] * size - 1
        )
        self._tiles = [
            Tiles.lay_out(
                starts_B=starts_B,
                ends_B=np.append(starts_B[1:], slot_mapping_GN.shape[1]),
                lengths_B=lengths_B,
                slot_mapping_BS=block_table_BM[:, places_S // size] * size + places_S % size,
                width=tokens_of_a_tile(num_heads, cache.heads),
                device=device,
            )
            for block_table_BM in block_table_GBM
        ]

    def __call__(
        self,
        layer: int,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKV: Tensor,
        scale: float | None = None,
        scoring: Scoring | None = None,
    ) -> Tensor:
        k, v = self._cache.k[layer], self._cache.v[layer]
        group = self._cache.group_of[layer]
        k.write(self._slot_mapping_GN[group], k_NKD)
        if v is not k:
            v.write(self._slot_mapping_GN[group], v_NKV)

        def values(slots: Tensor) -> Tensor:
            return v.slots(slots)[..., : v_NKV.shape[-1]]

        tiles = self._tiles[group]
        factor = scale or q_NHD.shape[-1] ** -0.5
        return attend_in_tiles(tiles, factor, q_NHD, k.slots, values, k_NKD.shape[1], scoring)
