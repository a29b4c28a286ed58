"""The single opening of a sandbox without a network: a port inside it that leads to one HTTP
handler outside, and nowhere else.

A small forwarder in the sandbox listens on its loopback interface, and carries connections over its
own standard input and output. A frame holds the number of the connection, the size of its data, and
the data; a frame without data ends the connection. Nothing is mounted and no interface is added, so
this works in every kind of sandbox, and ends with the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from etude.core.errors import RolloutFailure
from etude.core.sandbox import Process, Sandbox

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_FRAME = struct.Struct(">II")
_CHUNK = 1 << 16
_CONNECTIONS = 128
"""Limit on open connections: programs in the sandbox may try to open any number."""
_FORWARDER = """
import asyncio, os, struct, sys

async def main():
    loop = asyncio.get_running_loop()
    source = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(source), sys.stdin.buffer)
    pipe, flow = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout.buffer)
    out = asyncio.StreamWriter(pipe, flow, None, loop)
    clients, count = {}, 0

    async def carry(reader, writer):
        nonlocal count
        count += 1
        number = count
        clients[number] = writer
        try:
            data = b"-"
            while data:
                data = await reader.read(65536)
                out.write(struct.pack(">II", number, len(data)) + data)
                await out.drain()
        except OSError:
            out.write(struct.pack(">II", number, 0))

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    out.write(b"%d\\n" % server.sockets[0].getsockname()[1])
    while True:
        number, size = struct.unpack(">II", await source.readexactly(8))
        data = await source.readexactly(size)
        client = clients[number] if size else clients.pop(number, None)
        if client is not None and not client.is_closing():
            client.write(data) if size else client.close()

os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def tunnel_to(handler: Handler, sandbox: Sandbox) -> AsyncIterator[str]:
    """Yield a URL inside the sandbox that leads to the handler while the block runs."""
    forwarder = await sandbox.start(["python", "-c", _FORWARDER])
    try:
        frames = _Frames(forwarder)
        port = await frames.first_line()
        server = web.Server(handler)
        carrying = asyncio.create_task(_Host(forwarder, frames, server).carry())
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            carrying.cancel()
            # a closed or silent sandbox is noticed by those who use it
            await asyncio.gather(carrying, return_exceptions=True)
            await server.shutdown(0.0)
    finally:
        await forwarder.kill()


class _Frames:
    """The forwarder's output, split into frames."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._pending = bytearray()

    async def first_line(self) -> int:
        while b"\n" not in self._pending:
            if not await self._more():
                raise RolloutFailure("no forwarder could be started in the sandbox")
        line, _, rest = self._pending.partition(b"\n")
        self._pending = bytearray(rest)
        try:
            return int(line)
        except ValueError as e:
            raise RolloutFailure(
                f"no forwarder could be started in the sandbox: {line.decode(errors='replace')}"
            ) from e

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        while True:
            while len(self._pending) >= _FRAME.size:
                number, size = _FRAME.unpack_from(self._pending)
                # not from our forwarder: a program in the sandbox writes in its place
                if size > _CHUNK:
                    return
                if len(self._pending) < _FRAME.size + size:
                    break
                yield number, bytes(self._pending[_FRAME.size : _FRAME.size + size])
                del self._pending[: _FRAME.size + size]
            if not await self._more():
                return

    async def _more(self) -> bool:
        data = await self._process.read()
        self._pending += data
        return bool(data)


class _Host:
    """The host's ends of the connections."""

    def __init__(self, forwarder: Process, frames: _Frames, server: web.Server) -> None:
        self._forwarder = forwarder
        self._frames = frames
        self._server = server
        self._writers: dict[int, asyncio.StreamWriter] = {}

    async def carry(self) -> None:
        async with asyncio.TaskGroup() as group:
            async for number, data in self._frames:
                if data and number not in self._writers:
                    if len(self._writers) == _CONNECTIONS:
                        await self._forwarder.write(_FRAME.pack(number, 0))
                        continue
                    reader = await self._connect(number)
                    group.create_task(self._carry_back(number, reader))
                if data:
                    self._writers[number].write(data)
                    with contextlib.suppress(ConnectionError):
                        await self._writers[number].drain()
                elif number in self._writers:
                    self._writers.pop(number).close()

    async def _connect(self, number: int) -> asyncio.StreamReader:
        """Open a connection to the handler's server, over a socket pair instead of a network."""
        ours, theirs = socket.socketpair()
        await asyncio.get_running_loop().connect_accepted_socket(self._server, theirs)
        reader, self._writers[number] = await asyncio.open_unix_connection(sock=ours)
        return reader

    async def _carry_back(self, number: int, reader: asyncio.StreamReader) -> None:
        data = b"-"
        while data:
            try:
                data = await reader.read(_CHUNK)
            except ConnectionError:
                data = b""
            await self._forwarder.write(_FRAME.pack(number, len(data)) + data)
