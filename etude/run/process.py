"""Common behaviour of a run's processes: errors in one line, a clean stop on SIGTERM, and death
with the parent.

The children are started by `launch`; each lives in a session of its own, so a Ctrl-C in the
terminal reaches only the launcher, which stops them in order.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from etude.core.clock import AwakeClock, SystemClock
from etude.core.errors import EtudeError
from etude.serve import heartbeat

BLINK_EVERY_S = 0.5
PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from malloc.h
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it is gone, even by SIGKILL.
    Runs between fork and exec."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before we could ask
        os._exit(1)


def keep_freed_memory() -> None:
    """Keep freed memory, for a process that needs the same amount again and again, such as a step
    of training. glibc returns large blocks to the kernel when they are freed; with a hundred
    million parameters, getting them again takes half of a step."""
    if hasattr(_libc, "mallopt"):  # not every libc has it
        _libc.mallopt(M_MMAP_MAX, 0)
        _libc.mallopt(M_TRIM_THRESHOLD, -1)


def error_message(e: BaseException) -> str | None:
    """The message for the user, if there is one. A TaskGroup wraps the error that ended it,
    sometimes twice."""
    if isinstance(e, EtudeError):
        return str(e)
    if isinstance(e, BaseExceptionGroup):
        return next(
            (told for inner in e.exceptions if (told := error_message(inner)) is not None), None
        )
    return None


class AwakeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock does not advance while the process is stopped (SIGSTOP, a sleeping
    machine), so that no deadline of a sandbox or an agent passes meanwhile."""

    def __init__(self) -> None:
        self.clock = AwakeClock(SystemClock())
        super().__init__()
        self._blink()

    def time(self) -> float:
        return self.clock.now()

    def _blink(self) -> None:
        self.call_later(BLINK_EVERY_S, self._blink)


def stopped_since(then: float) -> bool:
    """True if this process was stopped after that time of its loop."""
    loop = asyncio.get_running_loop()
    return isinstance(loop, AwakeLoop) and loop.clock.slept_since(then)


def run_process(program: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run an asyncio program to its end, and return the exit code. An exception other than
    `EtudeError` is a bug, and keeps its traceback."""
    try:
        with asyncio.Runner(loop_factory=AwakeLoop) as runner:
            runner.run(_until_told(program))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except (EtudeError, BaseExceptionGroup) as e:
        if (told := error_message(e)) is None:
            raise
        print(f"error: {told}", file=sys.stderr, flush=True)
        return 2
    return 0


async def _until_told(program: Callable[[], Coroutine[Any, Any, None]]) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    beating = asyncio.create_task(heartbeat.send_heartbeats())
    try:
        await program()
    finally:
        beating.cancel()
