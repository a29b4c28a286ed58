"""The gated delta rule (Gated DeltaNet) on kernels: `GatedDeltaDecode` for one new token of each
sequence, `delta_chunks` for chunks of prompts.

Decoding keeps the states of `model.recurrence` in blocks, so that a captured graph needs no length
from the host.

Shapes as in `model.recurrence`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from etude.model.recurrence import NORM_EPS, Chunks, DeltaRule, StateCache

VALUES = 32
"""Elements of a value that a program takes."""


@triton.jit
def _step(
    q, k, v, decay, beta, memories, before, after, is_first, out, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One head of a sequence, and some elements of its value."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, KP), tl.program_id(2) * BV + tl.arange(0, BV)
    row = b * H + h
    key = tl.load(k + row * K + i, mask=i < K, other=0)
    query = tl.load(q + row * K + i, mask=i < K, other=0)
    value = tl.load(v + row * V + j, mask=j < V, other=0)
    inside = (i < K)[:, None] & (j < V)[None, :]
    place = i[:, None] * V + j[None, :]
    theirs = tl.load(before + b) * (H * K * V) + h * (K * V)
    memory = tl.load(memories + theirs + place, mask=inside, other=0)
    memory = tl.where(tl.load(is_first + b) > 0, 0.0, memory) * tl.exp(tl.load(decay + row))
    change = (value - tl.sum(memory * key[:, None], 0)) * tl.load(beta + row)
    memory += key[:, None] * change[None, :]
    mine = tl.load(after + b) * (H * K * V) + h * (K * V)
    tl.store(memories + mine + place, memory, mask=inside)
    tl.store(out + row * V + j, tl.sum(memory * query[:, None], 0), mask=j < V)


class GatedDeltaDecode:
    """The decode step of layers with a gated delta rule: one new token of each sequence.
    `lengths_B` includes it; 0 is an empty row, and empty rows share the last block of the
    states."""

    def __init__(
        self, states: StateCache, lengths_B: Tensor, blocks: Tensor, stride: Tensor, block_size: int
    ) -> None:
        self._states = states
        rows_B = torch.arange(len(lengths_B), device=lengths_B.device) * stride
        nobody = len(states.memories[0]) - 1

        def block_of(position_B: Tensor) -> Tensor:
            return blocks.index_select(0, rows_B + position_B.clamp(min=0) // block_size).long()

        # an empty row's table holds leftovers of an earlier pass
        self._before, self._after = (
            torch.where(lengths_B > 0, block_of(lengths_B - back), nobody) for back in (2, 1)
        )
        self._is_first = (lengths_B <= 1).int()

    def __call__(
        self, place: int, rule: DeltaRule, mixed_BC: Tensor, decay_BH: Tensor, beta_BH: Tensor
    ) -> Tensor:
        tails, memories = self._states.tails[place], self._states.memories[place]
        tail_BWC = tails.index_select(0, self._before)
        tail_BWC = tail_BWC.masked_fill(self._is_first.bool()[:, None, None], 0)
        rows_BWC = torch.cat((tail_BWC, mixed_BC.unsqueeze(1)), 1)
        tails.index_copy_(0, self._after, rows_BWC[:, 1:])
        mixed_BC = (rows_BWC.float() * rule.weight_CW.float().T).sum(1)
        q, k, v = (x.contiguous() for x in rule.heads(rule.act(mixed_BC)))
        out = torch.empty_like(v)
        (rows, heads, size), width = k.shape, v.shape[-1]
        values = min(VALUES, int(triton.next_power_of_2(width)))
        _step[(rows, heads, triton.cdiv(width, values))](
            q, k, v, decay_BH.float().contiguous(), beta_BH.float().contiguous(), memories,
            self._before, self._after, self._is_first, out, heads, size, width,
            triton.next_power_of_2(size), values, num_warps=4,
        )  # fmt: skip
        return out


@triton.jit
def _solve(
    mixed, decay, beta, tokens, qs, within, values, taken, ks, whole, num_tokens, scale, eps,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr,
    KP: tl.constexpr, VP: tl.constexpr, JP: tl.constexpr,
):  # fmt: skip
    """One head of a chunk: all results that do not depend on the memory. G heads share a key."""
    u, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j, i, c = tl.arange(0, JP), tl.arange(0, KP), tl.arange(0, VP)
    n = tl.load(tokens + u * J + j, mask=j < J, other=num_tokens)
    there = n < num_tokens
    width = (H // G) * K * 2 + H * V
    row = mixed + n[:, None] * width
    of_key, of_value = there[:, None] & (i < K)[None, :], there[:, None] & (c < V)[None, :]
    k = tl.load(row + (H // G + h // G) * K + i[None, :], mask=of_key, other=0)
    k = k * tl.rsqrt(tl.sum(k * k, 1) + eps)[:, None]
    b = tl.load(beta + n * H + h, mask=there, other=0)
    fade = tl.load(decay + n * H + h, mask=there, other=0)
    faded = tl.cumsum(fade, 0)
    earlier = j[:, None] >= j[None, :]
    left = tl.exp(tl.where(earlier, faded[:, None] - faded[None, :], -float("inf")))
    system = tl.dot(k * b[:, None], tl.trans(k), input_precision="tf32x3") * left

    # The inverse of 1 plus the part below its diagonal, row by row.
    inverse = tl.where(j[:, None] > j[None, :], -system, 0.0)
    for line in range(1, tl.max(tl.where(there, j, 0), 0) + 1):
        mine = tl.sum(tl.where((j == line)[:, None], inverse, 0.0), 0)
        mine += tl.sum(mine[:, None] * inverse, 0)
        inverse = tl.where((j == line)[:, None], mine[None, :], inverse)
    inverse += tl.where(j[:, None] == j[None, :], 1.0, 0.0)

    chunk = u * H + h
    places, of_chunk = chunk * J + j, (j < J)[:, None]
    to_key = places[:, None] * K + i[None, :]
    is_key = of_chunk & (i < K)[None, :]
    v = tl.load(row + (H // G) * K * 2 + h * V + c[None, :], mask=of_value, other=0)
    new = tl.dot(inverse, v * b[:, None], input_precision="tf32x3")
    to_value = places[:, None] * V + c[None, :]
    tl.store(values + to_value, new, mask=of_chunk & (c < V)[None, :])
    gone = k * (b * tl.exp(faded))[:, None]
    tl.store(taken + to_key, tl.dot(inverse, gone, input_precision="tf32x3"), mask=is_key)
    total = tl.sum(fade, 0)
    tl.store(ks + to_key, k * tl.exp(total - faded)[:, None], mask=is_key)
    tl.store(whole + chunk, tl.exp(total))

    q = tl.load(row + (h // G) * K + i[None, :], mask=of_key, other=0)
    q = q * (tl.rsqrt(tl.sum(q * q, 1) + eps) * scale)[:, None]
    seen = tl.dot(q, tl.trans(k), input_precision="tf32x3") * left
    tl.store(within + places[:, None] * J + j[None, :], seen, mask=of_chunk & (j < J)[None, :])
    tl.store(qs + to_key, q * tl.exp(faded)[:, None], mask=is_key)


@triton.jit
def _scan(
    qs, within, values, taken, ks, whole, tokens, sequences, num_chunks, firsts, keep, memories,
    out, kept, num_tokens, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, JP: tl.constexpr,
):  # fmt: skip
    """One head of a sequence, and some elements of its value: pass the memory from chunk to
    chunk."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j, i, c = tl.arange(0, JP), tl.arange(0, KP), tl.program_id(2) * BV + tl.arange(0, BV)
    in_memory = (i < K)[:, None] & (c < V)[None, :]
    in_keys, in_values = (j < J)[:, None] & (i < K)[None, :], (j < J)[:, None] & (c < V)[None, :]
    place = i[:, None] * V + c[None, :]
    own = (tl.load(sequences + b) * H + h) * (K * V)
    memory = tl.load(memories + own + place, mask=in_memory, other=0)
    for step in range(0, tl.load(num_chunks + b)):
        u = tl.load(firsts + step) + b
        chunk = u * H + h
        places = chunk * J + j
        keys = places[:, None] * K + i[None, :]
        gone = tl.load(taken + keys, mask=in_keys, other=0)
        new = tl.load(values + places[:, None] * V + c[None, :], mask=in_values, other=0)
        new -= tl.dot(gone, memory, input_precision="tf32x3")
        q = tl.load(qs + keys, mask=in_keys, other=0)
        in_chunk = (j < J)[:, None] & (j < J)[None, :]
        seen = tl.load(within + places[:, None] * J + j[None, :], mask=in_chunk, other=0)
        read = tl.dot(q, memory, input_precision="tf32x3")
        read += tl.dot(seen, new, input_precision="tf32x3")
        n = tl.load(tokens + u * J + j, mask=j < J, other=num_tokens)
        to = (n[:, None] * H + h) * V + c[None, :]
        tl.store(out + to, read, mask=(n < num_tokens)[:, None] & (c < V)[None, :])
        k = tl.load(ks + keys, mask=in_keys, other=0)
        memory *= tl.load(whole + chunk)
        memory += tl.dot(tl.trans(k), new, input_precision="tf32x3")
        number = tl.load(keep + u)
        if number >= 0:
            tl.store(kept + (number * H + h) * (K * V) + place, memory, mask=in_memory)


def delta_chunks(
    chunks: Chunks,
    rule: DeltaRule,
    mixed_NC: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    memory_BHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """`model.recurrence.RuleOfChunks` in two kernels: one for the results that need only the chunk,
    and one that passes the memory through the chunks."""
    (count, heads), (num_chunks, size) = decay_NH.shape, chunks.tokens_UJ.shape
    key_size, value_size = rule.key_size, rule.value_size
    padded_key, padded_size = (max(16, triton.next_power_of_2(n)) for n in (key_size, size))
    padded_value = max(16, triton.next_power_of_2(value_size))

    qs, taken, ks = mixed_NC.new_empty(3, num_chunks, heads, size, key_size)
    within = mixed_NC.new_empty(num_chunks, heads, size, size)
    values = mixed_NC.new_empty(num_chunks, heads, size, value_size)
    whole = mixed_NC.new_empty(num_chunks, heads)
    _solve[(num_chunks, heads)](
        mixed_NC.contiguous(), decay_NH.contiguous(), beta_NH.contiguous(), chunks.tokens_UJ,
        qs, within, values, taken, ks, whole, count, key_size**-0.5, NORM_EPS, heads,
        heads // rule.num_key_heads, key_size, value_size, size, padded_key, padded_value,
        padded_size, num_warps=8,
    )  # fmt: skip

    read = mixed_NC.new_empty(count, heads, value_size)
    kept = mixed_NC.new_empty(len(chunks.kept_Y), heads, key_size, value_size)
    numbers = min(VALUES, padded_value)
    _scan[(len(memory_BHKV), heads, triton.cdiv(value_size, numbers))](
        qs, within, values, taken, ks, whole, chunks.tokens_UJ, chunks.sequences_B,
        chunks.num_chunks_B, chunks.firsts_S, chunks.keep_U, memory_BHKV.contiguous(), read, kept,
        count, heads, key_size, value_size, size, padded_key, numbers, padded_size, num_warps=4,
    )  # fmt: skip
    return read, kept
