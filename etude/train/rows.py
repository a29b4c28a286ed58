"""From rows to padded microbatches, and from those to the share of each rank. Pure: the same rows give the same
microbatches, in the same order, on every rank.

As in `core.types.Row`, position t of every field speaks of token t. That a token is predicted at the position before it
is said in one place only, `loss.token_logprobs`. Shapes: B rows, T tokens, L layers that have experts, k experts of a
token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from etude.core.types import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """Token rows of one width, and which of their tokens the loss counts. Padding stands at the end and never counts;
    nor does the first token of a row, before which nothing stands."""

    tokens_BT: Tensor
    mask_BT: Tensor
    experts_BTLk: Tensor | None = None
    """The experts that are replayed, -1 where the router decides; None: it decides everywhere."""
    starts_BT: Tensor | None = None
    """For each token where its document begins in the row, if a row holds several that do not see each other."""

    def to(self, device: torch.device) -> Self:
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with every tensor changed."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: change(t) for name, t in tensors.items() if isinstance(t, Tensor)})

    @property
    def num_tokens(self) -> int:
        """How many tokens the loss counts."""
        return int(self.mask_BT[:, 1:].sum())

    @property
    def count(self) -> int:
        """How many things the loss is the mean of: tokens, unless a kind of microbatch says otherwise."""
        return self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch(Padded):
    """What one forward and backward pass of RL reads."""

    old_logprobs_BT: Tensor
    advantages_BT: Tensor
    weights_B: Tensor
    """What a token of each row counts for in the objective."""
    numbers_B: Tensor
    """Which rows of the batch they are."""


P = TypeVar("P", bound=Padded)


def plan(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Which rows go together: indices, such that rows x longest row <= limit in every microbatch.

    Rows of like length share a microbatch, the longest first, so that little is padded and the first microbatch is the
    one that needs the most memory. `limit = 0` means one row each, in the order given.
    """
    if limit == 0:
        return [[index] for index in range(len(lengths))]
    plans: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not plans or (len(plans[-1]) + 1) * width > limit:
            plans.append([])
            width = lengths[index]
        plans[-1].append(index)
    return plans


def pack(
    rows: Sequence[Row],
    *,
    microbatch_tokens: int,
    max_tokens: int,
    weights: Sequence[float] | None = None,
    experts: Callable[[Row], Tensor | None] = lambda row: None,
) -> list[Microbatch]:
    """All rows, each in one microbatch of at most `microbatch_tokens` tokens, padding included. No `weights`: 1.
    `experts` gives those that the first tokens of a row used, [tokens, L, k]."""
    weights = [1.0] * len(rows) if weights is None else weights
    bound = min(max_tokens, microbatch_tokens or max_tokens)
    for row in rows:
        assert len(row.tokens) == len(row.mask) == len(row.logprobs) == len(row.advantages), row.sample
        if len(row.tokens) > bound:
            raise ValueError(f"{row.sample}: a row of {len(row.tokens)} tokens does not fit: the model's context has "
                             f"{max_tokens} and a microbatch {microbatch_tokens or 'no bound'}")  # fmt: skip
        if row.mask[0]:
            raise ValueError(f"{row.sample}: its first token counts as sampled, but nothing stands before it")
    return [
        Microbatch(
            tokens_BT=pad([rows[index].tokens for index in indices], torch.int64),
            mask_BT=pad([rows[index].mask for index in indices], torch.bool),
            old_logprobs_BT=pad([rows[index].logprobs for index in indices], torch.float32),
            advantages_BT=pad([rows[index].advantages for index in indices], torch.float32),
            weights_B=torch.tensor([weights[index] for index in indices]),
            numbers_B=torch.tensor(indices),
            experts_BTLk=pad_experts([rows[index] for index in indices], experts),
        )
        for indices in plan([len(row.tokens) for row in rows], microbatch_tokens)
    ]


def pack_text(texts: Sequence[tuple[Sequence[int], Sequence[bool]]], *, microbatch_tokens: int) -> list[Padded]:
    """The same for (tokens, mask) pairs, which have no behaviour policy."""
    return [
        Padded(
            tokens_BT=pad([texts[i][0] for i in indices], torch.int64),
            mask_BT=pad([texts[i][1] for i in indices], torch.bool),
        )
        for indices in plan([len(tokens) for tokens, _ in texts], microbatch_tokens)
    ]


def pad_experts(rows: Sequence[Row], experts: Callable[[Row], Tensor | None]) -> Tensor | None:
    found = {number: ids for number, row in enumerate(rows) if (ids := experts(row)) is not None}
    if not found:
        return None
    width, shape = max(len(row.tokens) for row in rows), next(iter(found.values())).shape[1:]
    padded_BTLk = torch.full((len(rows), width, *shape), -1, dtype=torch.int16)
    for number, ids in found.items():
        padded_BTLk[number, : len(ids)] = ids
    return padded_BTLk


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a row of a microbatch costs: so much for each token, and so much for each pair of tokens one of which sees
    the other."""

    per_token: float
    per_pair: float

    def row(self, width: int) -> float:
        return width * (self.per_token + self.per_pair * width / 2)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` of microbatch number `of`; no rows at all for a rank that has nothing to do meanwhile."""

    of: int
    start: int
    stop: int


def balance(shapes: Sequence[tuple[int, int]], ranks: int, cost: Cost) -> list[list[Piece]]:
    """For each rank the pieces that it computes of microbatches of these shapes (rows, width).

    Ranks work in rounds, one microbatch each, and a round lasts as long as its costliest one. So like microbatches
    share a round, and where it helps they are cut: such that their number fills the rounds, or one more, and none costs
    more than it must.
    """
    if ranks == 1:
        return [[Piece(of, 0, rows) for of, (rows, _) in enumerate(shapes)]]
    fewest = math.ceil(len(shapes) / ranks)
    caps = [math.inf, *(_cap(shapes, num_rounds * ranks, cost) for num_rounds in (fewest, fewest + 1))]
    plans = [_rounds(shapes, _pieces(shapes, cap, cost), ranks, cost) for cap in caps]
    rounds = min(plans, key=lambda plan: sum(max(_cost(piece, shapes, cost) for piece in round) for round in plan))
    return [[round[rank] for round in rounds] for rank in range(ranks)]


def _rounds(
    shapes: Sequence[tuple[int, int]], pieces: Sequence[Piece], ranks: int, cost: Cost
) -> list[tuple[Piece, ...]]:
    narrowest = min(range(len(shapes)), key=lambda of: shapes[of][1])
    idle = [Piece(narrowest, 0, 0)] * (-len(pieces) % ranks)
    order = [*sorted(pieces, key=lambda piece: -_cost(piece, shapes, cost)), *idle]
    return [tuple(order[at : at + ranks]) for at in range(0, len(order), ranks)]


def _cap(shapes: Sequence[tuple[int, int]], most_pieces: int, cost: Cost) -> float:
    """The least that the costliest piece can cost if there are at most so many."""
    costs = sorted({rows * cost.row(width) for most, width in shapes for rows in range(1, most + 1)})
    low, high = costs.index(max(cost.row(width) for _, width in shapes)), len(costs) - 1  # a row is never cut
    while low < high:
        middle = (low + high) // 2
        enough = len(_pieces(shapes, costs[middle], cost)) <= most_pieces
        low, high = (low, middle) if enough else (middle + 1, high)
    return costs[low]


def _pieces(shapes: Sequence[tuple[int, int]], cap: float, cost: Cost) -> list[Piece]:
    """All microbatches, cut into as few pieces as it takes for none to cost more than `cap`."""
    # A little more, so that rounding does not take a row away where the cap is just reached.
    fitting = [min(rows, cap / cost.row(width) + 1e-6) for rows, width in shapes]
    return [piece for of, (rows, _) in enumerate(shapes) for piece in _cut(of, rows, int(fitting[of]))]


def _cut(of: int, rows: int, most: int) -> Iterator[Piece]:
    """In as few pieces of at most `most` rows as it takes, and these as equal as can be."""
    count = math.ceil(rows / most)
    ends = [rows * number // count for number in range(count + 1)]
    return (Piece(of, start, stop) for start, stop in zip(ends[:-1], ends[1:], strict=True))


def _cost(piece: Piece, shapes: Sequence[tuple[int, int]], cost: Cost) -> float:
    return (piece.stop - piece.start) * cost.row(shapes[piece.of][1])


def share(microbatches: Sequence[P], rank: int, ranks: int, cost: Cost) -> list[P]:
    """The microbatches of one rank; equally many for each, since ranks meet in every layer of every pass."""
    shapes = [(micro.tokens_BT.shape[0], micro.tokens_BT.shape[1]) for micro in microbatches]
    return [_take(microbatches[piece.of], piece) for piece in balance(shapes, ranks, cost)[rank]]


def _take(micro: P, piece: Piece) -> P:
    if piece.start == piece.stop:  # one row, of which no token counts
        idle = _take(micro, Piece(piece.of, 0, 1))
        return replace(idle, mask_BT=torch.zeros_like(idle.mask_BT))
    return micro._each(lambda tensor: tensor[piece.start : piece.stop])


def pad(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)
