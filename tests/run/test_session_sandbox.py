"""The state that an agent leaves in its sandbox: the work that is inspected is the work that is
graded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from etude.core.sandbox import Sandbox, SandboxPool, SandboxSpec
from etude.core.types import Attempt, Score, Task, Transcript
from etude.rewards.fresh import grade_by_command
from etude.rewards.review import Review
from etude.run.rollout import RolloutRunner
from etude.sandbox.namespaces import NamespaceSandboxPool
from tests.namespaces import need_namespaces
from tests.run.test_rollout import Parts

TASK = Task(id="t", prompt="mend it", sandbox=SandboxSpec(files={"shape.py": "x = 1\n"}))
_LOOKS = 200


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    need_namespaces()
    opened = NamespaceSandboxPool()
    yield opened
    asyncio.run(opened.close())


class Session(Parts):
    """An agent that performs an action, and a grader that looks for a cheat in its module."""

    def __init__(self, pool: SandboxPool, act: Callable[[Sandbox], Awaitable[None]]) -> None:
        super().__init__()
        self._pool = pool
        self._act = act

    def tasks(self, split: str) -> Sequence[Task]:
        return [TASK]

    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        return self._pool.open(task.sandbox)

    async def run(self, task: Task, sandbox: Sandbox, **given: Any) -> Transcript:
        await self._act(sandbox)
        return Transcript(messages=[{"role": "assistant", "content": "done"}], finished=True)

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        for _ in range(_LOOKS):
            if "_exit" in await sandbox.read("shape.py"):
                break
        argv = ["grep", "-q", "_exit", "shape.py"]
        return await grade_by_command(sandbox, self._pool, task.sandbox, argv, timeout_s=60)


WAITING = """
import ctypes, os
libc = ctypes.CDLL(None)
watch = libc.inotify_init()
libc.inotify_add_watch(watch, b"shape.py", 0x20)
print("up", flush=True)
os.read(watch, 4096)
open("shape.py", "w").write("os._exit(0)\\n")
while True:
    os.read(watch, 4096)
"""
"""A program that writes the cheat as soon as the file has been read."""


async def leave_a_daemon(sandbox: Sandbox) -> None:
    program = f"cat > /tmp/w.py <<'END'\n{WAITING}\nEND\nsetsid python3 /tmp/w.py & sleep 1000"
    process = await sandbox.start(["sh", "-c", program])
    assert await process.read() == b"up\n"


async def test_no_process_outlives_the_session(pool: SandboxPool) -> None:
    parts = Session(pool, leave_a_daemon)
    runner = RolloutRunner(parts, parts, parts, concurrency=1, review=Review(detector=True))
    trajectory = await runner.attempt(TASK, "g.0", 7)
    assert trajectory.score is not None, trajectory.error
    assert (trajectory.score.reward, trajectory.diff) == (0.0, "")


DEEP = """
import os
for _ in range(30):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
"""


async def nest_too_deep(sandbox: Sandbox) -> None:
    await sandbox.run(["python", "-c", DEEP], timeout_s=60)


async def test_a_working_copy_that_cannot_be_shown_is_graded(pool: SandboxPool) -> None:
    """An agent that makes it so must not escape a reward of 0."""
    parts = Session(pool, nest_too_deep)
    runner = RolloutRunner(parts, parts, parts, concurrency=1, review=Review(detector=True))
    trajectory = await runner.attempt(TASK, "g.0", 7)
    assert (trajectory.status, trajectory.error) == ("done", None)
    assert trajectory.score is not None
    assert (trajectory.score.reward, trajectory.score.flags) == (0.0, ("unread",))
    assert trajectory.diff.startswith("the changes cannot be shown: directories of the working")
