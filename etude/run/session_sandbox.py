"""The sandbox of a session, while the agent has it and in the state that the agent leaves
behind."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

from etude.core.sandbox import Process, Sandbox


class SessionSandbox:
    """A `core.sandbox.Sandbox` that keeps track of the processes started in it.

    A process that is still running when the session is over could change the working copy between
    the moment its diff is taken and its grading. Then the detector, judges and people would see
    other work than the work that was rewarded."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._started: list[Process] = []

    @property
    def as_sandbox(self) -> Sandbox:
        return cast(Sandbox, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        pty: bool = False,
    ) -> Process:
        process = await self._sandbox.start(argv, cwd=cwd, env=env, pty=pty)
        self._started.append(process)
        return process

    async def end_processes(self) -> None:
        await asyncio.gather(*(process.kill() for process in self._started))


async def diff_of(sandbox: Sandbox) -> str:
    """The diff of a working copy, or the reason why there is none: an agent that has made its work
    unreadable must be graded like others, and must not count as failed."""
    try:
        return await sandbox.diff()
    except ValueError as e:
        return f"the changes cannot be shown: {e}\n"
