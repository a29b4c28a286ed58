"""A cache of results, so that the same work is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Memo(Generic[T]):
    """The newest results, each by a key that contains everything that the result depends on."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: dict[Hashable, T] = {}
        self._pending: dict[Hashable, asyncio.Future[tuple[T, ...]]] = {}

    async def get(
        self,
        key: Hashable,
        compute: Callable[[], Awaitable[T]],
        keep: Callable[[T], bool] = lambda result: True,
    ) -> T:
        """Return the result, from `compute` if it is new. Concurrent callers wait for the first
        one, and compute the result themselves if that one fails. `keep`: decides whether later
        callers get the result too."""
        if key in self._results:
            return self._results[key]
        if (pending := self._pending.get(key)) is None:
            result = await self._first(key, compute)
        elif found := await asyncio.shield(pending):
            return found[0]
        else:
            result = await compute()
        if keep(result):
            self._results[key] = result
            if len(self._results) > self._size:
                del self._results[next(iter(self._results))]
        return result

    async def _first(self, key: Hashable, compute: Callable[[], Awaitable[T]]) -> T:
        """Compute the result and pass it to the callers that wait for it; on failure, pass
        nothing."""
        pending = self._pending[key] = asyncio.get_running_loop().create_future()
        found: tuple[T, ...] = ()
        try:
            found = (await compute(),)
        finally:
            del self._pending[key]
            pending.set_result(found)
        return found[0]
