"""`etude sandboxes serve`: sandboxes of this machine for runs on other machines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.sandbox.host import SandboxHost
from etude.sandbox.host_app import create_app
from etude.sandbox.mounts import mount_places
from etude.sandbox.pool import open_sandbox_pool
from etude.sandbox.remote import TOKEN_VARIABLE
from etude.serve import process


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    host: str
    port: int
    isolation: Sequence[str]
    """The kinds of isolation to offer; the first is the default. Empty: namespaces."""
    mount: Sequence[str]
    max_sandboxes: int
    token_file: Path | None


def serve(options: Options) -> None:
    """Serve until the process is told to stop; then every sandbox is closed."""
    process.run(lambda: _serve(options))


async def _serve(options: Options) -> None:
    file = options.token_file
    token = process.token(file) if file else os.environ.get(TOKEN_VARIABLE) or None
    listener = process.bind(options.host, options.port, token, TOKEN_VARIABLE)
    pools = {
        isolation: open_sandbox_pool(isolation, mounts=options.mount)
        for isolation in options.isolation or ("namespaces",)
    }
    places = mount_places(options.mount)
    host = SandboxHost(pools, max_sandboxes=options.max_sandboxes, places=places)
    try:
        app = create_app(host, token)
        async with process.meanwhile(host.watch()), process.serving(app, listener) as running:
            offered = ", ".join(f"{name} (tier {pool.tier})" for name, pool in pools.items())
            print(f"sandboxes at {process.url_of(listener)}: {offered}", flush=True)
            await running
    finally:
        await host.close()
