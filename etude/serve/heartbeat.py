"""The heartbeat to the launcher that started this process, once a second, over a pipe that it was
given.

It is given where the work is done: an event loop that hangs gives none. A process that computes for
minutes without a pause has a thread for it, which tells at least that it is neither stopped nor
gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable

HEARTBEAT_VARIABLE = "ETUDE_HEARTBEAT"
"""The number of the pipe's descriptor. Without it nobody listens."""
HEARTBEAT_S = 1.0


def send_heartbeat() -> None:
    if (pipe := _pipe()) is not None:
        # the launcher is stopped and the pipe full, or it is gone
        with contextlib.suppress(OSError):
            os.write(pipe, b".")


async def send_heartbeats(well: Callable[[], bool] = lambda: True) -> None:
    """`well`: whether what the event loop does not see is at work too."""
    while True:
        if well():
            send_heartbeat()
        await asyncio.sleep(HEARTBEAT_S)


def send_heartbeats_from_thread() -> None:
    def keep() -> None:
        while True:
            send_heartbeat()
            time.sleep(HEARTBEAT_S)

    threading.Thread(target=keep, name="heartbeat", daemon=True).start()


@functools.cache
def _pipe() -> int | None:
    """Taken out of the environment: in a child of this process the number may stand for something
    else."""
    number = os.environ.pop(HEARTBEAT_VARIABLE, None)
    return None if number is None else int(number)
