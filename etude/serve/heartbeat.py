"""The heartbeat of this process to its launcher: once a second, over a pipe that the launcher made.

It is sent from where the work is done, so an event loop that hangs sends none. A process that
computes for minutes without a pause sends it from a thread, which shows at least that the process
is neither stopped nor gone.
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
"""Number of the pipe's file descriptor. If the variable is unset, nobody listens."""
HEARTBEAT_S = 1.0


def send_heartbeat() -> None:
    if (pipe := _pipe()) is not None:
        # The launcher is stopped and the pipe is full, or the launcher is gone.
        with contextlib.suppress(OSError):
            os.write(pipe, b".")


async def send_heartbeats(well: Callable[[], bool] = lambda: True) -> None:
    """`well`: returns False while something outside the event loop hangs; no heartbeat is sent
    then."""
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
    """The pipe's descriptor. It is removed from the environment, because in a child of this process
    the number may refer to something else."""
    number = os.environ.pop(HEARTBEAT_VARIABLE, None)
    return None if number is None else int(number)
