from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.types import Row
from etude.train.rows import Cost, balance, pack, pack_text, plan, share


def row(length: int, number: int) -> Row:
    """A row whose every value says which row and position it came from."""
    return Row(
        sample=f"s{number}",
        tokens=tuple(1000 * number + t + 1 for t in range(length)),
        mask=tuple(t > 0 and (t + number) % 3 != 0 for t in range(length)),
        logprobs=tuple(-float(number) - t / 64 for t in range(length)),
        advantages=tuple(float(number) + t / 64 for t in range(length)),
        versions=(),
    )


lengths = st.lists(st.integers(1, 40), max_size=30)


@given(lengths, st.integers(40, 200))
def test_plan_places_every_row_once_within_the_limit(lengths: list[int], limit: int) -> None:
    plans = plan(lengths, limit)
    assert sorted(index for indices in plans for index in indices) == list(range(len(lengths)))
    assert all(len(indices) * max(lengths[i] for i in indices) <= limit for indices in plans)
    order = [lengths[index] for indices in plans for index in indices]
    assert order == sorted(lengths, reverse=True)
    assert plan(lengths, limit) == plans


@given(lengths, st.integers(40, 200))
def test_plan_opens_a_microbatch_only_when_the_last_is_full(lengths: list[int], limit: int) -> None:
    plans = plan(lengths, limit)
    for before in plans[:-1]:
        assert (len(before) + 1) * max(lengths[i] for i in before) > limit


def test_plan_without_a_limit_keeps_rows_apart_and_in_order() -> None:
    assert plan([3, 9, 1, 9], 0) == [[0], [1], [2], [3]]


def test_plan_puts_rows_of_like_length_together() -> None:
    assert plan([2, 9, 3, 8], 18) == [[1, 3], [2, 0]]


@given(st.lists(st.integers(2, 40), min_size=1, max_size=20), st.sampled_from([0, 40, 64, 200]))
def test_pack_loses_nothing_and_counts_no_padding(lengths: list[int], microbatch_tokens: int) -> None:
    rows = [row(length, number + 1) for number, length in enumerate(lengths)]
    microbatches = pack(rows, microbatch_tokens=microbatch_tokens, max_tokens=40)
    found = []
    for micro in microbatches:
        assert microbatch_tokens == 0 or micro.tokens_BT.numel() <= microbatch_tokens
        for b in range(len(micro.tokens_BT)):
            number = int(micro.tokens_BT[b, 0]) // 1000
            original, size = rows[number - 1], lengths[number - 1]
            assert micro.tokens_BT[b].tolist() == [*original.tokens, *[0] * (micro.tokens_BT.shape[1] - size)]
            assert micro.mask_BT[b, :size].tolist() == list(original.mask) and not micro.mask_BT[b, size:].any()
            assert micro.old_logprobs_BT[b, :size].tolist() == list(original.logprobs)
            assert micro.advantages_BT[b, :size].tolist() == list(original.advantages)
            found.append(number)
    assert sorted(found) == list(range(1, len(rows) + 1))
    assert sum(micro.num_tokens for micro in microbatches) == sum(sum(r.mask) for r in rows)


@pytest.mark.parametrize(("microbatch_tokens", "max_tokens"), [(0, 16), (8192, 16), (16, 8192)])
def test_a_row_that_does_not_fit_is_named(microbatch_tokens: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match="s7: a row of 17 tokens"):
        pack([row(4, 1), row(17, 7)], microbatch_tokens=microbatch_tokens, max_tokens=max_tokens)


def test_a_first_token_cannot_have_been_sampled() -> None:
    with pytest.raises(ValueError, match="s1: its first token"):
        pack([replace(row(2, 1), mask=(True, True))], microbatch_tokens=0, max_tokens=8)


def test_text_is_padded_in_tokens_and_in_mask() -> None:
    (micro,) = pack_text([([5, 6], [False, True]), ([7, 8, 9], [True, True, False])], microbatch_tokens=8)
    assert micro.tokens_BT.tolist() == [[7, 8, 9], [5, 6, 0]]
    assert micro.mask_BT.tolist() == [[True, True, False], [False, True, False]]
    assert micro.mask_BT.dtype == torch.bool
    assert micro.num_tokens == 2  # nothing stands before the first token of a row


COST = Cost(per_token=1000.0, per_pair=1.0)
SHAPES = st.lists(st.tuples(st.integers(1, 12), st.integers(2, 4000)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(SHAPES, st.integers(1, 8))
def test_ranks_share_all_rows_in_equally_many_passes(shapes: list[tuple[int, int]], ranks: int) -> None:
    shares = balance(shapes, ranks, COST)
    assert len(shares) == ranks and len({len(pieces) for pieces in shares}) == 1
    rows = Counter((p.of, row) for pieces in shares for p in pieces for row in range(p.start, p.stop))
    assert rows == Counter((of, row) for of, (count, _) in enumerate(shapes) for row in range(count))
    if ranks == 1:
        assert [(p.of, p.start, p.stop) for p in shares[0]] == [(of, 0, rows) for of, (rows, _) in enumerate(shapes)]


@settings(max_examples=150, deadline=None)
@given(SHAPES, st.integers(2, 8))
def test_a_step_lasts_no_longer_than_if_microbatches_were_dealt_whole(
    shapes: list[tuple[int, int]], ranks: int
) -> None:
    def lasts(rounds: list[list[float]]) -> float:
        return sum(max(costs) for costs in rounds)

    whole = sorted((rows * COST.row(width) for rows, width in shapes), reverse=True)
    dealt = [whole[at : at + ranks] for at in range(0, len(whole), ranks)]
    shares = balance(shapes, ranks, COST)
    rounds = [[(p.stop - p.start) * COST.row(shapes[p.of][1]) for p in round] for round in zip(*shares, strict=True)]
    assert lasts(rounds) <= lasts(dealt) * (1 + 1e-9)


def test_many_rows_are_balanced_and_attention_counts() -> None:
    """Rows of 4000 tokens cost more than twice as much as twice as many of 2000: by tokens the two would be equal."""
    shares = balance([(8, 4000), (16, 2000)], 2, Cost(per_token=1.0, per_pair=1.0))
    loads = [sum((p.stop - p.start) * COST.row(4000 if p.of == 0 else 2000) for p in pieces) for pieces in shares]
    assert max(loads) < 1.1 * min(loads)
    assert {p.of for p in shares[0]} == {p.of for p in shares[1]} == {0, 1}


def test_a_rank_without_work_computes_a_row_that_does_not_count() -> None:
    micro = pack([row(5, 1)], microbatch_tokens=64, max_tokens=64)
    working, idle = (share(micro, rank, 2, COST) for rank in (0, 1))
    assert [m.num_tokens for m in working] == [micro[0].num_tokens] and [m.num_tokens for m in idle] == [0]
    assert idle[0].tokens_BT.shape == (1, 5) and idle[0].advantages_BT.shape == (1, 5)
