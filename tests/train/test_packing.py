from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.types import Row
from etude.train.packing import (
    RolloutSequence,
    SequenceCostModel,
    TokenSequence,
    check,
    pack_batch,
    pack_rollouts,
    plan_microbatches,
)
from etude.train.supervised import pack_pairs


def row(length: int, number: int) -> Row:
    """A row whose values each encode their row and position."""
    return Row(
        sample=f"s{number}",
        tokens=tuple(1000 * number + t + 1 for t in range(length)),
        mask=tuple(t > 0 and (t + number) % 3 != 0 for t in range(length)),
        logprobs=tuple(-float(number) - t / 64 for t in range(length)),
        advantages=tuple(float(number) + t / 64 for t in range(length)),
        versions=(),
    )


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=30)
COST = SequenceCostModel(per_token=1000.0, per_pair=1.0)


@given(lengths, st.integers(1, 200), st.integers(1, 8))
def test_ranks_share_all_items_in_equally_many_passes_within_the_limit(
    lengths: list[int], limit: int, ranks: int
) -> None:
    plans = plan_microbatches(lengths, limit, ranks, COST)
    assert len(plans) == ranks and len({len(own) for own in plans}) == 1
    assert sorted(index for own in plans for some in own for index in some) == list(
        range(len(lengths))
    )
    for some in (some for own in plans for some in own):
        assert sum(lengths[index] for index in some) <= max(limit, max(lengths))
    assert plan_microbatches(lengths, limit, ranks, COST) == plans


@given(lengths, st.integers(1, 4))
def test_without_a_limit_items_stay_apart_and_in_order(lengths: list[int], ranks: int) -> None:
    plans = plan_microbatches(lengths, 0, ranks)
    found = [some for together in zip(*plans, strict=True) for some in together]
    assert found[: len(lengths)] == [[index] for index in range(len(lengths))]
    assert found[len(lengths) :] == [[]] * (-len(lengths) % ranks)


@given(lengths, st.integers(40, 200))
def test_there_are_no_more_microbatches_than_it_takes(lengths: list[int], limit: int) -> None:
    """No two microbatches would fit into one, except for the one item that is left over."""
    (bins,) = plan_microbatches(lengths, limit)
    assert len(bins) <= max(1, math.ceil(sum(lengths) / (limit - max(lengths) + 1)))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(2, 4000), min_size=1, max_size=60), st.integers(1, 8))
def test_microbatches_of_a_round_cost_about_the_same(lengths: list[int], ranks: int) -> None:
    """While there is room, no microbatch costs more than the cheapest one plus an item."""
    for together in zip(*plan_microbatches(lengths, sum(lengths), ranks, COST), strict=True):
        costs = [sum(COST(lengths[index]) for index in some) for some in together]
        assert max(costs) <= min(costs) + COST(max(lengths))


def test_attention_counts() -> None:
    """Two rows of 4000 tokens cost more than four of 2000, although they have as many tokens."""
    cost = SequenceCostModel(per_token=1.0, per_pair=1.0)
    first, second = plan_microbatches([4000, 4000, *[2000] * 8], 10**6, 2, cost)
    for own in (first, second):
        assert sorted(([4000, 4000] + [2000] * 8)[index] for index in own[0]) == [2000] * 4 + [4000]


@given(st.lists(st.integers(2, 40), min_size=1, max_size=20))
def test_packing_loses_nothing_that_counts_and_pads_nothing(lengths: list[int]) -> None:
    rows = [row(length, number + 1) for number, length in enumerate(lengths)]
    micro = pack_rollouts(
        [RolloutSequence.from_row(each, number, 0.5 * number) for number, each in enumerate(rows)]
    )
    counted = [
        (number, t)
        for number, each in enumerate(rows)
        for t in range(len(each.tokens))
        if each.mask[t]
    ]
    assert (
        micro.row_ids_N.tolist() == micro.sequence_N.tolist() == [number for number, _ in counted]
    )
    assert micro.targets_N.tolist() == [rows[number].tokens[t] for number, t in counted]
    assert micro.old_logprobs_N.tolist() == [rows[number].logprobs[t] for number, t in counted]
    assert micro.advantages_N.tolist() == [rows[number].advantages[t] for number, t in counted]
    assert micro.weights_N.tolist() == [0.5 * number for number, _ in counted]
    # Each is predicted from the token before it, at that token's position, in its own sequence.
    assert micro.tokens_T[micro.logits_indices_N].tolist() == [
        rows[number].tokens[t - 1] for number, t in counted
    ]
    assert micro.positions_T[micro.logits_indices_N].tolist() == [t - 1 for _, t in counted]
    last = dict(counted)
    assert micro.lengths == tuple(last.values()) or not counted
    assert (
        len(micro.tokens_T)
        == len(micro.positions_T)
        == sum(micro.lengths)
        == (sum(last.values()) or 1)
    )


def test_what_stands_behind_the_last_token_that_counts_is_not_read() -> None:
    packed = pack_batch(
        [
            TokenSequence([5, 6, 4, 4], [False, True, False, False]),
            TokenSequence([7, 8, 9], [True, True, True]),
        ]
    )
    assert packed.tokens_T.tolist() == [5, 7, 8] and packed.positions_T.tolist() == [0, 0, 1]
    assert packed.targets_N.tolist() == [6, 8, 9]  # no token comes before the first
    assert packed.logits_indices_N.tolist() == [0, 1, 2] and packed.sequence_N.tolist() == [0, 1, 1]
    assert packed.lengths == (1, 2)


def test_experts_of_tokens_that_are_not_read_are_left_out() -> None:
    """Each row keeps its own experts: those of a row's last tokens are not assigned to the next
    row."""
    rows = [
        replace(row(6, 1), mask=(False, True, True, False, False, False)),
        replace(row(5, 2), mask=(False, True, True, False, False)),
    ]
    ids = {each.sample: torch.full((len(each.tokens), 2, 1), n) for n, each in enumerate(rows, 1)}
    del ids["s2"]  # this row has none
    micro = pack_rollouts(
        [RolloutSequence.from_row(each, number) for number, each in enumerate(rows)],
        lambda each: ids.get(each.sample),
    )
    assert micro.lengths == (2, 2) and micro.experts_TLk is not None
    assert micro.experts_TLk[:, 0, 0].tolist() == [1, 1, -1, -1]


def test_a_rank_without_work_reads_a_token_that_does_not_count() -> None:
    for idle in (
        pack_batch([]),
        pack_batch([TokenSequence([5, 6], [False, False])]),
        pack_rollouts([]),
        pack_pairs([]),
    ):
        assert idle.lengths == (1,) and idle.tokens_T.shape == (1,) and idle.num_loss_tokens == 0


def test_a_row_that_does_not_fit_is_named() -> None:
    rows = [row(4, 1), row(17, 7)]
    with pytest.raises(ValueError, match="s7: a row of 17 tokens"):
        check(rows, max_tokens=16)
    check(rows, max_tokens=17)


def test_a_first_token_cannot_have_been_sampled() -> None:
    with pytest.raises(ValueError, match="s1: its first token"):
        check([replace(row(2, 1), mask=(True, True))], max_tokens=8)
