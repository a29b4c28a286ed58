"""How the ranks of one trainer speak while they publish together: everyone hands a message to everyone, in one move.

The seam has three implementations: `Alone`, `InProcess` for ranks that are threads, and `run/peers.py` over
torch.distributed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol


class Peers(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        """Message i goes to rank i; returns what each rank, this one included, had for us. All ranks must call it, each
        from one thread, and equally often."""


class Alone:
    rank, world = 0, 1

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        return list(messages)


class InProcess:
    """One of `world` ranks in one process. `InProcess.group(4)` makes all of them."""

    def __init__(self, rank: int, world: int, board: dict[tuple[int, int], bytes], barrier: threading.Barrier) -> None:
        self.rank, self.world, self._board, self._barrier = rank, world, board, barrier

    @classmethod
    def group(cls, world: int, timeout_s: float = 60.0) -> list[InProcess]:
        board: dict[tuple[int, int], bytes] = {}
        barrier = threading.Barrier(world, timeout=timeout_s)
        return [cls(rank, world, board, barrier) for rank in range(world)]

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        for to, message in enumerate(messages):
            self._board[self.rank, to] = message
        self._barrier.wait()
        received = [self._board[sender, self.rank] for sender in range(self.world)]
        self._barrier.wait()  # nobody writes the next messages before all have read these
        return received
