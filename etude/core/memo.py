"""Results that are remembered, so that the same work is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Memo(Generic[T]):
    """The newest results, each by a key that says all it depends on."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: dict[Hashable, T] = {}
        self._locks: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    async def get(self, key: Hashable, compute: Callable[[], Awaitable[T]]) -> T:
        """The result, by `compute` if it is new. While one is at it, others wait, and compute it
        themselves if that one failed."""
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._results:
                self._results[key] = await compute()
                if len(self._results) > self._size:
                    del self._results[next(iter(self._results))]
            return self._results[key]
