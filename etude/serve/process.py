"""Server processes: token, port and a clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from etude.core.errors import EtudeError
from etude.serve.connections import Connections

NEVER_S = 10**6
MAX_OPEN_FILES = 1 << 16
TOKEN_VARIABLE = "ETUDE_TOKEN"
"""The token that this process sends with its requests. At a worker and at `etude serve` it is also
the token that clients must send. It is an environment variable because everyone on a machine can
read the arguments of a process."""


def token(file: Path | None = None) -> str | None:
    """The token from a file, which only its owner should be able to read, or from the
    environment."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise EtudeError(
            f"cannot read the token from {file}: {getattr(e, 'strerror', None) or e}"
        ) from e
    if not text:
        raise EtudeError(
            f"{file} is empty: write a token into it, for example with `openssl rand -hex 32 > "
            f"{file}`"
        )
    return text


def authorization(token: str | None) -> dict[str, str]:
    """The header of our own requests."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def bind(host: str, port: int, key: str | None, variable: str = TOKEN_VARIABLE) -> socket.socket:
    """Open a listening port. Without a key, it must be reachable from this machine only.
    `variable`: the variable that the key comes from, for the error message."""
    if key is None and not is_loopback(host):
        raise EtudeError(
            f"{host} can be reached from other machines: set {variable}, or listen on 127.0.0.1"
        )
    if not 0 <= port < 2**16:
        raise EtudeError(f"invalid port {port}: choose one up to 65535, or 0 for any free port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as e:
        listener.close()
        raise EtudeError(
            f"cannot listen on {host}:{port}: {os.strerror(e.errno or 0)}; stop the process "
            f"that uses the port, or choose another one"
        ) from e
    return listener


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def log_to_stderr(line: object) -> None:
    """Write a line of a log, with the time (UTC)."""
    now = time.strftime("%FT%TZ", time.gmtime())
    print(now, line, file=sys.stderr, flush=True)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """A uvicorn server without its own signal handling: it would handle signals only while it
    serves, and lose one that came just before."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def told_to_stop(self, number: int, frame: object) -> None:
        self.should_exit = True


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """Serve on the port while the block runs. The yielded task ends when the process is told to
    stop, which is noticed from the first line of the block on."""
    connections = Connections()
    config = uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        access_log=False,
        # its warnings are about clients' input, as often as clients like
        log_level="error",
        timeout_keep_alive=NEVER_S,  # `Connections` closes idle connections
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    before = {
        number: signal.signal(number, server.told_to_stop)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    running = asyncio.create_task(server.serve(sockets=[listener]))
    watching = asyncio.create_task(connections.watch())
    try:
        yield running
    finally:
        server.should_exit = True
        watching.cancel()
        try:
            await running
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.asynccontextmanager
async def meanwhile(*doings: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run the coroutines concurrently with the block, and cancel them at its end."""
    tasks = [asyncio.create_task(doing) for doing in doings]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a server process. Its exit status is 0 if it was told to stop while it served, and 2,
    with one line of output, for a mistake of the user's."""
    # Until it serves there is nothing to finish, and loading a model may take minutes. So both
    # signals end the process at once then; asyncio would wait for the next pause of its loop.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except EtudeError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2) from None
