"""Selection of the sequences of the next pass, preemption, and counters: small scenarios, worked
out by hand."""

from __future__ import annotations

import pytest

from etude.engine.blocks import BlockManager
from etude.engine.scheduler import Scheduler, Sequence
from etude.engine.speculate import NgramDrafter
from tests.engine.reference import OnlyEven
from tests.engine.test_scheduler import SIZE, advance, sequence
from tests.small_model import in_sequence, request


def guessing(id: int, prompt: int, limit: int, prediction: int = 200) -> Sequence:
    """A sequence with one token of a repetitive text: its drafter always has more to propose than
    fits."""
    asked = request(str(id), [5] * prompt, max_tokens=limit)
    drafter = NgramDrafter(asked.prompt, limit, [5] * prediction)
    return in_sequence(asked, id, limit, drafter=drafter)


def names(sequences: list[Sequence]) -> list[str]:
    return [sequence.id for sequence in sequences]


@pytest.mark.parametrize(("told", "made"), [(1, 5), (4, 5), (5, 5), (6, 6)])
def test_when_all_but_one_answer_the_last_still_gets_on(told: int, made: int) -> None:
    assert (
        Scheduler(BlockManager(8, SIZE), max_num_seqs=4, max_batched_tokens=told).max_batched_tokens
        == made
    )


def test_a_place_leaves_room_for_those_who_run_to_grow() -> None:
    """The first fills two blocks with its fifth token; the newcomer needs one, and one more is for
    the first."""
    for num_blocks, admitted in ((4, True), (3, False)):
        scheduler = Scheduler(
            BlockManager(num_blocks, SIZE), max_num_seqs=4, max_batched_tokens=100
        )
        scheduler.add(sequence(0, 4))
        advance(scheduler)
        scheduler.add(sequence(1, 4))
        scheduler.schedule(version=0)
        assert (names(scheduler.running) == ["0", "1"]) == admitted


def test_only_a_higher_priority_takes_a_place_and_only_as_many_as_it_needs() -> None:
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=2, max_batched_tokens=100)
    for id in range(2):
        scheduler.add(sequence(id, 3))
    advance(scheduler)
    scheduler.add(sequence(2, 3))
    advance(scheduler)
    assert (names(scheduler.running), scheduler.num_preempted) == (["0", "1"], 0), "an equal waits"
    scheduler.add(sequence(3, 3, priority="interactive"))
    advance(scheduler)
    assert (names(scheduler.running), names(scheduler.waiting)) == (["3", "0"], ["1", "2"])
    assert scheduler.num_preempted == 1
    assert scheduler.waiting[0].incarnation == 1 and scheduler.waiting[0].num_computed_tokens == 0


def test_a_priority_takes_no_place_while_there_is_one() -> None:
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=2, max_batched_tokens=100)
    scheduler.add(sequence(0, 3))
    advance(scheduler)
    scheduler.add(sequence(1, 3, priority="interactive"))
    advance(scheduler)
    assert (names(scheduler.running), scheduler.num_preempted) == (["1", "0"], 0)


def test_what_is_released_gives_back_what_it_had() -> None:
    blocks = BlockManager(8, SIZE, prefix_cache=False)
    scheduler = Scheduler(blocks, max_num_seqs=1, max_batched_tokens=100)
    running, waiting = sequence(0, 5), sequence(1, 5)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule(version=0)
    running.num_pending = 1
    assert (
        scheduler.find("0") is running and scheduler.find("1") is waiting and blocks.num_free == 6
    )
    scheduler.release(waiting)
    scheduler.release(running)
    assert scheduler.find("0") is None and scheduler.find("1") is None
    assert (blocks.num_free, running.num_pending, running.incarnation, running.block_table) == (
        8,
        0,
        1,
        None,
    )
    assert scheduler.running == scheduler.waiting == []


def test_what_was_known_is_counted_apart_from_what_is_read() -> None:
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=4, max_batched_tokens=100)
    asked = [5] * 10
    first, second = (in_sequence(request(str(n), asked), n, 8) for n in range(2))
    scheduler.add(first)
    advance(scheduler)
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (10, 0)
    scheduler.add(second)
    assert advance(scheduler) == [("0", 1), ("1", 2)], "two full blocks of its ten tokens are there"
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (20, 8)


def test_after_new_weights_nothing_is_shared_with_what_was_read_before() -> None:
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=4, max_batched_tokens=100)
    asked = [5] * 10
    first, second = (in_sequence(request(str(n), asked), n, 8) for n in range(2))
    scheduler.add(first)
    advance(scheduler)
    scheduler.stop_sharing()
    assert first.block_table is not None and first.block_table.last_cached is None
    scheduler.add(second)
    chosen, _ = scheduler.schedule(version=1)
    assert (chosen[1][1], scheduler.num_cached_tokens) == (10, 0)


def test_who_follows_a_grammar_waits_until_its_token_is_known() -> None:
    free, bound = sequence(0, 3), sequence(1, 3)
    bound.constraint = OnlyEven()
    for each in (free, bound):
        each.num_pending = 1
    assert (free.awaits_output, bound.awaits_output) == (False, True)
    bound.num_pending = 0
    assert not bound.awaits_output


def test_who_must_not_repeat_itself_waits_until_its_token_is_known() -> None:
    each = in_sequence(request("0", [2] * 3, repetition_penalty=1.1), 0, 8)
    assert not each.awaits_output
    each.num_pending = 1
    assert each.awaits_output


def proposed(scheduler: Scheduler, *sequences: Sequence) -> list[int]:
    for each in sequences:
        scheduler.add(each)
    advance(scheduler)  # reads the prompts, and every sequence samples its first token
    for each in sequences:
        each.tokens[-1] = 5
    scheduler.schedule(version=0)
    return [len(each.draft) for each in sequences]


def test_guesses_never_reach_beyond_the_last_token_that_may_be_drawn() -> None:
    """Of six tokens one has been sampled; a draft of four leaves the sixth to be sampled after
    it."""
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=4, max_batched_tokens=100)
    assert proposed(scheduler, guessing(0, 8, limit=6)) == [4]


def test_guesses_share_half_of_what_a_pass_reads() -> None:
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=4, max_batched_tokens=22)
    assert proposed(scheduler, guessing(0, 8, limit=50), guessing(1, 8, limit=50)) == [5, 5]


def test_what_one_does_not_guess_is_there_for_the_others() -> None:
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=4, max_batched_tokens=22)
    assert proposed(scheduler, guessing(0, 8, limit=4), guessing(1, 8, limit=50)) == [2, 8]


def test_guesses_take_only_blocks_that_are_free() -> None:
    """Nine tokens take three blocks of four, and there is a fourth."""
    scheduler = Scheduler(BlockManager(4, SIZE), max_num_seqs=1, max_batched_tokens=100)
    assert proposed(scheduler, guessing(0, 8, limit=50)) == [16 - 9]


def test_a_draft_is_read_whole_beside_those_who_read_one_token() -> None:
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=4, max_batched_tokens=100)
    plain, quick = sequence(0, 4), guessing(1, 8, limit=6)
    for each in (plain, quick):
        scheduler.add(each)
    advance(scheduler)
    quick.tokens[-1] = 5
    chosen, num_decode = scheduler.schedule(version=0)
    assert (chosen, num_decode) == ([(plain, 1), (quick, 5)], 1)
    assert quick.num_uncomputed_tokens == 0
    quick.num_pending = 5
    quick.rollback(3)
    assert (quick.num_pending, quick.num_computed_tokens) == (2, 8 + 5 - 3)


def test_a_sample_says_how_much_was_guessed_right() -> None:
    each = sequence(0, 3, limit=2)
    each.num_drafted, each.num_accepted = 7, 5
    for token in (8, 9):
        each.num_pending += 1
        each.append(token, -1.0, 4, ())
    sample = each.to_sample(b"experts")
    assert (
        sample.accepted_draft_tokens,
        sample.rejected_draft_tokens,
        sample.finish_reason,
        sample.tokens,
    ) == (5, 2, "length", (8, 9))
    assert (sample.experts, sample.top_logprobs, sample.versions[0].version) == (b"experts", (), 4)


def test_an_answer_ends_by_a_token_or_by_who_listens_to_it() -> None:
    for options, ends in (
        ({"stop_token_ids": (8,)}, True),
        ({"stop_check": lambda token: token == 8}, True),
        ({}, False),
    ):
        each = in_sequence(request("0", [1], **options), 0, 5)
        each.num_pending = 1
        each.append(8, -1.0, 0, ())
        assert (each.stopped, each.finish_reason) == ((True, "stop") if ends else (False, None))


def test_the_class_batch_keeps_to_its_limit_and_goes_on_later() -> None:
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=4, max_batched_tokens=100)
    for id in range(4):
        scheduler.add(sequence(id, 3, priority="batch"))
    assert len(advance(scheduler)) == 4
    scheduler.limit_batch(1)
    assert ([s.id for s in scheduler.running], scheduler.num_preempted) == (["0"], 3)
    assert [s.id for s in scheduler.waiting] == ["1", "2", "3"]
    assert [id for id, _ in advance(scheduler)] == ["0"]
    assert all(s.gave_way for s in scheduler.waiting) and not scheduler.running[0].gave_way
    scheduler.add(sequence(4, 3))
    assert [id for id, _ in advance(scheduler)] == ["4"], "the limit is none for others"
    scheduler.limit_batch(4)
    assert sorted(id for id, _ in advance(scheduler)) == ["0", "1", "2", "4"]
    assert scheduler.num_batch == 3


def test_the_class_batch_sits_out_while_the_prompt_of_another_is_read() -> None:
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=4, max_batched_tokens=8)
    scheduler.add(sequence(0, 3, priority="batch"))
    assert advance(scheduler) == [("0", 3)]
    scheduler.add(sequence(1, 20))
    scheduler.add(sequence(2, 3, priority="batch"))
    assert [advance(scheduler) for _ in range(3)] == [[("1", 8)], [("1", 8)], [("1", 4)]]
    assert scheduler.num_preempted == 0
    gave_way = {s.id: s.gave_way for s in (*scheduler.running, *scheduler.waiting)}
    assert gave_way == {"0": True, "1": False, "2": True}
    assert sorted(advance(scheduler)) == [("0", 1), ("1", 1), ("2", 3)]


def test_alone_the_class_batch_has_given_way_to_nobody() -> None:
    scheduler = Scheduler(BlockManager(100, SIZE), max_num_seqs=1, max_batched_tokens=100)
    for id in range(2):
        scheduler.add(sequence(id, 3, priority="batch"))
    advance(scheduler)
    assert not any(s.gave_way for s in (*scheduler.running, *scheduler.waiting))


@pytest.mark.parametrize(
    ("running", "coming", "num_blocks", "has_room"),
    [
        (1, 0, 9, True),  # 10 are free: 9, and one for each running sequence to grow
        (1, 0, 10, False),
        (2, 0, 8, True),
        (1, 1, 8, True),
        (1, 1, 9, False),
        (3, 0, 1, True),  # of four places
        (3, 1, 1, False),
        (4, 0, 1, False),
    ],
)
def test_there_is_room_for_another_with_what_the_others_grow_by(
    running: int, coming: int, num_blocks: int, has_room: bool
) -> None:
    scheduler = Scheduler(BlockManager(10, SIZE), max_num_seqs=4, max_batched_tokens=8)
    scheduler.running = [sequence(id, 1) for id in range(running)]
    assert scheduler._has_room(coming, num_blocks) is has_room
