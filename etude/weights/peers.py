"""Communication between the ranks of a trainer while they publish together: all-to-all messages.

The protocol has three implementations: `SinglePeer`, `InProcessPeer` for ranks that are threads,
and `trainer/peers.py` over torch.distributed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol


class Peers(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_to_all(self, messages: Sequence[bytes]) -> list[bytes]:
        """Send message i to rank i; return the messages from all ranks, including this one. All
        ranks must call it, each from one thread, and equally often."""


class SinglePeer:
    rank, world_size = 0, 1

    def all_to_all(self, messages: Sequence[bytes]) -> list[bytes]:
        return list(messages)


class InProcessPeer:
    """One of `world_size` ranks in one process. `InProcessPeer.group(4)` makes all of them."""

    def __init__(
        self, rank: int, world: int, board: dict[tuple[int, int], bytes], barrier: threading.Barrier
    ) -> None:
        self.rank = rank
        self.world_size = world
        self._board = board
        self._barrier = barrier

    @classmethod
    def group(cls, world: int, timeout_s: float = 60.0) -> list[InProcessPeer]:
        board: dict[tuple[int, int], bytes] = {}
        barrier = threading.Barrier(world, timeout=timeout_s)
        return [cls(rank, world, board, barrier) for rank in range(world)]

    def all_to_all(self, messages: Sequence[bytes]) -> list[bytes]:
        for to, message in enumerate(messages):
            self._board[self.rank, to] = message
        self._barrier.wait()
        received = [self._board[sender, self.rank] for sender in range(self.world_size)]
        self._barrier.wait()  # no rank writes its next messages before all have read these
        return received
