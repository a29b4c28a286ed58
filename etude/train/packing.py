"""Packing: sequences into microbatches without padding, and microbatches onto ranks. Pure: the same
sequences give the same microbatches, in the same order, on every rank.

The sequences of a microbatch are concatenated without padding, and do not attend to each other. A
token is predicted at the position before it, so only the tokens of a sequence before the last one
that the loss counts are read. As in `core.types.Row`, position t of every field belongs to token t:
the shift by one is made here and nowhere else.

Shapes: T tokens that a microbatch reads, N those that the loss counts, B sequences, L layers with
experts, k experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.core.types import Row
from etude.train.context_parallel import ContextGroup, ContextShare

Ints = NDArray[np.int64]


class PackItem(Protocol):
    """An item to pack, which is never split: a sequence, or a pair of them."""

    @property
    def length(self) -> int:
        """The number of tokens that are read."""

    @property
    def num_loss_tokens(self) -> int:
        """The number of tokens that the loss counts."""

    @property
    def num_loss_terms(self) -> int:
        """The number of terms in the mean of the loss: tokens, or pairs."""


@dataclass(frozen=True)
class TokenSequence:
    """A sequence of tokens with a loss mask, which is never True for the first token."""

    tokens: Sequence[int]
    mask: Sequence[bool]

    @cached_property
    def loss_positions(self) -> Ints:
        """The positions of the tokens that the loss counts."""
        return np.flatnonzero(np.frombuffer(bytes(self.mask[1:]), np.bool_)) + 1

    @property
    def length(self) -> int:
        """The number of tokens that are read: all before the last one that the loss counts."""
        return int(self.loss_positions[-1]) if len(self.loss_positions) else 0

    @property
    def num_loss_tokens(self) -> int:
        return len(self.loss_positions)

    @property
    def num_loss_terms(self) -> int:
        return self.num_loss_tokens


@dataclass(frozen=True)
class RolloutSequence(TokenSequence):
    """A row of an RL batch as a sequence to pack."""

    row: Row
    number: int
    """The index of the row in the batch."""
    weight: float
    """The weight of its tokens in the objective."""
    temperature: float
    """The sampling temperature of its tokens, if the row does not state it."""

    @classmethod
    def from_row(
        cls, row: Row, number: int, weight: float = 1.0, temperature: float = 1.0
    ) -> RolloutSequence:
        return cls(row.tokens, row.mask, row, number, weight, temperature)

    @property
    def temperatures(self) -> NDArray[np.float64]:
        """The sampling temperature of each token that the loss counts."""
        if not self.row.sampling:
            return np.full(self.num_loss_tokens, self.temperature)
        spans = self.row.sampling
        return np.repeat(
            [span.params.temperature for span in spans], [span.count for span in spans]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicrobatch:
    """A microbatch: sequences one after the other, without padding, for one forward and backward
    pass."""

    tokens_T: Tensor
    positions_T: Tensor
    """The position of each token within its sequence."""
    lengths: tuple[int, ...]
    """The number of tokens of each sequence."""
    logits_indices_N: Tensor
    """The positions whose logits predict the targets."""
    targets_N: Tensor
    """The tokens that the loss counts."""
    sequence_N: Tensor
    """The index of the sequence of each target."""
    temperature_N: Tensor | None = None
    """The sampling temperature of each target; None: all 1."""
    experts_TLk: Tensor | None = None
    """The experts to replay, -1 where the router decides; None: it decides everywhere."""
    context_group: ContextGroup | None = None
    """The ranks that compute it together, each for its share of the tokens; None: only this
    rank."""

    def to(self, device: torch.device) -> Self:
        there: dict[str, Any] = {
            f.name: (tensor.pin_memory() if device.type == "cuda" else tensor).to(
                device, non_blocking=True
            )
            for f in fields(self)
            if isinstance(tensor := getattr(self, f.name), Tensor)
        }
        return replace(self, **there)

    @property
    def num_loss_tokens(self) -> int:
        """The number of tokens that the loss counts."""
        return len(self.targets_N)

    @property
    def share(self) -> ContextShare | None:
        """This rank's share of the tokens; None: all."""
        group = self.context_group
        return None if group is None else ContextShare.of(self.lengths, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRollouts(PackedMicrobatch):
    """A microbatch of rollouts: a `PackedMicrobatch` with the inputs of the RL objective."""

    old_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    """The weight of each target in the objective."""
    row_ids_N: Tensor
    """The index of the batch row of each target."""


def pack_batch(texts: Sequence[TokenSequence]) -> PackedMicrobatch:
    """Pack sequences into one microbatch."""
    return PackedMicrobatch(**_packed(texts))


def pack_rollouts(
    rows: Sequence[RolloutSequence], experts: Callable[[Row], Tensor | None] = lambda row: None
) -> PackedRollouts:
    """Pack rollouts into one microbatch. `experts` returns the routed experts of the first tokens
    of a row, [tokens, L, k]."""
    temperatures = [each.temperatures for each in rows]
    is_plain = all((own == 1).all() for own in temperatures)
    return PackedRollouts(
        **_packed(rows),
        temperature_N=None if is_plain else _joined(temperatures, torch.float32),
        experts_TLk=_pack_experts(
            [each.length for each in rows], [experts(each.row) for each in rows]
        ),
        old_logprobs_N=_joined(
            [_numbers(each.row.logprobs)[each.loss_positions] for each in rows], torch.float32
        ),
        advantages_N=_joined(
            [_numbers(each.row.advantages)[each.loss_positions] for each in rows], torch.float32
        ),
        weights_N=_joined(
            [np.full(each.num_loss_tokens, each.weight) for each in rows], torch.float32
        ),
        row_ids_N=_joined(
            [np.full(each.num_loss_tokens, each.number) for each in rows], torch.int64
        ),
    )


def _packed(texts: Sequence[TokenSequence]) -> dict[str, Any]:
    """The fields of a `PackedMicrobatch`. A rank without work gets one token that the loss does not
    count."""
    lengths = [text.length for text in texts]
    if not any(lengths):
        texts, lengths = [TokenSequence((0,), (False,))], [1]
    starts = accumulate(lengths, initial=0)
    tokens = [np.fromiter(text.tokens, np.int64, len(text.tokens)) for text in texts]
    return {
        "tokens_T": _joined(
            [own[:length] for own, length in zip(tokens, lengths, strict=True)], torch.int64
        ),
        "positions_T": _joined([np.arange(length) for length in lengths], torch.int64),
        "lengths": tuple(length for length in lengths if length),
        "logits_indices_N": _joined(
            [s + text.loss_positions - 1 for s, text in zip(starts, texts, strict=False)],
            torch.int64,
        ),
        "targets_N": _joined(
            [own[text.loss_positions] for own, text in zip(tokens, texts, strict=True)], torch.int64
        ),
        "sequence_N": _joined(
            [np.full(text.num_loss_tokens, n) for n, text in enumerate(texts)], torch.int64
        ),
    }


def _numbers(values: Sequence[float]) -> NDArray[np.float64]:
    return np.fromiter(values, np.float64, len(values))  # takes half as long as np.array


def _joined(parts: Sequence[NDArray[Any]], dtype: torch.dtype) -> Tensor:
    return (
        torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.zeros(0, dtype=dtype)
    )


def _pack_experts(lengths: Sequence[int], experts: Sequence[Tensor | None]) -> Tensor | None:
    shape = next((ids.shape[1:] for ids in experts if ids is not None), None)
    if shape is None:
        return None
    packed_TLk = torch.full((max(1, sum(lengths)), *shape), -1, dtype=torch.int16)
    for start, length, ids in zip(accumulate(lengths, initial=0), lengths, experts, strict=False):
        if ids is not None:
            told = ids[:length]
            packed_TLk[start : start + len(told)] = told
    return packed_TLk


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCostModel:
    """The cost model of a sequence by its length: linear in tokens, quadratic in attention."""

    per_token: float = 1.0
    per_pair: float = 0.0

    def __call__(self, length: int) -> float:
        return length * (self.per_token + self.per_pair * length / 2)


def plan_microbatches(
    lengths: Sequence[int],
    limit: int,
    ranks: int = 1,
    cost: SequenceCostModel = SequenceCostModel(),  # noqa: B008 (frozen)
) -> list[list[list[int]]]:
    """Plan the microbatches of each rank, as the indices of their items: none has more than `limit`
    tokens, except for an item that is longer by itself. `limit = 0` means one item each, in the
    given order.

    Ranks work in rounds of one microbatch each, and a round lasts as long as its costliest one. So
    all ranks have equally many microbatches of about the same cost, and if there are fewer items
    than ranks some are empty. The costliest come first, so that a lack of memory shows at once.
    """
    if limit == 0:
        bins = [[index] for index in range(len(lengths))]
    else:
        limit = max(limit, *lengths, 1)
        bins = _fill(lengths, limit, ranks, cost)
        bins.sort(key=lambda some: -sum(cost(lengths[index]) for index in some))
    bins += [[]] * (-len(bins) % ranks)
    return [bins[rank::ranks] for rank in range(ranks)]


def _fill(
    lengths: Sequence[int], limit: int, ranks: int, cost: SequenceCostModel
) -> list[list[int]]:
    """Assign the costliest items first, each to the cheapest microbatch that has room. If one does
    not fit anywhere, try again with one more round of microbatches."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    rounds = max(1, math.ceil(sum(lengths) / limit / ranks))
    while True:
        bins: list[list[int]] = [[] for _ in range(rounds * ranks)]
        sizes, costs = np.zeros(len(bins)), np.zeros(len(bins))
        for index in order:
            there = int(np.where(sizes + lengths[index] <= limit, costs, np.inf).argmin())
            if sizes[there] + lengths[index] > limit:
                break
            bins[there].append(index)
            sizes[there] += lengths[index]
            costs[there] += cost(lengths[index])
        else:
            return [some for some in bins if some]
        rounds += 1


def check(rows: Sequence[Row], *, max_tokens: int) -> None:
    """Raise ValueError for rows that cannot be trained on."""
    for row in rows:
        assert len(row.tokens) == len(row.mask) == len(row.logprobs) == len(row.advantages), (
            row.sample
        )
        if len(row.tokens) > max_tokens:
            raise ValueError(
                f"{row.sample}: a row of {len(row.tokens)} tokens does not fit into the model's "
                f"context of {max_tokens}"
            )
        if row.mask[0]:
            raise ValueError(
                f"{row.sample}: its first token is marked as sampled, but there is nothing "
                f"before it to predict it from"
            )
