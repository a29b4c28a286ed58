"""The gated delta rule for one new token of each sequence, with the states of `model.recurrence` in
blocks: what a captured graph can do without the host knowing any length.

Shapes as in `model.recurrence`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from etude.model.recurrence import DeltaRule, StateCache

VALUES = 32
"""Numbers of a value that a program takes."""


@triton.jit
def _step(
    q, k, v, decay, beta, memories, before, after, is_first, out, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One head of a sequence, and some numbers of its value."""
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


class DecodeRecurrence:
    """The recurrent layers of a pass with one new token of each sequence. `lengths_B` counts it, 0
    is an empty row; the last block of the states is for those."""

    def __init__(
        self, states: StateCache, lengths_B: Tensor, blocks: Tensor, stride: Tensor, block_size: int
    ) -> None:
        self._states = states
        rows_B = torch.arange(len(lengths_B), device=lengths_B.device) * stride
        nobody = len(states.memories[0]) - 1

        def block_of(position_B: Tensor) -> Tensor:
            return blocks.index_select(0, rows_B + position_B.clamp(min=0) // block_size).long()

        self._before = block_of(lengths_B - 2)
        self._after = torch.where(lengths_B > 0, block_of(lengths_B - 1), nobody)
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
