"""Attention over paged keys and values.

`decode` does everything between the projections for one new token of each sequence: q/k norm,
rotary positions, the write of the new key and value, and attention over the cache. One program
takes all query heads of a key head, and one split of the sequence (split-KV, as in flash-decoding);
the last program of a sequence merges its splits, so it remains one kernel. `write` and `prefill` do
the same in two kernels for chunks of prompts.

Shapes: B sequences, N new tokens, H query heads, K key/value heads, G = H / K, D head size, P
positions, T tiles. `pages` defines the layout of keys and values. A row of qkv is q, then k, then
v. The rows of the block table `blocks` are `stride` apart; the stride is read from memory, so that
a captured graph works for any width.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as gpu

from etude.engine.kernels.pages import Pages, mix, pointers, read, row_of, scores, store_fp8

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rotated(
    row, gain, turn, inside, eps, D: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr = True
):
    """Normalise and rotate heads [.., D] whose pointers are `row`; `turn` points at the position's
    row of the table: cosines, then sines with the sign that swapping the halves needs. Without TURN
    both were done earlier."""
    d = tl.arange(0, D)[None, :]
    if not TURN:
        return tl.load(row + d, mask=inside, other=0).to(tl.float32)
    # The other half of the pair is loaded a second time, which is cheaper than moving it between
    # threads.
    other = (d + D // 2) % D
    value = tl.load(row + d, mask=inside, other=0).to(tl.float32)
    partner = tl.load(row + other, mask=inside, other=0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value = (
            (value * scale * tl.load(gain + d).to(tl.float32))
            .to(row.dtype.element_ty)
            .to(tl.float32)
        )
        partner = (
            (partner * scale * tl.load(gain + other).to(tl.float32))
            .to(row.dtype.element_ty)
            .to(tl.float32)
        )
    cos, sin = (
        tl.load(turn + d).to(row.dtype.element_ty),
        tl.load(turn + D + d).to(row.dtype.element_ty),
    )
    return value * cos.to(tl.float32) + partner * sin.to(tl.float32)


@triton.jit
def _capped(score, CAP: tl.constexpr):
    """Bend scores, which are multiples of log2(e), to stay below CAP; 0: leave them unchanged."""
    if CAP > 0:
        score = (CAP * LOG2E) * (2 * tl.sigmoid(score * (2 / (CAP * LOG2E))) - 1)
    return score


@triton.jit
def _see(
    q, k, v, k_scale, v_scale, visible, top, total, acc, WINDOW: tl.constexpr, CAP: tl.constexpr
):
    """Online softmax over one more block of tokens."""
    score = tl.where(visible, _capped(scores(q, k, k_scale), CAP), -float("inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    if WINDOW > 0:  # a row may see none of the first blocks
        new_top = tl.maximum(new_top, -1e30)
    p = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    acc = mix(q, p, v, v_scale, acc * shrink[:, None])
    return new_top, total * shrink + tl.sum(p, 1), acc


@triton.jit
def _first(low, cache, BLOCK: tl.constexpr):
    """The position to begin at for the tokens from `low` on: see `pages.read`."""
    if cache.dtype.element_ty == tl.float8e4nv:
        low = low // BLOCK * BLOCK
    return low


@triton.jit
def _seen(position, low, end, cache):
    seen = position < end
    if cache.dtype.element_ty == tl.float8e4nv:
        seen = seen & (position >= low)
    return seen


@triton.jit
def _attend(
    q, k_cache, v_cache, k_scales, v_scales, table, kh, low, start, end, limit, top, total, acc,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Attend to the tokens start .. end, except those before `low`; `limit` is the last position
    that each row sees."""
    for first in range(start, end, BLOCK):
        position = first + tl.arange(0, BLOCK)
        seen = _seen(position, low, end, k_cache)
        k, v, k_scale, v_scale = read(
            k_cache, v_cache, k_scales, v_scales, table, first, end, seen, kh, K, PAGE, D, BLOCK
        )
        visible = seen[None, :] & (position[None, :] <= limit[:, None])
        if WINDOW > 0:
            visible &= position[None, :] > limit[:, None] - WINDOW
        top, total, acc = _see(q, k, v, k_scale, v_scale, visible, top, total, acc, WINDOW, CAP)
    return top, total, acc


@triton.jit
def _merge(
    out, part, stats, counter, sequence, kh, s, used, top, total, acc, H: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store the result of this split; the last program of a sequence merges all of them, in a fixed
    order."""
    g, d = tl.arange(0, GP), tl.arange(0, D)
    inside = (g < G)[:, None]
    group = sequence * K + kh
    mine = (group * SPLITS + s) * GP + g
    tl.store(part + mine[:, None] * D + d[None, :], acc, mask=inside)
    tl.store(stats + mine * 2, top)
    tl.store(stats + mine * 2 + 1, total)
    tl.debug_barrier()
    if tl.atomic_add(counter + group, 1, sem="acq_rel") == used - 1:
        top = tl.full([GP], -float("inf"), tl.float32)
        total = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, D], tl.float32)
        end = (group * SPLITS + used) * GP
        for first in range(0, used, 4):
            for ahead in tl.static_range(4):  # so that their loads overlap
                theirs = (group * SPLITS + first + ahead) * GP + g
                there = theirs < end
                # .cg: the first-level cache of this multiprocessor does not have what others wrote.
                their_top = tl.load(
                    stats + theirs * 2, mask=there, other=-float("inf"), cache_modifier=".cg"
                )
                their_total = tl.load(
                    stats + theirs * 2 + 1, mask=there, other=0, cache_modifier=".cg"
                )
                their_acc = tl.load(
                    part + theirs[:, None] * D + d[None, :], mask=inside & there[:, None], other=0,
                    cache_modifier=".cg",
                )  # fmt: skip
                new_top = tl.maximum(top, their_top)
                my_scale, their_scale = tl.exp2(top - new_top), tl.exp2(their_top - new_top)
                total = total * my_scale + their_total * their_scale
                acc = acc * my_scale[:, None] + their_acc * their_scale[:, None]
                top = new_top
        place = (sequence * H + kh * G + g)[:, None] * D + d[None, :]
        tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
        tl.store(counter + group, 0)


@triton.jit
def _sunk(sinks, head, inside, ROWS: tl.constexpr, SINKS: tl.constexpr):
    """The initial state of each row's softmax: empty, or the sink score of its head, which
    contributes nothing."""
    if SINKS:
        top = tl.load(sinks + head, mask=inside, other=0).to(tl.float32) * LOG2E
        return top, tl.full([ROWS], 1.0, tl.float32)
    return tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def _newest(
    q, row, k_gain, turn, sinks, k_cache, v_cache, k_scales, v_scales, slot, kh, eps,
    H: tl.constexpr, K: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, TURN: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Write the key and value of the new token, and start the softmax with it and with the sink."""
    g, d = tl.arange(0, GP), tl.arange(0, D)
    one = tl.arange(0, 1)[:, None] * D
    k = _rotated(row + (H + kh) * D + one, k_gain, turn, one >= 0, eps, D, NORM, TURN)
    k = k.to(row.dtype.element_ty)
    v = tl.load(row + (H + K + kh) * D + d)
    number = row_of(slot, kh, K, PAGE)
    if k_cache.dtype.element_ty == tl.float8e4nv:
        numbers = number + tl.arange(0, 1)
        k = store_fp8(k, k_cache, k_scales, numbers, numbers >= 0, PAGE, D, False)
        v = tl.reshape(v, [1, D])
        v = store_fp8(v, v_cache, v_scales, numbers, numbers >= 0, PAGE, D, True)
        v = tl.reshape(v, [D])
    else:
        tl.store(k_cache + number * D + one + d[None, :], k)
        tl.store(v_cache + number * D + d, v)
    top = _capped(tl.sum(q.to(tl.float32) * k.to(tl.float32), 1), CAP)
    total = tl.full([GP], 1.0, tl.float32)
    acc = tl.zeros([GP, D], tl.float32) + v.to(tl.float32)[None, :]
    if SINKS:
        own = top
        sink, _ = _sunk(sinks, kh * (H // K) + g, g < H // K, GP, SINKS)
        top = tl.maximum(own, sink)
        total = tl.exp2(own - top) + tl.exp2(sink - top)
        acc *= tl.exp2(own - top)[:, None]
    return top, total, acc


@triton.jit
def _decode(
    qkv, q_gain, k_gain, rope, sinks, k_cache, v_cache, k_scales, v_scales, table, lengths, slots,
    out, part, stats, counter, stride, scale, eps, H: tl.constexpr, K: tl.constexpr,
    GP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kh, sequence, s = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    G: tl.constexpr = H // K
    past = tl.load(lengths + sequence) - 1
    low = past * 0
    if WINDOW > 0:
        low = tl.maximum(past - WINDOW + 1, 0)
    begin = _first(low, k_cache, BLOCK)
    piece = tl.cdiv(tl.cdiv(past - begin, SPLITS), BLOCK) * BLOCK
    used = tl.maximum(tl.cdiv(past - begin, tl.maximum(piece, 1)), 1)
    start, end = begin + s * piece, tl.minimum(past, begin + (s + 1) * piece)
    mine = table + sequence * tl.load(stride)
    if AHEAD:
        # Older tokens are already in the cache: their loads overlap with the projection.
        seen = _seen(start + tl.arange(0, BLOCK), low, end, k_cache)
        k, v, k_scale, v_scale = read(
            k_cache, v_cache, k_scales, v_scales, mine, start, end, seen, kh, K, PAGE, D, BLOCK
        )
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    if (past < 0) | (s >= used):  # padding, or a sequence too short for all splits
        return
    g, d = tl.arange(0, GP), tl.arange(0, D)
    inside = (g < G)[:, None]
    row = qkv + sequence * (H + 2 * K) * D
    turn = rope + past.to(tl.int64) * (2 * D)
    q = _rotated(row + (kh * G + g)[:, None] * D, q_gain, turn, inside, eps, D, NORM, TURN)
    q = (q.to(qkv.dtype.element_ty).to(tl.float32) * scale * LOG2E).to(qkv.dtype.element_ty)
    top, total = tl.full([GP], -float("inf"), tl.float32), tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, D], tl.float32)
    if s == 0:
        top, total, acc = _newest(
            q, row, k_gain, turn, sinks, k_cache, v_cache, k_scales, v_scales,
            tl.load(slots + sequence), kh, eps, H, K, GP, D, PAGE, NORM, TURN, CAP, SINKS,
        )  # fmt: skip
    if AHEAD:  # noqa: SIM102 (AHEAD is known to the compiler, the next condition is not)
        if start < end:
            visible = seen[None, :]
            top, total, acc = _see(q, k, v, k_scale, v_scale, visible, top, total, acc, 0, CAP)
            start += BLOCK
    everything = tl.full([GP], 2147483647, tl.int32)
    top, total, acc = _attend(
        q, k_cache, v_cache, k_scales, v_scales, mine, kh, low, start, end, everything, top, total,
        acc, K, D, PAGE, BLOCK, 0, CAP,
    )  # fmt: skip
    if SPLITS == 1:
        place = (sequence * H + kh * G + g)[:, None] * D + d[None, :]
        tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        _merge(
            out, part, stats, counter, sequence, kh, s, used, top, total, acc, H, K, G, GP, D,
            SPLITS,
        )  # fmt: skip


@triton.jit
def _write(
    qkv, q_gain, k_gain, rope, k_cache, v_cache, k_scales, v_scales, positions, slots, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, TURN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token: rotate q in place, and write k and v to the cache."""
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, D)[None, :]
    position, slot = tl.load(positions + n).to(tl.int64), tl.load(slots + n)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    if slot < 0:  # padding
        return
    row = qkv + n * (H + 2 * K) * D + head[:, None] * D
    turn = rope + position * (2 * D)
    is_q, is_k, is_v = head < H, (head >= H) & (head < H + K), (head >= H + K) & (head < H + 2 * K)
    if TURN and tl.program_id(1) * HEADS < H:
        q = _rotated(row, q_gain, turn, is_q[:, None], eps, D, NORM)
        tl.debug_barrier()  # two threads read a head's halves, which are only written now
        tl.store(row + d, q.to(qkv.dtype.element_ty), mask=is_q[:, None])
    if tl.program_id(1) * HEADS + HEADS > H:
        k = _rotated(row, k_gain, turn, is_k[:, None], eps, D, NORM, TURN)
        k = k.to(qkv.dtype.element_ty)
        v = tl.load(row + d, mask=is_v[:, None])
        k_row, v_row = row_of(slot, head - H, K, PAGE), row_of(slot, head - H - K, K, PAGE)
        if k_cache.dtype.element_ty == tl.float8e4nv:
            store_fp8(k, k_cache, k_scales, k_row, is_k, PAGE, D, False)
            store_fp8(v, v_cache, v_scales, v_row, is_v, PAGE, D, True)
        else:
            tl.store(k_cache + (k_row * D)[:, None] + d, k, mask=is_k[:, None])
            tl.store(v_cache + (v_row * D)[:, None] + d, v, mask=is_v[:, None])


@triton.jit
def _prefill(
    qkv, sinks, k_cache, v_cache, k_scales, v_scales, table, ends, lengths, tile_sequence,
    tile_first, out, stride, scale, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS (token, query head) pairs of one key head; `ends` has the end of each sequence's new
    tokens."""
    tile, kh = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = H // K
    sequence = tl.load(tile_sequence + tile).to(tl.int64)
    end, length = tl.load(ends + sequence), tl.load(lengths + sequence)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    if tl.load(tile_first + tile) >= end:  # padding
        return
    r, d = tl.arange(0, ROWS), tl.arange(0, D)
    n = tl.load(tile_first + tile) + r // G
    head = kh * G + r % G
    inside = (n < end)[:, None]
    position = length - end + n
    q = tl.load(
        qkv + n[:, None].to(tl.int64) * ((H + 2 * K) * D) + head[:, None] * D + d[None, :],
        mask=inside,
        other=0,
    )
    q = (q.to(tl.float32) * scale * LOG2E).to(q.dtype)
    last = tl.minimum(length, tl.max(position) + 1)
    low = last * 0
    if WINDOW > 0:
        low = tl.maximum(tl.min(position) - WINDOW + 1, 0)
    top, total = _sunk(sinks, head, n < end, ROWS, SINKS)
    top, total, acc = _attend(
        q, k_cache, v_cache, k_scales, v_scales, table + sequence * tl.load(stride), kh, low,
        _first(low, k_cache, BLOCK), last, tl.maximum(position, 0), top, total,
        tl.zeros([ROWS, D], tl.float32), K, D, PAGE, BLOCK, WINDOW, CAP,
    )  # fmt: skip
    place = (n[:, None].to(tl.int64) * H + head[:, None]) * D + d[None, :]
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class AttentionLayerConfig:
    """The attention parameters of one layer: head counts and size, softmax scale, q and k norms
    (None if it has none), and the rotary table [P, 2, 1, D]; None: queries and keys are already
    normed and rotated. Window, cap and sinks as in `model.scoring`."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    eps: float
    q_gain_D: Tensor | None
    k_gain_D: Tensor | None
    rope: Tensor | None
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SplitKvBuffers:
    """Scratch buffers of split-KV decoding: the partial outputs and softmax statistics of programs
    that share a sequence. `counter` is 0 between two kernels."""

    splits: int
    part: Tensor
    stats: Tensor
    counter: Tensor


def num_splits(rows: int, keys: int, processors: int = 132) -> int:
    """The number of KV splits that gives every multiprocessor four programs, up to 16."""
    return max(1, min(16, int(triton.next_power_of_2(4 * processors // (rows * keys)))))


def group_rows(params: AttentionLayerConfig) -> int:
    """Query heads of a key head, padded to the minimum of 16 rows that tensor cores take."""
    return max(16, int(triton.next_power_of_2(params.num_q_heads // params.num_kv_heads)))


def decode(
    params: AttentionLayerConfig, qkv: Tensor, k: Pages, v: Pages, blocks: Tensor, stride: Tensor,
    lengths_B: Tensor, slot_mapping_B: Tensor, out: Tensor, *, splits: SplitKvBuffers,
    page_size: int, pdl: bool = False,
) -> None:  # fmt: skip
    """Decode attention: one new token of each sequence, whose key and value go to `slot_mapping_B`;
    `lengths_B` includes it, and 0 is an empty row."""
    given = _given(qkv, params.q_gain_D, params.k_gain_D, params.rope, params.sinks_H)
    # measured: with many programs, small ones are faster
    warps = 2 if len(lengths_B) * params.num_kv_heads > 1024 else 4
    _decode[(params.num_kv_heads, len(lengths_B), splits.splits)](
        qkv, *given, *pointers(k, v), blocks, lengths_B, slot_mapping_B, out, splits.part,
        splits.stats, splits.counter, stride, params.scale, params.eps, params.num_q_heads,
        params.num_kv_heads, group_rows(params), params.head_dim, page_size, 16 * warps,
        splits.splits, splits.splits > 1, params.q_gain_D is not None, params.rope is not None,
        params.window or 0, params.softcap or 0.0, params.sinks_H is not None, pdl,
        num_warps=warps, num_stages=_stages(params), launch_pdl=pdl,
    )  # fmt: skip


def _given(instead: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Replace missing tensors, because a kernel takes a pointer even if it does not read it."""
    return [instead if tensor is None else tensor for tensor in tensors]


def _stages(params: AttentionLayerConfig) -> int:
    """Blocks of keys and values in flight: as many as fit at once."""
    return 3 if params.head_dim <= 128 else 2


def write(
    params: AttentionLayerConfig,
    qkv: Tensor,
    k: Pages,
    v: Pages,
    positions_N: Tensor,
    slot_mapping_N: Tensor,
    *,
    page_size: int,
    pdl: bool = False,
) -> None:
    """Rotate q in place, and write k and v of the new tokens to the cache."""
    given = _given(qkv, params.q_gain_D, params.k_gain_D, params.rope)
    _write[(len(positions_N), triton.cdiv(params.num_q_heads + 2 * params.num_kv_heads, 8))](
        qkv, *given, *pointers(k, v), positions_N, slot_mapping_N, params.eps, params.num_q_heads,
        params.num_kv_heads, params.head_dim, page_size, 8, params.q_gain_D is not None,
        params.rope is not None, pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip


PREFILL_ROWS = 64


def tile_tokens(params: AttentionLayerConfig) -> int:
    """New tokens of one tile of `prefill`."""
    return PREFILL_ROWS // (params.num_q_heads // params.num_kv_heads)


def prefill(
    params: AttentionLayerConfig, qkv: Tensor, k: Pages, v: Pages, blocks: Tensor, stride: Tensor,
    ends_B: Tensor, lengths_B: Tensor, sequence_T: Tensor, first_T: Tensor, out: Tensor, *,
    page_size: int, pdl: bool = False,
) -> None:  # fmt: skip
    """Prefill attention: several new tokens of each sequence, already written to the cache. Tile t
    is `tile_tokens` tokens of sequence_T[t], beginning at first_T[t]. A tile that begins at the
    sequence's end is empty; a token of slot -1 is padding."""
    _prefill[(len(sequence_T), params.num_kv_heads)](
        qkv, *_given(qkv, params.sinks_H), *pointers(k, v), blocks, ends_B, lengths_B, sequence_T,
        first_T, out, stride, params.scale, params.num_q_heads, params.num_kv_heads,
        params.head_dim, page_size, PREFILL_ROWS, 64 if params.head_dim <= 128 else 32,
        params.window or 0, params.softcap or 0.0, params.sinks_H is not None, pdl, num_warps=4,
        num_stages=_stages(params), launch_pdl=pdl,
    )  # fmt: skip
