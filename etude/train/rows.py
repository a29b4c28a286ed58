"""From rows to padded microbatches. Pure: the same rows give the same microbatches, in the same order.

As in `core.types.Row`, position t of every field speaks of token t. That a token is predicted at the position before it
is said in one place only, `loss.token_logprobs`. Shapes: B rows, T tokens, L layers that have experts, k experts of a
token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
        if len(ids) > len(rows[number].tokens):
            raise ValueError(f"{rows[number].sample}: {len(rows[number].tokens)} tokens, but experts of {len(ids)}")
        padded_BTLk[number, : len(ids)] = ids
    return padded_BTLk


def pad(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)
