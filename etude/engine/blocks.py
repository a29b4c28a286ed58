"""The block manager of the KV cache: which sequence uses which block, and which blocks are kept for
prefix reuse. Pure: no tensor.

A block holds the keys and values of `block_size` neighbouring tokens of a sequence. A full one is
identified by its tokens, all tokens before them, and the weight version and adapter that computed
them; a
sequence with the same beginning uses the same block. Only full blocks are shared, and only the last
block of a sequence is ever written, so nothing needs copying.

A block nobody uses stays known until its place is needed; the one that was given up first goes
first. A sequence gives up its blocks from the last to the first, so that what remains known is
always a beginning. Where no layer sees further back than a window, a sequence gives up what it has
left behind while it goes on.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

_Key = tuple[int, int, int, bytes]
"""Version, adapter, number of the block before (0: none), tokens. Numbers are never used twice, so
a number stands for all the tokens up to there, and two different beginnings can never be taken for
the same one."""


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in order."""

    version: int
    adapter: int = 0
    """The number of the adapter that computes it beside the weights; 0: none."""
    blocks: list[int] = field(default_factory=list)
    num_passed: int = 0
    """How many blocks, from the first, were given up because no token sees them any more; their
    numbers mean nothing."""
    num_cached_blocks: int = 0
    """How many blocks, from the first, are cached for prefix reuse."""
    last_cached: int | None = 0
    """The number of the last cached block; None when the sequence shares no further blocks."""


class BlockManager:
    """The blocks of the KV cache, with reference counts and a prefix cache."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        # hold nothing that is known; used from the end
        self._free_blocks = list(range(num_blocks - 1, -1, -1))
        # known, but used by nobody; the first goes first
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._cached: dict[_Key, tuple[int, int]] = {}  # -> block, number
        self._keys: dict[int, _Key] = {}  # block -> what it is known by
        self._numbers = itertools.count(1)

    @property
    def num_free(self) -> int:
        return len(self._free_blocks) + len(self._evictable)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, tokens: Sequence[int], version: int, adapter: int = 0) -> BlockTable:
        """Return a block table with the longest cached prefix of `tokens`, whose blocks it holds
        until `free`. At least the last token is left out: it has to be computed, for what comes
        after it."""
        table, size = BlockTable(version, adapter), self.block_size
        if not self._prefix_cache:
            table.last_cached = None
            return table
        data, width = _packed(tokens), _WIDTH * size
        for start in range(0, (len(tokens) - 1) // size * width, width):
            assert table.last_cached is not None
            key = (version, adapter, table.last_cached, data[start : start + width])
            found = self._cached.get(key)
            if found is None:
                break
            block, table.last_cached = found
            self._evictable.pop(block, None)
            self._ref_counts[block] += 1
            table.blocks.append(block)
        table.num_cached_blocks = len(table.blocks)
        return table

    def allocate(self, table: BlockTable, total_tokens: int) -> bool:
        """Extend a table to blocks for so many tokens in all, those that it has included. False,
        and nothing is changed, if there are not enough free blocks."""
        missing = self.num_blocks_for(total_tokens) - len(table.blocks)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            table.blocks.append(self._allocate_block())
        return True

    def max_tokens_for(self, table: BlockTable) -> int:
        """The most tokens that a table could be extended to now."""
        return (len(table.blocks) + self.num_free) * self.block_size

    def cache_full_blocks(
        self, table: BlockTable, tokens: Sequence[int], num_computed_tokens: int
    ) -> None:
        """Cache the full blocks of the first `num_computed_tokens` tokens for prefix reuse: they
        are written from now on. Of what somebody else already has, ours stays a private copy."""
        size = self.block_size
        while table.last_cached is not None:
            start = table.num_cached_blocks * size
            if start + size > num_computed_tokens:
                break
            block = table.blocks[table.num_cached_blocks]
            written = _packed(tokens[start : start + size])
            key = (table.version, table.adapter, table.last_cached, written)
            if key not in self._cached:
                self._cached[key] = block, next(self._numbers)
                self._keys[block] = key
            table.last_cached = self._cached[key][1]
            table.num_cached_blocks += 1

    def stop_sharing(self, table: BlockTable) -> None:
        """Stop sharing the blocks that this sequence fills from now on: other weights write
        them."""
        table.last_cached = None

    def pass_window(self, table: BlockTable, num_computed_tokens: int, window: int) -> None:
        """Give up the blocks that no token behind the first `num_computed_tokens` sees, itself
        being the last of `window` tokens. Passes that see them must have been started."""
        end = max(0, num_computed_tokens - window + 1) // self.block_size
        if table.last_cached is not None:
            # A full block may wait to be cached until its last token is read back.
            end = min(end, table.num_cached_blocks)
        for place in range(table.num_passed, end):
            self._give_up(table.blocks[place])
        table.num_passed = max(table.num_passed, end)

    def free(self, table: BlockTable) -> None:
        for block in reversed(table.blocks[table.num_passed :]):
            self._give_up(block)
        table.blocks.clear()

    def _give_up(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if block in self._keys:
                self._evictable[block] = None
            else:
                self._free_blocks.append(block)

    def _allocate_block(self) -> int:
        if self._free_blocks:
            block = self._free_blocks.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            del self._cached[self._keys.pop(block)]
        self._ref_counts[block] = 1
        return block


_WIDTH = array("i").itemsize


def _packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()
