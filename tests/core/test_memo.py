"""Work that is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from etude.core.errors import RolloutFailure
from etude.core.memo import Memo
from etude.core.sandbox import Patch, patch_digest


def counting(result: int | Exception) -> tuple[list[int], Callable[[], Awaitable[int]]]:
    calls: list[int] = []

    async def compute() -> int:
        calls.append(len(calls))
        await asyncio.sleep(0)
        if isinstance(result, Exception):
            raise result
        return result

    return calls, compute


async def test_the_same_is_computed_once_whoever_comes_first() -> None:
    memo = Memo[int](8)
    calls, compute = counting(7)
    results = await asyncio.gather(*(memo.get("a", compute) for _ in range(5)))
    assert calls == [0] and results == [7] * 5
    await memo.get("b", compute)
    assert len(calls) == 2


async def test_what_failed_is_computed_by_all_who_waited_at_once() -> None:
    memo = Memo[int](8)
    failing_calls, failing = counting(RolloutFailure("lost"))
    calls, compute = counting(7)
    first = asyncio.create_task(memo.get("a", failing))
    second = asyncio.create_task(memo.get("a", compute))
    third = asyncio.create_task(memo.get("a", compute))
    with pytest.raises(RolloutFailure):
        await first
    assert (await second, await third) == (7, 7)
    assert (failing_calls, calls) == ([0], [0, 1])
    assert await memo.get("a", failing) == 7


@pytest.mark.parametrize("cancelled", [0, 1])
async def test_one_that_is_cancelled_leaves_the_others_alone(cancelled: int) -> None:
    memo = Memo[int](8)
    calls, compute = counting(7)
    tasks = [asyncio.create_task(memo.get("a", compute)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks.pop(cancelled).cancel()
    results = [await task for task in tasks]
    assert results == [7] * 2
    assert await memo.get("a", compute) == 7
    assert len(calls) == (3 if cancelled == 0 else 1)


async def test_what_is_not_to_be_kept_is_for_those_who_wait() -> None:
    memo = Memo[int](8)
    calls, compute = counting(7)
    together = [memo.get("a", compute, keep=lambda result: result != 7) for _ in range(3)]
    assert await asyncio.gather(*together) == [7] * 3 and len(calls) == 1
    await memo.get("a", compute)
    await memo.get("a", compute)
    assert len(calls) == 2


async def test_old_results_are_forgotten() -> None:
    memo = Memo[int](64)
    calls, compute = counting(7)
    for key in range(100):
        await memo.get(key, compute)
    await memo.get(99, compute)
    await memo.get(36, compute)
    assert len(calls) == 100
    await memo.get(35, compute)
    assert len(calls) == 101


def test_only_equal_patches_have_the_same_digest() -> None:
    change: Patch = {"src/shape.py": (0o100644, b"x"), "a.py": None}
    patches: list[Patch] = [
        change,
        {},
        {"src/shape.py": None, "a.py": None},
        {"src/shape.py": (0o100755, b"x"), "a.py": None},
        {"src/shape.py": (0o100644, b"y"), "a.py": None},
        {"src/shape_py": (0o100644, b"x"), "a.py": None},
        {**change, "src/b.py": (0o100644, b"x")},
    ]
    assert len({patch_digest(each) for each in patches}) == len(patches)
    assert patch_digest(dict(reversed(change.items()))) == patch_digest(change)
