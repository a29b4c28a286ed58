"""The block manager of the KV cache: the blocks of each sequence, and the blocks that are kept for
prefix reuse. Pure: no tensor.

A block holds the keys and values of `block_size` consecutive tokens of a sequence. A full block is
identified by its tokens, all tokens before them, and the weight version and adapter that computed
them; a sequence with the same prefix uses the same block. Only full blocks are shared, and only the
last block of a sequence is ever written, so no block needs copying.

An unused block stays cached until its space is needed; the block released first is evicted first. A
sequence releases its blocks from the last to the first, so that the blocks that remain cached
always form a prefix.

Layers with a window may keep their keys and values in windowed blocks, a separate pool. A sequence
holds as many of those as its next tokens see, releases the others as it advances, and takes new
ones pass by pass: the pool is large enough for all sequences that may run at once
(`num_windowed_blocks`), so no sequence ever waits for one. A sequence that begins after a cached
prefix needs all of its blocks, but only those windowed blocks that are within the window.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

_Key = tuple[int, int, int, bytes]
"""Version, adapter, number of the previous block (0: none), tokens. Numbers are never reused, so a
number stands for all tokens up to that block, and two different prefixes can never be confused."""


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in order."""

    version: int
    adapter: int = 0
    """The number of the adapter that is applied to the weights; 0: none."""
    blocks: list[int] = field(default_factory=list)
    windowed: list[int] = field(default_factory=list)
    """The windowed blocks, at the same indices."""
    num_passed: int = 0
    """The number of leading windowed blocks that were released because no token sees them any more;
    their entries are invalid."""
    num_cached_blocks: int = 0
    """The number of leading blocks that are cached for prefix reuse."""
    last_cached: int | None = 0
    """The number of the last cached block; None when the sequence shares no further blocks."""


class _BlockPool:
    """A pool of blocks with reference counts, a free list, and an index of the blocks that hold a
    prefix which others may share."""

    def __init__(self, num_blocks: int) -> None:
        # contents are not cached; taken from the end
        self._free_blocks = list(range(num_blocks - 1, -1, -1))
        # cached, but unused; the first is evicted first
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self.known: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}

    @property
    def num_free(self) -> int:
        return len(self._free_blocks) + len(self._evictable)

    def allocate(self) -> int:
        if self._free_blocks:
            block = self._free_blocks.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            del self.known[self._keys.pop(block)]
        self._ref_counts[block] = 1
        return block

    def publish(self, block: int, key: Hashable) -> None:
        self.known[key] = block
        self._keys[block] = key

    def share(self, block: int) -> None:
        self._evictable.pop(block, None)
        self._ref_counts[block] += 1

    def give_up(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if block in self._keys:
                self._evictable[block] = None
            else:
                self._free_blocks.append(block)


class BlockManager:
    """The blocks of the KV cache, with reference counts and a prefix cache."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        window: int | None = None,
        num_windowed_blocks: int = 0,
    ) -> None:
        """`window`: of the layers that have one; ignored without windowed blocks."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._pool = _BlockPool(num_blocks)
        self._numbers = [0] * num_blocks  # of the cached blocks
        self._next_number = itertools.count(1)
        self._window = window if num_windowed_blocks else None
        self._windowed = _BlockPool(num_windowed_blocks)  # cached under the blocks' numbers

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_windowed_free(self) -> int:
        return self._windowed.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, tokens: Sequence[int], version: int, adapter: int = 0) -> BlockTable:
        """Return a block table with the longest cached prefix of `tokens`, whose blocks it holds
        until `free`. At least the last token is left out: it must be computed, because the next one
        depends on it."""
        table = BlockTable(version, adapter)
        size = self.block_size
        if not self._prefix_cache:
            table.last_cached = None
            return table
        found: list[int] = []
        data = _packed(tokens)
        width = _WIDTH * size
        number = 0
        for start in range(0, (len(tokens) - 1) // size * width, width):
            block = self._pool.known.get((version, adapter, number, data[start : start + width]))
            if block is None:
                break
            number = self._numbers[block]
            found.append(block)
        if self._window is not None:
            self._match_windowed(table, found)
        for block in found:
            self._pool.share(block)
        table.blocks = found
        table.num_cached_blocks = len(found)
        table.last_cached = self._numbers[found[-1]] if found else 0
        return table

    def _match_windowed(self, table: BlockTable, found: list[int]) -> None:
        """Cut the found blocks after the last position whose whole window is cached as well, and
        hold that window."""
        windowed = [self._windowed.known.get(self._numbers[block]) for block in found]
        end = length = 0  # of the cached blocks without a gap
        for place, block in enumerate(windowed, 1):
            length = 0 if block is None else length + 1
            if length >= place - self._num_passed(place * self.block_size):
                end = place
        del found[end:]
        table.num_passed = self._num_passed(end * self.block_size)
        table.windowed = [block or 0 for block in windowed[:end]]
        for block in table.windowed[table.num_passed :]:
            self._windowed.share(block)

    def _num_passed(self, num_tokens: int) -> int:
        """The number of blocks that no token after the first `num_tokens` sees; a token is the last
        of its own window."""
        assert self._window is not None
        return max(0, num_tokens - self._window + 1) // self.block_size

    def allocate(self, table: BlockTable, total_tokens: int) -> bool:
        """Extend a table to blocks for this many tokens in total, including those that it already
        has. Return False, and change nothing, if there are not enough free blocks."""
        missing = self.num_blocks_for(total_tokens) - len(table.blocks)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            table.blocks.append(self._pool.allocate())
        return True

    def max_tokens_for(self, table: BlockTable) -> int:
        """The most tokens that a table could be extended to now."""
        return (len(table.blocks) + self.num_free) * self.block_size

    def allocate_windowed(self, table: BlockTable, total_tokens: int) -> None:
        """Extend a table to windowed blocks for this many tokens in total, which the next pass
        computes."""
        if self._window is not None:
            for _ in range(self.num_blocks_for(total_tokens) - len(table.windowed)):
                assert self._windowed.num_free, "too few windowed blocks for those that run"
                table.windowed.append(self._windowed.allocate())

    def cache_full_blocks(
        self, table: BlockTable, tokens: Sequence[int], num_computed_tokens: int
    ) -> None:
        """Cache the full blocks of the first `num_computed_tokens` tokens for prefix reuse: they
        will not be written again. If an equal block is already cached, ours stays a private
        copy."""
        size = self.block_size
        while table.last_cached is not None:
            place = table.num_cached_blocks
            if (place + 1) * size > num_computed_tokens:
                break
            written = _packed(tokens[place * size : (place + 1) * size])
            key = (table.version, table.adapter, table.last_cached, written)
            if key not in self._pool.known:
                self._pool.publish(table.blocks[place], key)
                self._numbers[table.blocks[place]] = next(self._next_number)
            number = self._numbers[self._pool.known[key]]
            if self._window is not None and number not in self._windowed.known:
                self._windowed.publish(table.windowed[place], number)
            table.last_cached = number
            table.num_cached_blocks += 1

    def stop_sharing(self, table: BlockTable) -> None:
        """Stop sharing the blocks that this sequence fills from now on: other weights write
        them."""
        table.last_cached = None

    def pass_window(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Release the windowed blocks that no token after the first `num_computed_tokens` sees, and
        those after these tokens, which a draft left. Passes that see them must have been
        launched."""
        if self._window is None:
            return
        end = self._num_passed(num_computed_tokens)
        if table.last_cached is not None:
            # A full block may wait to be cached until its last token is read back.
            end = min(end, table.num_cached_blocks)
        for place in range(table.num_passed, end):
            self._windowed.give_up(table.windowed[place])
        table.num_passed = max(table.num_passed, end)
        while len(table.windowed) > self.num_blocks_for(num_computed_tokens):
            self._windowed.give_up(table.windowed.pop())

    def free(self, table: BlockTable) -> None:
        for block in reversed(table.blocks):
            self._pool.give_up(block)
        for block in reversed(table.windowed[table.num_passed :]):
            self._windowed.give_up(block)
        table.blocks.clear()
        table.windowed.clear()


def num_windowed_blocks(
    window: int, block_size: int, *, max_num_seqs: int, max_batched_tokens: int
) -> int:
    """The most windowed blocks that sequences can hold at once. Each has those of its window, which
    need not begin or end at a block boundary, and one that waits to be cached; in addition there
    are the new tokens of a pass, and those of the previous pass, whose output is still awaited."""
    batched = max(max_batched_tokens, max_num_seqs + 1)
    return max_num_seqs * (-(-window // block_size) + 3) + 2 * -(-batched // block_size)


_WIDTH = array("i").itemsize


def _packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()
