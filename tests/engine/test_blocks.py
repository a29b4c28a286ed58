"""Blocks are never lost, never written while another sequence reads them, and never mistaken for
others."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from etude.engine.blocks import BlockManager, BlockTable

SIZE = 4


class Memory:
    """The expected contents of a run's blocks: for each the tokens before it and in it, and the
    version of the weights."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.windowed: dict[int, tuple[int, tuple[int, ...]]] = {}

    def write(self, table: BlockTable, tokens: list[int], version: int) -> None:
        for place, block in enumerate(table.blocks):
            if (place + 1) * SIZE <= len(tokens):
                content = (version, tuple(tokens[: (place + 1) * SIZE]))
                self.held[block] = content
                if place >= table.num_passed:
                    self.windowed[table.windowed[place]] = content

    def begin(self, table: BlockTable, place: int) -> None:
        """Write the next token at this index."""
        self.held[table.blocks[place]] = self.windowed[table.windowed[place]] = (-1, ())


def in_window(table: BlockTable) -> list[int]:
    return table.windowed[table.num_passed :]


@pytest.mark.parametrize("num_blocks", range(3, 12))
@pytest.mark.parametrize("seed", range(10))
def test_random_schedules(num_blocks: int, seed: int) -> None:
    window, num_windowed = 1 + seed, num_blocks + 2
    blocks = BlockManager(num_blocks, SIZE, window=window, num_windowed_blocks=num_windowed)
    memory, version, rng = Memory(), 0, Random(seed)
    live: list[tuple[BlockTable, list[int]]] = []
    draw = lambda most: rng.randint(0, most)  # noqa: E731

    def extended(table: BlockTable, count: int) -> bool:
        missing = blocks.num_blocks_for(count) - len(table.windowed)
        if missing > blocks.num_windowed_free or not blocks.allocate(table, count):
            return False
        blocks.allocate_windowed(table, count)
        return True

    for _ in range(150):
        action = draw(10)
        if action < 4:
            tokens = [draw(1) for _ in range(1 + draw(2 * SIZE + 1))]
            table = blocks.match_prefix(tokens, version)
            found = len(table.blocks) * SIZE
            assert found < len(tokens) and len(table.windowed) == len(table.blocks)
            # the found blocks hold exactly what would be computed, and all that the next token sees
            assert table.num_passed * SIZE <= max(0, found - window + 1)
            for place, block in enumerate(table.blocks):
                content = (version, tuple(tokens[: (place + 1) * SIZE]))
                assert memory.held[block] == content
                if place >= table.num_passed:
                    assert memory.windowed[table.windowed[place]] == content
            if not extended(table, len(tokens)):
                blocks.free(table)
                continue
            memory.write(table, tokens, version)
            blocks.cache_full_blocks(table, tokens, len(tokens))
            live.append((table, tokens))
        elif action < 7 and live:
            table, tokens = live[draw(len(live) - 1)]
            written = len(tokens) // SIZE
            if extended(table, len(tokens) + 1):
                # The block of the next token belongs to no other sequence.
                assert sum(table.blocks[written] in other.blocks for other, _ in live) == 1
                assert sum(table.windowed[written] in in_window(other) for other, _ in live) == 1
                tokens.append(draw(1))
                memory.begin(table, written)
                if table.version == version and table.last_cached is not None:
                    memory.write(table, tokens, version)
                    blocks.cache_full_blocks(table, tokens, len(tokens))
        elif action == 10 and live:
            # Blocks that the window has passed are released, and never more than those.
            table, tokens = live[draw(len(live) - 1)]
            blocks.pass_window(table, len(tokens))
            assert table.num_passed * SIZE <= max(0, len(tokens) - window + 1)
            assert len(table.windowed) == blocks.num_blocks_for(len(tokens))
        elif action == 7:
            version += 1
            for table, _ in live:
                blocks.stop_sharing(table)
        elif live:
            blocks.free(live.pop(draw(len(live) - 1))[0])
        used = Counter(block for table, _ in live for block in table.blocks)
        assert blocks.num_free == num_blocks - len(used)
        used = Counter(block for table, _ in live for block in in_window(table))
        assert blocks.num_windowed_free == num_windowed - len(used)
        assert all(len(set(in_window(table))) == len(in_window(table)) for table, _ in live)
    for table, _ in live:
        blocks.free(table)
    assert blocks.num_free == num_blocks and blocks.num_windowed_free == num_windowed
    everything = BlockTable(version)
    assert blocks.allocate(everything, num_blocks * SIZE)
    assert sorted(everything.blocks) == list(range(num_blocks))
    assert not blocks.allocate(everything, num_blocks * SIZE + 1)


def test_a_prefix_is_found_up_to_where_its_window_is_known_too() -> None:
    """At the end of a block a token sees itself and one whole block before it."""
    blocks = BlockManager(20, SIZE, window=5, num_windowed_blocks=6)
    table, tokens = blocks.match_prefix([1] * 17, 0), [1] * 17
    for computed, count in ((0, 8), (8, 16), (16, 17)):
        blocks.pass_window(table, computed)
        assert blocks.allocate(table, count)
        blocks.allocate_windowed(table, count)
        blocks.cache_full_blocks(table, tokens, count)
    assert table.num_passed == 3 and len(table.windowed) == 5
    assert blocks.num_windowed_free == 6 - 2
    blocks.free(table)
    assert [num_known(blocks, [1] * n) for n in (5, 9, 13, 17)] == [1, 2, 3, 4]

    other = blocks.match_prefix([2] * 20, 0)
    assert blocks.allocate(other, 12)
    blocks.allocate_windowed(other, 12)  # two that hold nothing, and those released first
    assert [num_known(blocks, [1] * n) for n in (5, 9, 13, 17)] == [0, 2, 3, 4]
    blocks.allocate_windowed(other, 20)
    assert [num_known(blocks, [1] * n) for n in (5, 9, 13, 17)] == [0, 0, 0, 4]
    found = blocks.match_prefix([1] * 17, 0)
    assert found.num_passed == 3 and len(found.blocks) == len(found.windowed) == 4


def test_a_full_block_waits_in_the_window_until_it_is_cached() -> None:
    """Its last token may not be read back yet."""
    blocks = BlockManager(8, SIZE, window=1, num_windowed_blocks=6)
    tokens = [1] * (2 * SIZE + 1)
    table = blocks.match_prefix(tokens, 0)
    assert blocks.allocate(table, len(tokens))
    blocks.allocate_windowed(table, len(tokens))
    blocks.pass_window(table, len(tokens))
    assert table.num_passed == 0 and blocks.num_windowed_free == 3
    blocks.cache_full_blocks(table, tokens, len(tokens))
    blocks.pass_window(table, len(tokens))
    assert table.num_passed == 2 and blocks.num_windowed_free == 5


def learned(blocks: BlockManager, tokens: list[int], version: int = 0) -> BlockTable:
    table = blocks.match_prefix(tokens, version)
    assert blocks.allocate(table, len(tokens))
    blocks.cache_full_blocks(table, tokens, len(tokens))
    return table


def num_known(blocks: BlockManager, tokens: list[int], version: int = 0) -> int:
    table = blocks.match_prefix(tokens, version)
    blocks.free(table)
    return table.num_cached_blocks


def test_beginnings_are_shared_and_the_rest_is_not() -> None:
    blocks = BlockManager(10, SIZE)
    first = learned(blocks, [1] * 8 + [2])
    second = learned(blocks, [1] * 8 + [3] * 4)
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert blocks.num_free == 6
    blocks.free(first)
    assert blocks.num_free == 7  # the second still holds the prefix
    assert num_known(blocks, [1] * 8 + [3] * 4 + [0]) == 3
    assert num_known(blocks, [1] * 8) == 1  # the last token has to be computed
    assert num_known(blocks, [1] * 9) == 2
    # the same tokens after other tokens are a different prefix
    assert num_known(blocks, [1] * 4 + [3] * 5) == 1
    assert num_known(blocks, [1] * 9, version=1) == 0


def test_two_that_compute_the_same_at_once_keep_their_own() -> None:
    blocks = BlockManager(10, SIZE)
    one, two = (blocks.match_prefix([1] * 9, 0) for _ in range(2))
    for table in (one, two):
        blocks.allocate(table, 9)
        blocks.cache_full_blocks(table, [1] * 9, 9)
    assert not set(one.blocks) & set(two.blocks)
    blocks.free(one)
    blocks.free(two)
    assert num_known(blocks, [1] * 9) == 2
    assert blocks.num_free == 10


def test_the_longest_unused_goes_first_and_ends_go_before_beginnings() -> None:
    blocks = BlockManager(4, SIZE)
    for token in (1, 2):
        blocks.free(learned(blocks, [token] * 8))
    assert (num_known(blocks, [1] * 9), num_known(blocks, [2] * 9)) == (2, 2)
    blocks.free(learned(blocks, [1] * 8 + [3]))  # 1 was used last, and needed one more block
    assert (num_known(blocks, [1] * 9), num_known(blocks, [2] * 9)) == (2, 1)


def test_without_reuse_nothing_is_found() -> None:
    blocks = BlockManager(4, SIZE, prefix_cache=False)
    blocks.free(learned(blocks, [1] * 8))
    assert num_known(blocks, [1] * 9) == 0
