from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.sampling import Priority
from etude.engine.blocks import BlockManager
from etude.engine.scheduler import GATHER_PASSES, PRIORITIES, Scheduler, Sequence
from etude.engine.speculate import MAX_DRAFT_TOKENS, NgramDrafter
from tests.small_model import in_sequence, request

SIZE = 4


def sequence(id: int, prompt: int, limit: int = 8, priority: Priority = "standard") -> Sequence:
    return in_sequence(request(str(id), [id + 1] * prompt, priority=priority), id, limit)


def with_drafts(id: int, limit: int) -> Sequence:
    """A sequence whose draft is always right and as long as allowed: it expects to repeat token
    60."""
    made = sequence(id, 20, limit)
    made.drafter = NgramDrafter(made.tokens, limit, prediction=[60] * 1000)
    return made


def advance(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Run one pass: sequences that have read their prompt sample a token; those with enough tokens
    leave."""
    chosen, num_decode = scheduler.schedule(version=0)
    assert all(count == 1 for _, count in chosen[:num_decode])
    for s, _ in chosen:
        if not s.num_uncomputed_tokens:
            s.num_pending += 1
            s.append(60, 0.0, 0, ())
            if s.finish_reason:
                scheduler.release(s)
    return [(s.id, count) for s, count in chosen]


@given(st.integers(4, 12), st.integers(1, 4), st.integers(1, 12), st.data())
def test_everyone_gets_through(
    num_blocks: int, max_num_seqs: int, max_batched_tokens: int, data: st.DataObject
) -> None:
    """Under any load, limits hold in every pass, and all requests are served in the end."""
    blocks = BlockManager(num_blocks, SIZE)
    scheduler = Scheduler(
        blocks,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        gather_tokens=data.draw(st.sampled_from((0, 8, 50))),
    )
    added = []
    for id in range(data.draw(st.integers(1, 12))):
        prompt = data.draw(st.integers(1, num_blocks * SIZE - 8))
        added.append(sequence(id, prompt, priority=data.draw(st.sampled_from(PRIORITIES))))
        scheduler.add(added[-1])
        for _ in range(data.draw(st.integers(0, 3))):
            passed = advance(scheduler)
            assert sum(count for _, count in passed) <= scheduler.max_batched_tokens
            assert len(scheduler.running) <= max_num_seqs
    for _ in range(2000):
        if not (scheduler.running or scheduler.waiting):
            break
        assert advance(scheduler)  # never stuck
    assert [len(s.logprobs) for s in added] == [8] * len(added)
    assert blocks.num_free == num_blocks


@pytest.mark.parametrize(("max_batched_tokens", "num_sequences"), [(40, 3), (100, 4), (2000, 8)])
def test_drafts_share_one_budget(max_batched_tokens: int, num_sequences: int) -> None:
    """All drafts together take at most half of what a pass reads next to the decoding sequences,
    and never more than `MAX_DRAFT_TOKENS`. A long prompt is read in the rest."""
    scheduler = Scheduler(
        BlockManager(20_000, SIZE),
        max_num_seqs=num_sequences + 1,
        max_batched_tokens=max_batched_tokens,
    )
    for id in range(num_sequences):
        scheduler.add(with_drafts(id, limit=1000))
    scheduler.add(sequence(num_sequences, 50_000))
    budget = min(MAX_DRAFT_TOKENS, (max_batched_tokens - num_sequences) // 2)
    drafted = []
    for _ in range(20):
        chosen, _ = scheduler.schedule(version=0)
        drafted.append(sum(len(s.draft) for s, _ in chosen))
        assert drafted[-1] <= budget
        assert sum(count for _, count in chosen) <= max_batched_tokens
        for s, _ in chosen:
            if not s.num_uncomputed_tokens:
                s.num_pending += 1 + len(s.draft)
                said, s.draft = len(s.draft) + 1, []
                for _ in range(said):
                    s.append(60, 0.0, 0, ())
    assert drafted[-1] > budget - num_sequences  # the budget is used, too


def test_first_come_first_served_within_a_priority() -> None:
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=2, max_batched_tokens=100)
    for id, priority in enumerate(("standard", "standard", "standard", "interactive")):
        scheduler.add(sequence(id, 3, priority=priority))
    assert advance(scheduler) == [("3", 3), ("0", 3)]
    assert [s.id for s in scheduler.waiting] == ["1", "2"]


def test_prompts_are_read_in_pieces_beside_those_who_answer() -> None:
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=3, max_batched_tokens=6)
    scheduler.add(sequence(0, 4))
    assert advance(scheduler) == [("0", 4)]
    scheduler.add(sequence(1, 11))
    scheduler.add(sequence(2, 2))
    assert advance(scheduler) == [("0", 1), ("1", 5)]
    assert advance(scheduler) == [("0", 1), ("1", 5)]
    assert advance(scheduler) == [("0", 1), ("1", 1), ("2", 2)]


def test_whoever_came_last_gives_way_when_blocks_run_out() -> None:
    blocks = BlockManager(5, SIZE, prefix_cache=False)
    scheduler = Scheduler(blocks, max_num_seqs=2, max_batched_tokens=100)
    for id in range(2):
        scheduler.add(sequence(id, 7, limit=10))
    assert advance(scheduler) == [("0", 7), ("1", 7)]
    assert advance(scheduler) == [("0", 1), ("1", 1)]  # 2 blocks each; the next token needs a third
    assert advance(scheduler) == [("0", 1)]
    assert scheduler.num_preempted == 1
    last = scheduler.waiting[0]
    assert (last.id, last.num_computed_tokens, len(last.logprobs)) == ("1", 0, 2)
    while scheduler.running or scheduler.waiting:
        passed = advance(scheduler)
        if passed[0][0] == "1":
            break
    assert passed == [("1", 9)]  # it reads its tokens again, and continues
    assert len(last.logprobs) == 3


def test_what_is_not_read_back_yet_is_counted() -> None:
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=2, max_batched_tokens=100)
    s = sequence(0, 4, limit=2)
    scheduler.add(s)
    for pending in (1, 2):
        (chosen,), _ = scheduler.schedule(version=0)
        assert chosen == (s, 4 if pending == 1 else 1)
        s.num_pending += 1
        assert s.num_sampled_tokens == pending
    assert scheduler.schedule(version=0) == ([], 0)  # the second is the last


def test_what_is_late_is_released_wherever_it_is() -> None:
    blocks = BlockManager(8, SIZE, prefix_cache=False)
    scheduler = Scheduler(blocks, max_num_seqs=2, max_batched_tokens=100)
    made = [sequence(id, 5) for id in range(4)]
    for each, deadline in zip(made, (5.0, math.inf, 6.0, 5.0), strict=True):
        each.deadline = deadline
        scheduler.add(each)
    advance(scheduler)
    assert ([s.id for s in scheduler.running], blocks.num_free) == (["0", "1"], 4)
    assert scheduler.expire(4.9) == []
    assert scheduler.expire(5.0) == [made[0], made[3]]
    assert ([s.id for s in scheduler.running], blocks.num_free) == (["1"], 6)
    assert [s.id for s in scheduler.waiting] == ["2"]
    assert made[0].incarnation == 1, "what a pass under way draws for it is ignored"


def test_the_classes_of_priority_in_order() -> None:
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=1, max_batched_tokens=100)
    for id, priority in enumerate(("batch", "standard", "interactive", "standard")):
        scheduler.add(sequence(id, 3, priority=priority))
    assert [s.id for s in scheduler.waiting] == ["2", "1", "3", "0"]


def test_what_is_shared_needs_no_room_of_its_own() -> None:
    blocks = BlockManager(6, SIZE)
    scheduler = Scheduler(blocks, max_num_seqs=3, max_batched_tokens=100)
    shared = [1, 2, 3, 4] * 3
    scheduler.add(in_sequence(request("0", [*shared, 5]), 0, 8))
    assert advance(scheduler) == [("0", 13)]
    scheduler.add(in_sequence(request("1", [*shared, 6]), 1, 8))
    scheduler.add(in_sequence(request("2", [*shared, 7]), 2, 8))
    # 2 are free: one for the second, and one that the first may need next; none for a third
    assert advance(scheduler) == [("0", 1), ("1", 1)]
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (26, 12)
    assert [s.id for s in scheduler.waiting] == ["2"]


def decoding(scheduler: Scheduler, count: int) -> None:
    """Add this many sequences that have read their prompts and decode for long."""
    for id in range(count):
        scheduler.add(sequence(id, 3, limit=1000))
    advance(scheduler)


def admitted(scheduler: Scheduler) -> set[str]:
    return {id for id, count in advance(scheduler) if count > 1}


def gathering(gather_tokens: int = 30) -> Scheduler:
    blocks = BlockManager(1000, SIZE)
    return Scheduler(blocks, max_num_seqs=10, max_batched_tokens=400, gather_tokens=gather_tokens)


def test_prompts_of_the_class_batch_wait_for_each_other() -> None:
    scheduler = gathering()
    decoding(scheduler, 2)
    for id in (7, 8):
        scheduler.add(sequence(id, 12, priority="batch"))
        assert not admitted(scheduler)
    scheduler.add(sequence(9, 12, priority="batch"))
    assert admitted(scheduler) == {"7", "8", "9"}


def test_nobody_waits_for_others_for_long() -> None:
    scheduler = gathering()
    decoding(scheduler, 2)
    for id in (7, 8):
        scheduler.add(sequence(id, 12, priority="batch"))
        passes = [admitted(scheduler) for _ in range(GATHER_PASSES + 1)]
        assert passes == [set()] * GATHER_PASSES + [{str(id)}]


def test_other_classes_and_an_idle_engine_do_not_wait() -> None:
    scheduler = gathering()
    scheduler.add(sequence(6, 12, priority="batch"))
    assert admitted(scheduler) == {"6"}
    scheduler.add(sequence(7, 12, priority="batch"))
    scheduler.add(sequence(8, 12, priority="standard"))
    assert "8" in admitted(scheduler)


def test_what_is_cached_is_not_counted_as_something_to_read() -> None:
    """Turns of long sessions wait as short prompts do."""
    scheduler = gathering(gather_tokens=30)
    decoding(scheduler, 2)
    long = sequence(7, 200, limit=1)
    scheduler.add(long)
    assert admitted(scheduler) == {"7"}
    again = in_sequence(request("8", [*long.tokens, 3, 4, 5], priority="batch"), 8, 8)
    scheduler.add(again)
    assert not admitted(scheduler)


def test_those_who_have_no_place_do_not_count() -> None:
    """Otherwise a full engine would read one prompt at a time."""
    scheduler = gathering()
    decoding(scheduler, 9)
    for id in range(10, 15):
        scheduler.add(sequence(id, 12, priority="batch"))
    assert not admitted(scheduler)
