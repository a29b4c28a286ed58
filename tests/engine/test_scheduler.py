from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.engine.prefix import PrefixCache
from etude.engine.scheduler import Scheduler
from tests.small_model import request


@given(st.integers(1, 5), st.lists(st.integers(0, 9), max_size=60))
def test_rows_are_always_the_first_ones(max_batch: int, script: list[int]) -> None:
    """0-4: a request comes; 5-7: newcomers are admitted; 8-9: some running one ends. The rows of a model of the cache
    move as `release` says, and stay those of their owners."""
    scheduler, cache = Scheduler(max_batch), {}
    added = 0
    for step, action in enumerate(script):
        if action < 5:
            scheduler.add(request(str(added), [1]), draws=[0.5])
            added += 1
        elif action < 8:
            cache |= {sequence.row: sequence.request.id for sequence in scheduler.admit()}
        elif scheduler.running:
            last = len(scheduler.running) - 1
            moved = scheduler.release(scheduler.running[step % len(scheduler.running)])
            if moved is not None:
                cache[moved.row] = cache[last]
        assert len(scheduler.running) <= max_batch
        for row, sequence in enumerate(scheduler.running):
            assert (sequence.row, cache[row]) == (row, sequence.request.id)
    ids = [int(sequence.request.id) for sequence in scheduler.waiting]
    assert ids == list(range(added - len(ids), added))  # first come, first served


def kv(length: int) -> torch.Tensor:
    return torch.zeros(2, 1, length, 1, 1)


def test_the_longest_known_beginning_is_found() -> None:
    cache = PrefixCache(max_tokens=100)
    for tokens in ([1, 2], [1, 2, 3], [1, 3], [256, 0]):
        cache.put(tokens, kv(len(tokens)))
    assert [cache.find(tokens) and cache.find(tokens)[0] for tokens in ([1, 2, 3, 4], [1, 2, 4], [1, 3, 9])] == [
        3,
        2,
        2,
    ]
    assert cache.find([1, 2]) is None  # the last token of a prompt has to be computed
    assert cache.find([2, 1, 2, 3]) is None
    assert cache.find([256, 1]) is None


def test_the_least_recently_used_goes_first() -> None:
    cache = PrefixCache(max_tokens=5)
    cache.put([1, 1], kv(2))
    cache.put([2, 2], kv(2))
    assert cache.find([1, 1, 1]) is not None
    cache.put([3, 3], kv(2))
    assert cache.num_tokens == 4
    assert [cache.find([n, n, n]) is not None for n in (1, 2, 3)] == [True, False, True]
    cache.put([3, 3], kv(2))
    assert cache.num_tokens == 4
    cache.clear()
    assert (cache.num_tokens, cache.find([1, 1, 1])) == (0, None)


def test_what_is_too_long_is_not_kept() -> None:
    cache = PrefixCache(max_tokens=3)
    cache.put([1] * 4, kv(4))
    assert (cache.num_tokens, cache.find([1] * 5)) == (0, None)
