"""Context parallelism: the tokens of a microbatch divided among the ranks of a group.

This is for rows so long that their activations do not fit on one device. A rank computes the layers
and the head for its own tokens only; keys and values are gathered in every layer, which is little
compared to activations if several query heads share them. Log-probs are gathered too, one number
per token, so that every rank of the group computes the same loss of the whole microbatch, whatever
that loss sums over a row, and takes the gradient of its own tokens from it. The load-balancing loss
of experts works in the same way, from sums over the group.

A later token attends to more tokens than an earlier one. So the tokens are cut into twice as many
chunks as there are ranks, and a rank takes one from the front and its mirror image from the back:
all ranks have the same amount of work.

Shapes: T tokens of the microbatch, t those of one rank; N the tokens that the loss counts, n those
of one rank; H query heads, K key/value heads, D head size, V size of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from etude.core.errors import EtudeError
from etude.model.config import ModelConfig
from etude.model.recurrence import Recurrence
from etude.model.scoring import Scoring, attend_scored
from etude.train.distributed import World

PLAIN = Scoring()


class QuerySpan(NamedTuple):
    """Consecutive queries of one sequence, and the keys that they see."""

    first: int
    """Index of the first query among the rank's own tokens."""
    start: int
    """The first token of the sequence within the microbatch."""
    low: int
    high: int
    """The queries within the microbatch, `low` up to but not including `high`. They see tokens from
    `start` on."""


@dataclass(frozen=True)
class ContextSharding:
    """The division of a microbatch's tokens among the ranks of a group. Pure: every rank knows all
    parts."""

    lengths: tuple[int, ...]
    """The lengths of the sequences; if necessary followed by tokens of no sequence that make all
    parts equal."""
    size: int
    """The number of ranks."""

    @classmethod
    def of(cls, lengths: Sequence[int], size: int) -> ContextSharding:
        missing = -sum(lengths) % (2 * size)
        return cls((*lengths, missing) if missing else tuple(lengths), size)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def chunk(self) -> int:
        return self.num_tokens // (2 * self.size)

    def chunks_of(self, rank: int) -> tuple[range, range]:
        """The tokens of a rank: a chunk from the front and one from the back."""
        mirror = 2 * self.size - 1 - rank
        return (
            range(rank * self.chunk, (rank + 1) * self.chunk),
            range(mirror * self.chunk, (mirror + 1) * self.chunk),
        )

    def places_of(self, rank: int) -> list[int]:
        return [place for chunk in self.chunks_of(rank) for place in chunk]

    def pieces_of(self, rank: int) -> Iterator[QuerySpan]:
        """The tokens of a rank by sequence."""
        first = 0
        for chunk in self.chunks_of(rank):
            for start, end in pairwise(accumulate(self.lengths, initial=0)):
                low, high = max(start, chunk.start), min(end, chunk.stop)
                if low < high:
                    yield QuerySpan(first, start, low, high)
                    first += high - low

    def in_order(self, parts_StX: Tensor) -> Tensor:
        """Concatenate the tokens of all ranks, in the order of the tokens."""
        halves = parts_StX.view(self.size, 2, self.chunk, *parts_StX.shape[2:])
        front = halves[:, 0]
        back = halves[:, 1].flip(0)
        return torch.cat((front.flatten(0, 1), back.flatten(0, 1)))

    def by_rank(self, all_TX: Tensor) -> Tensor:
        """The inverse of `in_order`."""
        chunks = all_TX.view(2, self.size, self.chunk, *all_TX.shape[1:])
        return torch.stack((chunks[0], chunks[1].flip(0)), 1).flatten(1, 2)


class ContextGroup:
    """The ranks that compute one microbatch together, seen from one of them: consecutive ranks of
    the world, with their own process group."""

    def __init__(self, world: World, size: int) -> None:
        if world.world_size % size:
            raise EtudeError(
                f"trainer.context_parallel = {size} does not divide the {world.world_size} "
                f"ranks into equal groups: choose a number that divides trainer.ranks"
            )
        self.size = size
        self.rank = world.rank % size
        # every rank must take part in the creation of every group
        groups = [
            dist.new_group(list(range(first, first + size)))
            for first in range(0, world.world_size, size)
        ]
        self._group: Any = groups[world.rank // size]

    def gather(self, own_tX: Tensor, sharding: ContextSharding) -> Tensor:
        """Gather the tokens of all ranks, in the order of the tokens. The gradient of a rank's own
        tokens is the sum over the ranks."""
        gathered: Tensor = _Gather.apply(own_tX, sharding, self._group)  # type: ignore[no-untyped-call]
        return gathered

    def sum(self, own: Tensor) -> Tensor:
        """Sum over all ranks. The gradient of a rank's own value is that of its own loss, since all
        ranks compute the same loss."""
        summed: Tensor = _Sum.apply(own, self._group)  # type: ignore[no-untyped-call]
        return summed

    def assemble(self, own_n: Tensor, places_n: Tensor, count: int) -> Tensor:
        """A vector of `count` numbers, assembled from the entries that each rank has. The gradient
        of a rank's own entries is that of its own loss, since all ranks compute the same loss."""
        assembled: Tensor = _Assemble.apply(own_n, places_n, count, self._group)  # type: ignore[no-untyped-call]
        return assembled


@dataclass(frozen=True)
class ContextShare:
    """The tokens of a microbatch that this rank computes: `places_of` its sharding, in that order.
    Tokens of no sequence come last, if it has any."""

    sharding: ContextSharding
    group: ContextGroup
    total: int
    """The number of tokens of the microbatch, not counting those of no sequence."""

    @classmethod
    def of(cls, lengths: Sequence[int], group: ContextGroup) -> ContextShare:
        return cls(ContextSharding.of(lengths, group.size), group, sum(lengths))

    @property
    def num_tokens(self) -> int:
        """The number of this rank's tokens, not counting those of no sequence."""
        chunks = self.sharding.chunks_of(self.group.rank)
        return sum(len(range(chunk.start, min(chunk.stop, self.total))) for chunk in chunks)

    def take(self, all_TX: Tensor, fill: int = 0) -> Tensor:
        """This rank's part of a per-token tensor. `fill`: the value for tokens of no sequence."""
        missing = self.sharding.num_tokens - self.total
        padded = torch.cat((all_TX, all_TX.new_full((missing, *all_TX.shape[1:]), fill)))
        chunks = self.sharding.chunks_of(self.group.rank)
        return torch.cat([padded[chunk.start : chunk.stop] for chunk in chunks])

    def find(self, indices_N: Tensor) -> tuple[Tensor, Tensor]:
        """Find this rank's tokens among the given ones; return their indices among its own tokens,
        and among the N."""
        size = self.sharding.chunk
        front, back = self.sharding.chunks_of(self.group.rank)
        in_front_N = (indices_N >= front.start) & (indices_N < front.stop)
        in_back_N = (indices_N >= back.start) & (indices_N < back.stop)
        places_n = (in_front_N | in_back_N).nonzero().squeeze(1)
        there_N = torch.where(in_front_N, indices_N - front.start, indices_N - back.start + size)
        return there_N[places_n], places_n


def check_context_parallel(config: ModelConfig, *, invariant: bool) -> None:
    """Raise EtudeError for a model whose tokens cannot be divided."""
    cannot = {
        "recurrent layers": config.linear is not None,
        "invariant arithmetic": invariant,
    }
    if found := [name for name, there in cannot.items() if there]:
        raise EtudeError(
            f"trainer.context_parallel does not support {' and '.join(found)}: leave it at 1"
        )


class ContextParallelAttention:
    """The attention backend of a rank: causal attention of its own tokens to those of all ranks,
    whose keys and values it gathers."""

    latent = False

    def __init__(self, sharding: ContextSharding, group: ContextGroup) -> None:
        self._sharding = sharding
        self._group = group
        self._pieces = list(sharding.pieces_of(group.rank))
        # Ranks communicate in this method. Not a decorator: that would load the compiler with this
        # module, which takes as long as loading torch itself.
        self._attend_uncompiled = torch.compiler.disable(self._attend)  # type: ignore[no-untyped-call]

    def __call__(
        self,
        layer: int,
        q_tHD: Tensor,
        k_tKD: Tensor,
        v_tKV: Tensor,
        scale: float | None = None,
        scoring: Scoring | None = None,
    ) -> Tensor:
        attended: Tensor = self._attend_uncompiled(layer, q_tHD, k_tKD, v_tKV, scale, scoring)
        return attended

    def _attend(
        self,
        layer: int,
        q_tHD: Tensor,
        k_tKD: Tensor,
        v_tKV: Tensor,
        scale: float | None,
        scoring: Scoring | None,
    ) -> Tensor:
        k_TKD = self._group.gather(k_tKD, self._sharding)
        v_TKV = self._group.gather(v_tKV, self._sharding)
        if scoring is None and _is_for_kernel(q_tHD, v_TKV):
            return self._together(q_tHD.to(v_TKV.dtype), k_TKD.to(v_TKV.dtype), v_TKV, scale)
        return torch.cat(
            [
                attend_scored(
                    q_tHD[piece.first : piece.first + piece.high - piece.low],
                    k_TKD[piece.start : piece.high],
                    v_TKV[piece.start : piece.high],
                    scale,
                    scoring or PLAIN,
                )
                for piece in self._pieces
            ]
        )

    def recurrence(self, shape: torch.Size) -> Recurrence:
        raise AssertionError("refused by check_context_parallel")

    def _together(self, q_tHD: Tensor, k_TKD: Tensor, v_TKV: Tensor, scale: float | None) -> Tensor:
        """Attend all spans with one kernel; the last queries and keys of each span are aligned."""
        seen, queries, keys, longest_q, longest_k = self._borders
        size = v_TKV.shape[-1]
        v_TKD = F.pad(v_TKV, (0, q_tHD.shape[-1] - size))  # the kernel wants one size for all
        attend = torch.ops.aten._flash_attention_forward
        k, v = k_TKD.index_select(0, seen), v_TKD.index_select(0, seen)
        mixed: Tensor = attend(
            q_tHD, k, v, queries, keys, longest_q, longest_k, 0.0, True, False, scale=scale
        )[0]
        return mixed.narrow(-1, 0, size)

    @cached_property
    def _borders(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """The indices of the keys of all spans, concatenated; the borders of queries and keys; and
        their maximal lengths. On the device, the same for all layers."""
        queries = [piece.high - piece.low for piece in self._pieces]
        keys = [piece.high - piece.start for piece in self._pieces]
        ranges = [torch.arange(piece.start, piece.high) for piece in self._pieces]
        borders = (torch.tensor([0, *accumulate(each)]).int().cuda() for each in (queries, keys))
        return torch.cat(ranges).cuda(), *borders, max(queries), max(keys)  # type: ignore[return-value]


def _is_for_kernel(q: Tensor, v: Tensor) -> bool:
    size = q.shape[-1]
    known = size % 8 == 0 and size <= 256
    return known and q.is_cuda and v.dtype in (torch.bfloat16, torch.float16)


class _Gather(torch.autograd.Function):
    """All-gather of the ranks' tokens, in token order; backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, own_tX: Tensor, sharding: ContextSharding, group: Any) -> Tensor:
        ctx.sharding, ctx.group = sharding, group
        gathered = own_tX.new_empty(sharding.size * len(own_tX), *own_tX.shape[1:])
        dist.all_gather_into_tensor(gathered, own_tX.contiguous(), group=group)
        return sharding.in_order(gathered.view(sharding.size, *own_tX.shape))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient_TX,) = gradients
        parts = ctx.sharding.by_rank(gradient_TX)
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=ctx.group)
        return own, None, None


class _Sum(torch.autograd.Function):
    """All-reduce; backward does not sum."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        summed = own.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Assemble(torch.autograd.Function):
    """Assemble one vector from the entries that each rank has, with an all-reduce; backward takes a
    rank's own entries of its own gradient and does not sum."""

    @staticmethod
    def forward(ctx: Any, own_n: Tensor, places_n: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(places_n)
        assembled = own_n.new_zeros(count).index_copy(0, places_n, own_n)
        dist.all_reduce(assembled, group=group)
        return assembled

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient_N,), (places_n,) = gradients, ctx.saved_tensors
        return gradient_N.index_select(0, places_n), None, None, None
