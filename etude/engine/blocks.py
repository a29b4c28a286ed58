"""Who uses which block of the key/value memory, and which blocks hold something worth keeping. Pure: no tensor.

A block holds the keys and values of `block_size` neighbouring tokens of a sequence. A full one is known by its tokens,
all tokens before them, and the weight version that computed them; whoever starts with the same uses the same block.
Only full blocks are shared, and only the last block of a sequence is ever written, so nothing needs copying.

A block nobody uses stays known until its place is needed; the one that was given up first goes first. A sequence gives
up its blocks from the last to the first, so that what remains known is always a beginning.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

_Key = tuple[int, int, bytes]
"""Version, number of the block before (0: none), tokens. Numbers are never used twice, so a number stands for all the
tokens up to there, and two different beginnings can never be taken for the same one."""


@dataclass(slots=True)
class Table:
    """The blocks of one sequence, in order."""

    version: int
    blocks: list[int] = field(default_factory=list)
    num_known: int = 0
    """How many of them, from the first, are in the chain that `last` ends."""
    last: int | None = 0
    """The number of the last known block; None when the sequence has nothing more that others may use."""


class Blocks:
    def __init__(self, num_blocks: int, block_size: int, *, reuse: bool = True) -> None:
        self.num_blocks, self.block_size, self._reuse = num_blocks, block_size, reuse
        self._blank = list(range(num_blocks - 1, -1, -1))  # hold nothing that is known; used from the end
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, but used by nobody; the first goes first
        self._num_users = [0] * num_blocks
        self._known: dict[_Key, tuple[int, int]] = {}  # -> block, number
        self._keys: dict[int, _Key] = {}  # block -> what it is known by
        self._numbers = itertools.count(1)

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._idle)

    def needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def open(self, tokens: Sequence[int], version: int) -> Table:
        """A table that holds all that is known of the beginning of `tokens`. At least the last token is left out: it
        has to be computed, for what comes after it."""
        table, size = Table(version), self.block_size
        if not self._reuse:
            table.last = None
            return table
        data, width = _packed(tokens), _WIDTH * size
        for start in range(0, (len(tokens) - 1) // size * width, width):
            assert table.last is not None
            found = self._known.get((version, table.last, data[start : start + width]))
            if found is None:
                break
            block, table.last = found
            self._idle.pop(block, None)
            self._num_users[block] += 1
            table.blocks.append(block)
        table.num_known = len(table.blocks)
        return table

    def grow(self, table: Table, num_tokens: int) -> bool:
        """Makes room for so many tokens. False, and nothing is changed, if there are not enough free blocks."""
        missing = self.needed(num_tokens) - len(table.blocks)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            table.blocks.append(self._take())
        return True

    def room(self, table: Table) -> int:
        """The most tokens that it could be made to hold now."""
        return (len(table.blocks) + self.num_free) * self.block_size

    def learn(self, table: Table, tokens: Sequence[int], count: int) -> None:
        """The first `count` tokens are written from now on, and the blocks that they fill may be used by others. Of
        what somebody else already has, ours stays a private copy."""
        size = self.block_size
        while table.last is not None and (table.num_known + 1) * size <= count:
            start, block = table.num_known * size, table.blocks[table.num_known]
            key = (table.version, table.last, _packed(tokens[start : start + size]))
            if key not in self._known:
                self._known[key] = block, next(self._numbers)
                self._keys[block] = key
            table.last = self._known[key][1]
            table.num_known += 1

    def seal(self, table: Table) -> None:
        """From now on other weights write into this sequence: what it computes is of no use to others."""
        table.last = None

    def close(self, table: Table) -> None:
        for block in reversed(table.blocks):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._blank.append(block)
        table.blocks.clear()

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._known[self._keys.pop(block)]
        self._num_users[block] = 1
        return block


_WIDTH = array("i").itemsize


def _packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()
