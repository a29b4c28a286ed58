"""What worker and gateway have in common as processes: a token, a port, and a clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from etude.core.errors import EtudeError

TOKEN_VARIABLE = "ETUDE_TOKEN"
"""The bearer token that every request must carry, and that our own requests carry. An environment variable, because
everyone on a machine can read the arguments of a process."""


def token(file: Path | None = None) -> str | None:
    """From a file that only its owner should be able to read, or from the environment."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise EtudeError(f"cannot read a token from {file}: {getattr(e, 'strerror', None) or e}") from e
    if not text:
        raise EtudeError(f"{file} is empty: write a token into it, for example with: openssl rand -hex 32 > {file}")
    return text


def bind(host: str, port: int, token: str | None) -> socket.socket:
    """A listening port. Without a token, only where nobody but this machine can reach it."""
    if token is None and not _is_loopback(host):
        raise EtudeError(f"{host} can be reached from outside: set {TOKEN_VARIABLE}, or serve on 127.0.0.1")
    if not 0 <= port < 2**16:
        raise EtudeError(f"there is no port {port}: choose one up to 65535, or 0 for any that is free")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as e:
        listener.close()
        raise EtudeError(
            f"cannot listen on {host}:{port}: {os.strerror(e.errno or 0)}; stop what runs there, or choose another port"
        ) from e
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """Answers on the port while the block runs. The task that is handed out ends when the process is told to stop."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        # Longer than clients keep an idle connection: whoever closes it first must not be the one who may be asked.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield running
    finally:
        server.should_exit = True
        await running


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """The life of a server process: its exit status is 0 after SIGTERM or SIGINT, and 2 with one line for a mistake of
    the user's."""
    # uvicorn stops on these signals, and then raises them again for whoever handled them before.
    signal.signal(signal.SIGTERM, _ignore)
    signal.signal(signal.SIGINT, _ignore)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except EtudeError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2) from None


def _ignore(number: int, frame: object) -> None:
    pass
