"""A sandbox host on this machine, in a thread of its own, so that a blocking caller does not stop
it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import uvicorn

from etude.sandbox.host import SandboxHost
from etude.sandbox.host_app import create_app
from etude.sandbox.pool import open_sandbox_pool
from etude.serve import process


@contextlib.contextmanager
def sandbox_host(
    isolation: str, *, token: str | None = None, max_sandboxes: int = 100
) -> Iterator[tuple[str, SandboxHost]]:
    """The URL of a running host, and the host."""
    listener = process.bind("127.0.0.1", 0, token)
    ready: list[SandboxHost] = []
    up = threading.Event()

    async def serve() -> None:
        pools = {isolation: open_sandbox_pool(isolation)}
        host = SandboxHost(pools, max_sandboxes=max_sandboxes)
        app = create_app(host, token)
        server = uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="off", log_level="error"))
        ready.append(host)
        async with process.meanwhile(host.watch(), _stop(server)):
            up.set()
            await server.serve(sockets=[listener])
        await host.close()

    stopping = threading.Event()

    async def _stop(server: uvicorn.Server) -> None:
        while not stopping.is_set():
            await asyncio.sleep(0.02)
        server.should_exit = True

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        while not up.wait(0.1):
            assert thread.is_alive(), "the host did not start"
        yield process.url_of(listener), ready[0]
    finally:
        stopping.set()
        thread.join()
