"""Expected results of the attention kernels, in plain float64 torch; for `kernel_checks`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from etude.engine.kernels import attention, batch_invariant
from etude.model.fp8 import Quantised, quantise_kv
from tests.engine.kernel_inputs import Inputs, error, rms_norm


def turned(
    x: Tensor, gain: Tensor | None, heads: attention.AttentionLayerConfig, positions: Tensor
) -> Tensor:
    """Rotate heads [N, heads, D] with one row of the table for each token."""
    if heads.rope is None:
        return x.double()
    rope = heads.rope[positions]
    x = x.double() if gain is None else rms_norm(x, gain, 1e-6)
    return x * rope[:, 0].double() + x.roll(x.shape[-1] // 2, -1) * rope[:, 1].double()


def attended(
    q_HD: Tensor, k_SKD: Tensor, v_SKD: Tensor, heads: attention.AttentionLayerConfig
) -> Tensor:
    """Attend the last token of a sequence to all tokens, or to those in its window."""
    group, low = len(q_HD) // k_SKD.shape[1], -(heads.window or len(k_SKD))
    k, v = (x[low:].double().repeat_interleave(group, 1).transpose(0, 1) for x in (k_SKD, v_SKD))
    scores = (q_HD.double()[:, None] @ k.transpose(1, 2)) * heads.scale
    if heads.softcap:
        scores = heads.softcap * torch.tanh(scores / heads.softcap)
    if heads.sinks_H is not None:
        scores = torch.cat((heads.sinks_H.double()[:, None, None], scores), -1)
        v = F.pad(v, (0, 0, 1, 0))
    return torch.softmax(scores, -1).matmul(v)[:, 0]


@dataclass
class Sequences:
    """Sequences of some lengths, their keys and values scattered over blocks in random order."""

    new: Inputs
    lengths: list[int]
    heads: attention.AttentionLayerConfig
    fp8: bool = False
    page_size: int = 16

    def __post_init__(self) -> None:
        blocks = [-(-length // self.page_size) for length in self.lengths]
        order = self.new.shuffled(sum(blocks) + 1)
        shape = (len(order), self.heads.num_kv_heads, self.page_size, self.heads.head_dim)
        self.k, self.v = (self.new.normal(*shape) for _ in "kv")
        if self.fp8:
            self.k, (values, scales) = quantise_kv(self.k), quantise_kv(self.v)
            self.v = Quantised(values.transpose(2, 3).contiguous(), scales)
        self.table = torch.zeros(
            len(blocks), max(*blocks, 1), dtype=torch.int32, device=self.new.device
        )
        self.stride = self.new.ints([self.table.stride(0)])
        for row, count in enumerate(blocks):
            self.table[row, :count] = order[:count]
            order = order[count:]
        if self.fp8:  # the previous content of a sequence's blocks is not read
            used = torch.cat([self.slots(row) for row in range(len(blocks))])
            unused = torch.ones(len(self.k.values), self.page_size, device=self.new.device)
            unused.view(-1)[used] = 0
            for pages in (self.k, self.v):
                pages.scales.masked_fill_(unused[:, None].bool(), math.nan)

    def plain(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values as they are read."""
        if not isinstance(self.k, Quantised):
            return self.k, self.v
        values = Quantised(self.v.values.transpose(2, 3).contiguous(), self.v.scales)
        return self.k.read(dtype), values.read(dtype)

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.transpose(1, 2).flatten(0, 1)[slots.long()] for x in self.plain(torch.float32))
        return k, v

    def written(self, slots: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
        """Errors of the keys and values in these slots; in FP8 the error beyond rounding, and
        values are exact."""
        found_k, found_v = self.at(slots)
        if not isinstance(self.k, Quantised):
            return {"keys": error(found_k, k), "values": error(found_v, v)}
        scales = self.k.scales.transpose(1, 2).flatten(0, 1)[slots.long()][..., None]
        step = torch.maximum(1.1 * k.abs() / 16, scales / 512)
        beyond = ((found_k - k).abs() - step).clamp(min=0)
        values = quantise_kv(v).read(torch.float32)
        return {"keys": float(beyond.norm() / k.norm()), "values": error(found_v, values)}

    def slots(self, row: int) -> Tensor:
        position = torch.arange(self.lengths[row], device=self.new.device)
        return (
            self.table[row, position // self.page_size].long() * self.page_size
            + position % self.page_size
        )


def random_heads(
    new: Inputs, queries: int, keys: int, size: int, normed: bool, positions: int, odd: bool
) -> attention.AttentionLayerConfig:
    """`odd`: with a window, capped scores and sinks, for heads that are already normed and
    rotated."""
    if odd:
        sinks = new.normal(queries)
        return attention.AttentionLayerConfig(
            queries, keys, size, 0.3, 1e-6, None, None, None, 37, 1.5, sinks
        )
    gains = (new.normal(size), new.normal(size)) if normed else (None, None)
    angle = torch.rand(positions, size // 2, device=new.device, generator=new.generator) * 6
    cos, sin = angle.cos(), angle.sin()
    rope = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return attention.AttentionLayerConfig(
        queries, keys, size, size**-0.5, 1e-6, *gains, rope[:, :, None]
    )


def check_decode(
    new: Inputs,
    queries: int,
    keys: int,
    size: int,
    lengths: list[int],
    splits: int,
    odd: bool = False,
    fp8: bool = False,
    page_size: int = 16,
) -> dict[str, float]:
    heads = random_heads(new, queries, keys, size, splits > 1, max(lengths), odd)
    all = Sequences(new, lengths, heads, fp8, page_size)
    rows = len(lengths)
    qkv = new.normal(rows, (queries + 2 * keys) * size)
    slots = new.ints([int(all.slots(row)[-1]) if lengths[row] else 0 for row in range(rows)])
    padded = attention.group_rows(heads)
    splits = attention.SplitKvBuffers(
        splits,
        new.poison(rows * keys * splits * padded * size, dtype=torch.float32),
        new.poison(rows * keys * splits * padded * 2, dtype=torch.float32),
        torch.zeros(rows * keys, dtype=torch.int32, device=new.device),
    )
    out = new.poison(rows, queries * size)
    attention.decode(
        heads,
        qkv,
        all.k,
        all.v,
        all.table,
        all.stride,
        new.ints(lengths),
        slots,
        out,
        splits=splits,
        page_size=all.page_size,
    )
    assert not splits.counter.any()
    real = [row for row in range(rows) if lengths[row]]
    q, k, v = qkv.unflatten(-1, (-1, size)).split((queries, keys, keys), 1)
    last = torch.tensor([lengths[row] - 1 for row in range(rows)], device=new.device)
    q, k = (turned(x, gain, heads, last) for x, gain in ((q, heads.q_gain_D), (k, heads.k_gain_D)))
    found = all.written(slots[real], k[real], v[real])
    expected = [attended(q[row], *all.at(all.slots(row)), heads) for row in real]
    return found | {"attention": error(out[real], torch.stack(expected).flatten(1))}


def check_prefill(
    new: Inputs,
    queries: int,
    keys: int,
    size: int,
    lengths: list[int],
    fresh: list[int],
    odd: bool = False,
    fp8: bool = False,
    page_size: int = 16,
) -> dict[str, float]:
    """`fresh`: the number of new tokens at the end of each sequence."""
    heads = random_heads(new, queries, keys, size, True, max(lengths), odd)
    all = Sequences(new, lengths, heads, fp8, page_size)
    starts = [sum(fresh[:row]) for row in range(len(fresh))]
    ends = [start + count for start, count in zip(starts, fresh, strict=True)]
    positions = torch.cat([torch.arange(n - f, n) for n, f in zip(lengths, fresh, strict=True)]).to(
        new.device
    )
    slots = torch.cat([all.slots(row)[-f:] for row, f in enumerate(fresh)])
    nobody = torch.full((3,), -1, device=new.device)
    qkv = new.normal(sum(fresh) + 3, (queries + 2 * keys) * size)
    q, k, v = qkv[:-3].clone().unflatten(-1, (-1, size)).split((queries, keys, keys), 1)
    attention.write(
        heads,
        qkv,
        all.k,
        all.v,
        F.pad(positions, (0, 3)).int(),
        torch.cat((slots, nobody)).int(),
        page_size=all.page_size,
    )
    step = attention.tile_tokens(heads)
    tiles = [
        (row, first) for row in range(len(fresh)) for first in range(starts[row], ends[row], step)
    ]
    tiles += [(0, ends[0])]  # an empty one
    kinds = [attention.prefill] if odd else [attention.prefill, batch_invariant.prefill]
    outs = [new.poison(sum(fresh), queries * size) for _ in kinds]
    found: dict[str, float] = {}
    for prefill, out in zip(kinds, outs, strict=True):
        given = all.table, all.stride, new.ints(ends), new.ints(lengths)
        rest = *given, *new.ints(tiles).T.contiguous()
        prefill(heads, qkv, all.k, all.v, *rest, out, page_size=all.page_size)
        if fp8:
            same = torch.empty_like(out)
            prefill(heads, qkv, *all.plain(new.dtype), *rest, same, page_size=all.page_size)
            found[f"as read {len(found)}"] = error(out, same)
            # Scales are powers of 2, so multiplying by them sooner or later changes no bit. With a
            # window FP8 begins at other tokens.
            assert new.device == "cpu" or odd or torch.equal(out, same)
    q, k = (turned(x, g, heads, positions) for x, g in ((q, heads.q_gain_D), (k, heads.k_gain_D)))
    expected = [
        attended(
            q[n],
            *all.at(all.slots(row)[: int(positions[n]) + 1]),
            heads,
        )
        for row in range(len(fresh))
        for n in range(starts[row], ends[row])
    ]
    reference = torch.stack(expected).flatten(1)
    found |= all.written(slots, k, v)
    return found | {f"attention {number}": error(out, reference) for number, out in enumerate(outs)}
