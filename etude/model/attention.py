"""Attention backends: causal attention for training, paged attention for inference.

Shapes as in `heads`: H query heads, K key/value heads, D head size, V size of a value. Training: T
tokens of all sequences, t of one. Inference: N new tokens of B sequences one after the other, S
tokens of a sequence in all, M cache blocks that hold them, G groups of layers that have their own
blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from etude.model import cudnn_attention
from etude.model.fp8 import Quantised, quantise_kv
from etude.model.recurrence import Recurrence, Span, StateCache
from etude.model.scoring import Scoring, attend_hidden, attend_scored
from etude.model.transformer import ModelConfig

MIN_CONTIGUOUS = 512


class CausalAttention:
    """Causal attention for training, over whole sequences of these `lengths` one after the other,
    which do not see each other. Without lengths: rows [B, T, ..], each a sequence.

    On a CUDA device in bf16 one kernel takes all of them, cuDNN's if it is available and
    FlashAttention's otherwise; elsewhere they are taken one by one.
    """

    latent = False

    def __init__(
        self, lengths: Sequence[int] | None = None, device: torch.device | None = None
    ) -> None:
        self.lengths = tuple(lengths or ())
        # a layer that used `lengths` would be recompiled for every other set of them
        self._packed = lengths is not None
        self._longest = max(self.lengths, default=0)
        self._recurrence: Recurrence | None = None
        borders = [0, *accumulate(self.lengths)]
        # cuDNN sums the gradient of queries in an arbitrary order
        self._cudnn = (
            device is not None
            and not torch.are_deterministic_algorithms_enabled()
            and cudnn_attention.available(device)
        )
        self._borders = torch.tensor(
            cudnn_attention.padded(borders) if self._cudnn else borders,
            dtype=torch.int32,
            device=device,
        )

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        scoring: Scoring | None = None,
    ) -> Tensor:
        if not self._packed:
            flat = CausalAttention([q.shape[1]] * q.shape[0], q.device)
            mixed = flat(layer, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), scale, scoring)
            return mixed.view(*q.shape[:-1], -1)
        if scoring is not None:
            parts = (x.split_with_sizes(list(self.lengths)) for x in (q, k, v))
            rows = zip(*parts, strict=True)
            return torch.cat([attend_scored(a, b, c, scale, scoring) for a, b, c in rows])
        size = q.shape[-1]
        known = size % 8 == 0 and size <= 256  # to FlashAttention
        if known and q.is_cuda and v.dtype in (torch.bfloat16, torch.float16):
            return self._together(q.to(v.dtype), k.to(v.dtype), v, scale)
        return _one_by_one(self.lengths, q, k, v, scale)

    def recurrence(self, shape: torch.Size) -> Recurrence:
        if not self._packed:
            return CausalAttention([shape[1]] * shape[0]).recurrence(shape)
        if self._recurrence is None:  # the same for all layers
            spans = [Span(*ends) for ends in pairwise([0, *accumulate(self.lengths)])]
            self._recurrence = Recurrence(spans)
        return self._recurrence

    def _together(self, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scale: float | None) -> Tensor:
        size = v_TKV.shape[-1]
        borders = self._borders
        longest = self._longest
        if self._cudnn and cudnn_attention.knows(q_THD, v_TKV):
            return cudnn_attention.attend(
                q_THD, k_TKD, v_TKV, borders, longest, scale or size**-0.5
            )
        v_TKD = F.pad(v_TKV, (0, q_THD.shape[-1] - size))  # the kernel wants one size for all
        attend = torch.ops.aten._flash_attention_forward
        mixed_THD: Tensor = attend(
            q_THD, k_TKD, v_TKD, borders, borders, longest, longest, 0.0, True, False, scale=scale
        )[0]
        return mixed_THD.narrow(-1, 0, size)


def _one_by_one(
    lengths: Sequence[int], q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scale: float | None
) -> Tensor:
    # In bf16 the backward pass of a CPU's attention takes five times as long as in fp32.
    dtype = v_TKV.dtype
    if slow := dtype == torch.bfloat16 and not v_TKV.is_cuda:
        q_THD, k_TKD, v_TKV = q_THD.float(), k_TKD.float(), v_TKV.float()
    parts = (torch.split(x.transpose(0, 1), list(lengths), 1) for x in (q_THD, k_TKD, v_TKV))
    with torch.autocast("cpu", enabled=False) if slow else contextlib.nullcontext():
        mixed = [
            F.scaled_dot_product_attention(
                q_HtD[None], k_KtD[None], v_KtV[None], is_causal=True, scale=scale, enable_gqa=True
            )
            for q_HtD, k_KtD, v_KtV in zip(*parts, strict=True)
        ]
    return torch.cat(mixed, 2)[0].transpose(0, 1).to(dtype)


class CachedRows:
    """Keys or values of one layer, in blocks [blocks, block size, K, D]: in the dtype of `like`, or
    in FP8 with a scale for each token and head."""

    def __init__(self, shape: Sequence[int], like: Tensor, fp8: bool) -> None:
        # Zeros, because a position past the end of a sequence gets weight 0, which does not cancel
        # a NaN.
        kind = torch.float8_e4m3fn if fp8 else like.dtype
        self.values = like.new_zeros(shape, dtype=kind)
        self.scales = like.new_zeros(shape[:-1], dtype=torch.float32) if fp8 else None
        self._dtype = like.dtype

    def write(self, slots_N: Tensor, x_NKD: Tensor) -> None:
        if self.scales is None:
            self.values.flatten(0, 1).index_copy_(0, slots_N, x_NKD)
            return
        values, scales = quantise_kv(x_NKD)
        self.values.flatten(0, 1)[slots_N] = values
        self.scales.flatten(0, 1)[slots_N] = scales

    def blocks(self, blocks_M: Tensor) -> Tensor:
        if self.scales is None:
            return self.values.index_select(0, blocks_M)
        return Quantised(self.values[blocks_M], self.scales[blocks_M]).read(self._dtype)

    def slots(self, slots: Tensor) -> Tensor:
        values = self.values.flatten(0, 1)[slots]
        if self.scales is None:
            return values
        return Quantised(values, self.scales.flatten(0, 1)[slots]).read(self._dtype)


class KVCache:
    """Keys and values of many sequences, in blocks of `block_size` tokens. With a latent (MLA) only
    keys are kept, because values are their first part. Recurrent layers keep a state at the end of
    each block instead."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        like: Tensor,
        num_windowed_blocks: int = 0,
        *,
        fp8: bool = False,
    ) -> None:
        """Allocate on the device and in the dtype of `like`, or in FP8. `num_windowed_blocks`:
        blocks of the layers with a window, which then form a second group; 0: all layers form one
        group."""
        self.like = like.new_empty(0)
        self.heads, self.size = config.cached_heads
        self.num_blocks = num_blocks
        self.block_size = block_size
        windowed = config.windowed_layers if num_windowed_blocks else ()
        self.group_of = [int(layer in windowed) for layer in config.cached_layers]
        counts = [(num_blocks, num_windowed_blocks)[group] for group in self.group_of]
        shapes = [(count, block_size, self.heads, self.size) for count in counts]
        self.k = [CachedRows(shape, like, fp8) for shape in shapes]
        self.v = self.k if config.latent else [CachedRows(shape, like, fp8) for shape in shapes]
        self.contiguous: dict[int, ContiguousCache] = {}  # by capacity
        self.states = StateCache(config, num_blocks, like) if config.linear else None

    def gather(self, cached: CachedRows, blocks_M: Tensor, length: int) -> Tensor:
        """First `length` tokens (SKD) of the sequence in these blocks, from one layer's keys or
        values."""
        used_M = blocks_M[: -(-length // self.block_size)]
        return cached.blocks(used_M).flatten(0, 1)[:length]


class ContiguousCache:
    """Contiguous copies of the keys and values of sequences that are decoding.

    Gathering the blocks of a sequence costs as much as attending to them. So a sequence is gathered
    when its answer begins, and from then on every new token is written twice. The rows of one cache
    are attended to together; each has room for `capacity` tokens, so that a long sequence does not
    make short ones pay for its length.
    """

    def __init__(self, cache: KVCache, capacity: int) -> None:
        self._cache = cache
        self.capacity = capacity
        self._num_rows = 0
        self._held: dict[int, tuple[int, int]] = {}  # sequence -> row, tokens in it
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []

    def place(
        self, ids: Sequence[int], lengths: Sequence[int], block_table_GBM: Tensor
    ) -> list[int]:
        """Make sure that all but the newest token of each sequence is in its row. Return the order
        of the sequences in rows 0, 1 and so on."""
        count = len(ids)
        if count > self._num_rows:
            self._grow(2 * count)
        order = [-1] * count  # by row
        newcomers = []
        for place, (id, length) in enumerate(zip(ids, lengths, strict=True)):
            row, held = self._held.get(id, (count, 0))
            if row < count and held == length - 1:
                order[row] = place
            else:
                newcomers.append(place)
        vacant = [row for row, place in enumerate(order) if place < 0]
        for row, place in zip(vacant, newcomers, strict=True):
            order[row] = place
            self._fetch(row, block_table_GBM[:, place], lengths[place] - 1)
        self._held = {ids[place]: (row, lengths[place]) for row, place in enumerate(order)}
        return order

    def _grow(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._held.clear()
        shape = (num_rows, self._cache.heads, self.capacity, self._cache.size)
        like = self._cache.like
        self.k = [like.new_zeros(shape) for _ in self._cache.k]
        self.v = (
            self.k
            if self._cache.v is self._cache.k
            else [like.new_zeros(shape) for _ in self._cache.v]
        )

    def _fetch(self, row: int, blocks_GM: Tensor, length: int) -> None:
        for shelved, cached in {
            id(self.k): (self.k, self._cache.k),
            id(self.v): (self.v, self._cache.v),
        }.values():
            groups = self._cache.group_of
            for to, rows, group in zip(shelved, cached, groups, strict=True):
                found = self._cache.gather(rows, blocks_GM[group], length)
                to[row, :, :length] = found.transpose(0, 1)


class PagedAttention:
    """Paged attention for inference, over the blocks of a `KVCache`. `engine.batch` documents the
    arguments.

    The first `num_decode` sequences have one new token each, and all their earlier tokens were
    written in earlier passes; they are attended to together. The others are taken one by one. The
    model must be given the new tokens in the order `order_N`, which differs slightly from that of
    the batch.
    """

    latent = True

    def __init__(
        self, cache: KVCache, *, ids: Sequence[int], slot_mapping_GN: NDArray[np.int64],
        starts: Sequence[int], lengths: Sequence[int], block_table_GBM: NDArray[np.int64],
        num_decode: int,
    ) -> None:  # fmt: skip
        self._cache = cache
        device = cache.like.device
        blocks = torch.from_numpy(block_table_GBM).to(device)
        count = slot_mapping_GN.shape[1]
        by_capacity: dict[int, list[int]] = {}
        for place, length in enumerate(lengths[:num_decode]):
            by_capacity.setdefault(max(MIN_CONTIGUOUS, 1 << (length - 1).bit_length()), []).append(
                place
            )
        # Drop caches that no sequence needs, to free their memory.
        cache.contiguous = {
            capacity: cache.contiguous.get(capacity) or ContiguousCache(cache, capacity)
            for capacity in by_capacity
        }
        order: list[int] = []
        self._groups: list[_DecodeGroup | _PrefillSequence] = []
        for capacity, places in by_capacity.items():
            shelf = cache.contiguous[capacity]
            own = [lengths[place] for place in places]
            rows = shelf.place([ids[place] for place in places], own, blocks[:, places])
            self._groups.append(_DecodeGroup(shelf, len(order), [own[row] for row in rows]))
            order += [places[row] for row in rows]
        ends = [*starts[1:], count]
        for place in range(num_decode, len(starts)):
            self._groups.append(
                _PrefillSequence(
                    cache, starts[place], ends[place], lengths[place], blocks[:, place]
                )
            )
        self.order_N = np.array([*order, *range(num_decode, count)])
        self._slot_mapping_GN = torch.from_numpy(slot_mapping_GN[:, self.order_N]).to(device)
        self._recurrence: Recurrence | None = None
        if cache.states is not None:
            spans = [
                Span(
                    starts[new],
                    ends[new],
                    lengths[place] - (ends[new] - starts[new]),
                    block_table_GBM[0, place].tolist(),
                    cache.block_size,
                )
                for new, place in enumerate([*order, *range(num_decode, len(starts))])
            ]
            self._recurrence = Recurrence(spans, cache.states)

    def recurrence(self, shape: torch.Size) -> Recurrence:
        assert self._recurrence is not None
        return self._recurrence

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
        slots_N = self._slot_mapping_GN[self._cache.group_of[layer]]
        k.write(slots_N, k_NKD)
        if v is not k:
            v.write(slots_N, v_NKV)
        mixed = [
            group(layer, q_NHD[group.new], k_NKD[group.new], v_NKV[group.new], scale, scoring)
            for group in self._groups
        ]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


class _DecodeGroup:
    """Decoding sequences on the first rows of a contiguous cache, with one new token each."""

    def __init__(self, shelf: ContiguousCache, start: int, lengths: list[int]) -> None:
        self.new = slice(start, start + len(lengths))
        self._shelf = shelf
        self._num_rows = len(lengths)
        self._longest = max(lengths)
        self._shortest = min(lengths)
        heads = shelf.k[0].shape[1]
        lengths_B = np.array(lengths)
        rows_BK = np.arange(len(lengths) * heads).reshape(-1, heads)
        places = (rows_BK * shelf.capacity + lengths_B[:, None] - 1).ravel()
        self._places = torch.from_numpy(places).to(shelf.k[0].device)
        self._last_B = torch.from_numpy(lengths_B - 1).to(shelf.k[0].device)
        self._mask: Tensor | None = None  # added to the scores; built once for all layers
        if self._shortest < self._longest:
            hidden_BS = np.arange(self._longest) >= lengths_B[:, None]
            self._mask = _mask(hidden_BS, shelf.k[0])[:, None, None]

    def __call__(
        self,
        layer: int,
        q_BHD: Tensor,
        k_BKD: Tensor,
        v_BKV: Tensor,
        scale: float | None,
        scoring: Scoring | None,
    ) -> Tensor:
        k, v = self._shelf.k[layer], self._shelf.v[layer]
        k.flatten(0, 2).index_copy_(0, self._places, k_BKD.flatten(0, 1))
        if v is not k:
            v.flatten(0, 2).index_copy_(0, self._places, v_BKV.flatten(0, 1))
        keys, values = (x[: self._num_rows, :, : self._longest] for x in (k, v))
        values = values[..., : v_BKV.shape[-1]]
        if scoring is not None:
            # No row sees further back than the window of the shortest one.
            low = 0 if scoring.window is None else max(0, self._shortest - scoring.window)
            places = torch.arange(low, self._longest, device=k.device)
            hidden = scoring.hides(self._last_B[:, None, None], places)
            keys, values = keys[:, :, low:], values[:, :, low:]
            return attend_hidden(q_BHD.unsqueeze(2), keys, values, hidden, scale, scoring)[:, :, 0]
        # Query heads that share a key head are passed as several queries, so that its keys are read
        # once.
        q_BKGD = q_BHD.view(self._num_rows, k.shape[1], -1, q_BHD.shape[2])
        return F.scaled_dot_product_attention(
            q_BKGD, keys, values, attn_mask=self._mask, scale=scale
        ).flatten(1, 2)


class _PrefillSequence:
    """One sequence with T new tokens, one or more."""

    def __init__(
        self, cache: KVCache, start: int, end: int, length: int, blocks_GM: Tensor
    ) -> None:
        self.new = slice(start, end)
        self._cache = cache
        self._length = length
        self._blocks_GM = blocks_GM
        num_new = end - start
        self._from_the_first = num_new == length
        self._mask: Tensor | None = None
        if 1 < num_new < length:
            self._mask = _mask(
                ~np.tri(num_new, length, length - num_new, dtype=np.bool_), cache.like
            )

    def __call__(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKV: Tensor,
        scale: float | None,
        scoring: Scoring | None,
    ) -> Tensor:
        k, v = k_TKD, v_TKV
        if not self._from_the_first:
            cached_k, cached_v = self._cache.k[layer], self._cache.v[layer]
            blocks_M, length = self._seen(layer, len(q_THD), scoring)
            k = self._cache.gather(cached_k, blocks_M, length)
            v = k if cached_v is cached_k else self._cache.gather(cached_v, blocks_M, length)
            v = v[..., : v_TKV.shape[-1]]
        if scoring is not None:
            return attend_scored(q_THD, k, v, scale, scoring)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k, v))
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self._mask,
            is_causal=self._from_the_first,
            scale=scale,
            enable_gqa=True,
        )
        return mixed[0].transpose(0, 1)

    def _seen(self, layer: int, num_new: int, scoring: Scoring | None) -> tuple[Tensor, int]:
        """The blocks that at least one of the new tokens sees, and the number of tokens they
        hold."""
        blocks_M = self._blocks_GM[self._cache.group_of[layer]]
        if scoring is None or scoring.window is None:
            return blocks_M, self._length
        size = self._cache.block_size
        passed = max(0, self._length - num_new - scoring.window + 1) // size
        return blocks_M[passed:], self._length - passed * size


def _mask(hidden: NDArray[np.bool_], like: Tensor) -> Tensor:
    return torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(like)
