"""The dashboard of a run: a port on loopback, and a process that the first visitor starts. It costs
nothing before that; then it runs at a low priority, and ends with the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from etude.launch.launcher import python
from etude.run.process import die_with_parent
from etude.serve.process import TOKEN_VARIABLE, bind, url_of

LOW = 5
"""Niceness of its process: the processes of the run have priority, but a person is waiting."""


@contextlib.asynccontextmanager
async def dashboard(store: str, logs: Path) -> AsyncIterator[str]:
    """The link, with a token, so that other users of this machine cannot read along."""
    token = secrets.token_urlsafe(18)
    with bind("127.0.0.1", 0, token) as listener:
        serving = asyncio.create_task(_serve(listener, store, logs, token))
        try:
            yield f"{url_of(listener)}/#token={token}"
        finally:
            serving.cancel()
            # a dashboard that cannot start must not fail a run
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await serving


async def _serve(listener: socket.socket, store: str, logs: Path, token: str) -> None:
    await _visited(listener)
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(parent)
        os.nice(LOW)

    log = logs / "dash.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *python("etude.commands.dash", store, listener.fileno()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {TOKEN_VARIABLE: token},
            start_new_session=True,
            pass_fds=(listener.fileno(),),
            preexec_fn=prepare,
        )
    try:
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()  # it has nothing to finish
            await process.wait()


async def _visited(listener: socket.socket) -> None:
    """Return when a visitor tries to connect."""
    loop, visitor = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, visitor.set)
    try:
        await visitor.wait()
    finally:
        loop.remove_reader(listener)
