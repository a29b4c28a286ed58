"""The most windowed blocks that can be held at once, when sequences sit passes out."""

from __future__ import annotations

from typing import Any

import numpy as np

from etude.core.sampling import Priority, Request
from etude.engine.blocks import BlockManager, num_windowed_blocks
from etude.engine.scheduler import Scheduler, Sequence

WINDOW, SIZE, SEQUENCES, BATCHED = 128, 16, 4, 2048


def test_whoever_sits_a_pass_out_holds_no_more_than_its_window() -> None:
    """A chunk of a rollout, a prompt that it gives way to and whose output is awaited, and one more
    next to it."""
    count = num_windowed_blocks(WINDOW, SIZE, max_num_seqs=SEQUENCES, max_batched_tokens=BATCHED)
    blocks = BlockManager(4096, SIZE, window=WINDOW, num_windowed_blocks=count)
    scheduler = Scheduler(blocks, max_num_seqs=SEQUENCES, max_batched_tokens=BATCHED)
    constraint: Any = object()  # nothing is drafted after it, and nothing is read before its output

    def step(priority: Priority, length: int, first: int) -> list[tuple[str, int]]:
        asked = Request(
            prompt=tuple(range(first, first + length)), max_tokens=9, seed=1, priority=priority
        )
        added = Sequence(
            asked, str(first), first, np.zeros(9), tokens=list(asked.prompt), constraint=constraint
        )
        scheduler.add(added)
        chosen, _ = scheduler.schedule(0)
        for sequence, _ in chosen:
            sequence.num_pending += not sequence.num_uncomputed_tokens
        return [(sequence.id, tokens) for sequence, tokens in chosen]

    assert step("batch", 3 * BATCHED, 0) == [("0", BATCHED)]
    assert step("interactive", BATCHED, 100_000) == [("100000", BATCHED)]
    assert step("interactive", 2 * BATCHED, 200_000) == [("200000", BATCHED)]
