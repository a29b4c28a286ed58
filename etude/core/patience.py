"""Patience with a gateway that is away: whoever started it starts it again, and its sessions go
on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

AWAY_S = 60.0
"""A gateway that is away for longer does not come back."""
RETRY_S = 0.05

T = TypeVar("T")


async def when_back(ask: Callable[[], Awaitable[T]], lost: type[Exception]) -> T:
    """What is answered, asked again for as long as the gateway may be away. Also one that was
    stopped for long closes connections when it wakes, whatever came in over them meanwhile.
    `lost`: what a lost connection raises."""
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
