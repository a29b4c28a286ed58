"""Services of a sandbox: started before the agent, and checked until they are up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from etude.core.errors import RolloutFailure
from etude.core.sandbox import Process, Sandbox, Service

_LOOK_S = 0.02
_LOOK_TIMEOUT_S = 5.0
_WORDS_BYTES = 2000
_PORT_ANSWERS = 'import socket; socket.create_connection(("127.0.0.1", {port}), 1)'


async def start_services(sandbox: Sandbox, services: Sequence[Service]) -> list[asyncio.Task[None]]:
    """Start services one after the other, so that a service may need those before it. The returned
    tasks read their output, since a full pipe would block them, and end with the sandbox.
    RolloutFailure if a service does not come up."""
    reading: list[asyncio.Task[None]] = []
    try:
        for service in services:
            words = bytearray()
            process = await sandbox.start(service.argv, env=service.env)
            reading.append(asyncio.create_task(listen(process, words)))
            await _until_up(sandbox, service, reading[-1], words)
    except BaseException:
        for task in reading:
            task.cancel()
        raise
    return reading


async def listen(process: Process, words: bytearray) -> None:
    """Read the output of a process to its end, and keep the last part of it."""
    try:
        while said := await process.read():
            words += said
            del words[:-_WORDS_BYTES]
    except RolloutFailure:  # the sandbox is closed
        pass


async def _until_up(
    sandbox: Sandbox, service: Service, reading: asyncio.Task[None], words: bytearray
) -> None:
    check = service.check or ("python", "-c", _PORT_ANSWERS.format(port=service.port))
    look_s = _LOOK_TIMEOUT_S
    try:
        async with asyncio.timeout(service.ready_s):
            while (looked := await sandbox.run(check, timeout_s=look_s)).exit_code != 0:
                if looked.exit_code is None:  # a machine on which the check itself takes longer
                    look_s *= 2
                if reading.done():
                    raise _failure(service, "ended before it was ready", words)
                await asyncio.sleep(_LOOK_S)
    except TimeoutError as e:
        raise _failure(service, f"was not ready within {service.ready_s:g} s", words) from e


def _failure(service: Service, what: str, words: bytearray) -> RolloutFailure:
    said = words.decode(errors="replace").strip() or "nothing"
    return RolloutFailure(f"sandbox: service {service.name} {what}; it said: {said}")
