"""The host's end of the lines to the first process of a machine (`machine`)."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from typing import Any, Protocol

from etude.core.errors import RolloutFailure
from etude.sandbox.called import failed


class Requests(Protocol):
    """The input of the machine, with the methods of `asyncio.StreamWriter`."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...


class Lines:
    """Requests that are answered in any order."""

    def __init__(self, answers: asyncio.StreamReader, requests: Requests) -> None:
        self._requests = requests
        # a restored machine still answers the requests that its origin received
        self._numbers = itertools.count(secrets.randbits(60))
        self._owed: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read(answers))
        self._over = False
        self._requests.write(b"\n")  # ends the line that its origin was sending at the checkpoint

    async def _read(self, answers: asyncio.StreamReader) -> None:
        begun = False
        try:
            while line := await answers.readline():
                try:
                    answer = json.loads(line)
                except ValueError:
                    if begun:
                        raise
                    continue  # the rest of a line that was being sent at the checkpoint
                # an answer to a request that the origin received then is not for us, either
                if (future := self._owed.pop(answer["id"], None)) is None or future.done():
                    continue
                begun = True
                if "error" in answer:
                    future.set_exception(failed(answer["error"]))
                else:
                    future.set_result(answer["ok"])
        finally:
            self._give_up()

    def _give_up(self) -> None:
        self._over = True
        for future in self._owed.values():
            if not future.done():
                future.set_exception(RolloutFailure("sandbox: it ended before it answered"))
                future.exception()  # its caller may be gone
        self._owed.clear()

    async def call(self, operation: str, told: dict[str, Any], patience_s: float) -> Any:
        if self._over:
            raise RolloutFailure("sandbox: it is closed")
        number = next(self._numbers)
        future = self._owed[number] = asyncio.get_running_loop().create_future()
        self._send({"id": number, "operation": operation, "told": told})
        try:
            async with asyncio.timeout(patience_s):
                await self._requests.drain()
                return await future
        except TimeoutError as e:
            raise RolloutFailure(f"sandbox: no answer within {patience_s:.0f} s") from e
        except ConnectionError as e:
            raise RolloutFailure("sandbox: it ended before it answered") from e
        finally:
            if not future.done() or future.cancelled():
                self._owed.pop(number, None)
                self._send({"cancel": number})

    def _send(self, message: dict[str, Any]) -> None:
        if not self._over:
            self._requests.write(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        self._give_up()
        self._requests.close()
        self._reading.cancel()
