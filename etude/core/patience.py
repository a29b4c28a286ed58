"""Patience with a gateway that is away: its launcher restarts it, and its sessions continue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

AWAY_S = 60.0
"""A gateway that is away for longer will not come back."""
RETRY_S = 0.05

T = TypeVar("T")


async def when_back(ask: Callable[[], Awaitable[T]], lost: type[Exception]) -> T:
    """Return the answer to a request, which is repeated for as long as the gateway may be away. A
    gateway that was stopped for long also closes connections when it wakes, regardless of the data
    that arrived over them meanwhile. `lost`: the exceptions that a lost connection raises."""
    now = asyncio.get_running_loop().time
    since = None
    while True:
        try:
            return await ask()
        except lost:
            since = now() if since is None else since
            if now() - since >= AWAY_S:
                raise
        await asyncio.sleep(RETRY_S)
