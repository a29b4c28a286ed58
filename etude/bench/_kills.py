"""Sessions through a gateway while it and its workers are killed again and again: every turn that a
client received must be recorded exactly once, in order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from etude.bench import _servers as servers
from etude.bench._load import Load
from etude.core.errors import EtudeError
from etude.core.types import Segment, turns
from etude.launch.launcher import free_ports
from etude.store.decoding import decode_msgpack

KILL_S = 4.0
"""Time between the restart of a process and the next kill."""
MIN_TURNS = 400
"""Turns that must be acknowledged between two kills: a busy machine would otherwise do nothing but
restart processes."""
NUM_WORKERS = 2
Start = Callable[[], servers.Started]
PACE = ("--tokens", 6, "--first-s", 0.02, "--each-s", 0.01, "--join-s", 0.1)


def kill_run(sessions: int, num_turns: int, after_turns: Sequence[int] = ()) -> dict[str, float]:
    """Kill a process every `KILL_S` seconds, less often if turns are slow, or else after each of
    these numbers of acknowledged turns. Raise EtudeError if a turn is not recorded, or twice."""
    with tempfile.TemporaryDirectory(prefix="etude-kills-") as scratch:
        trial = KillTrial(Path(scratch), after_turns)
        return uvloop.run(trial.run(sessions, num_turns))


class KillTrial:
    """One gateway and two workers, and the answers that their clients received."""

    def __init__(self, folder: Path, after_turns: Sequence[int]) -> None:
        self._files = servers.model_files()
        self._store = servers.make_store(folder, self._files)
        self._after_turns = after_turns
        self._acknowledged: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        self._num_acknowledged = 0
        self._kills = {"gateway": 0, "worker": 0}

    async def run(self, sessions: int, num_turns: int) -> dict[str, float]:
        gateway_port, *worker_ports = free_ports(1 + NUM_WORKERS)
        url = f"http://127.0.0.1:{gateway_port}"
        load = Load(
            path=servers.session_path("k"), url=lambda session: url, turns=num_turns, spread_s=1.0,
            extra={"return_token_ids": True}, told=self._told,
        )  # fmt: skip
        with contextlib.ExitStack() as stack:
            starts: dict[str, list[Start]] = {
                "gateway": [partial(servers.start_gateway, stack, self._store, gateway_port)],
                "worker": [
                    partial(servers.start_worker, stack, self._files, [url], "--port", port, *PACE)
                    for port in worker_ports
                ],
            }
            running = {name: [start() for start in each] for name, each in starts.items()}
            killing = asyncio.create_task(self._kill(starts, running))
            began = time.monotonic()
            measured = await load.run(range(sessions))
            seconds = time.monotonic() - began
            if self._after_turns:
                await killing
            killing.cancel()
            await asyncio.wait([killing])
            await self._check(url, sessions)
        return {
            "sessions": sessions,
            "turns": self._num_acknowledged,
            "seconds": seconds,
            "gateway_kills": self._kills["gateway"],
            "worker_kills": self._kills["worker"],
            "retries": measured.num_retries,
            "lost": 0,
            "twice": 0,
        }

    def _told(self, session: int, choices: list[dict[str, Any]]) -> None:
        tokens = tuple(token for choice in choices for token in choice.get("token_ids", ()))
        self._acknowledged[session].append(tokens)
        self._num_acknowledged += 1

    async def _kill(
        self,
        starts: dict[str, list[Start]],
        running: dict[str, list[servers.Started]],
    ) -> None:
        """Kill the gateway and a worker in turn. Each is restarted at once on the same port."""
        names = itertools.cycle(("gateway", "worker"))
        numbers = itertools.count()
        async for _ in self._moments():
            name = next(names)
            number = next(numbers) // 2 % len(running[name])
            running[name][number].kill()
            self._kills[name] += 1
            # shielded, since a process that was started must be in `running` to be stopped
            starting = asyncio.create_task(asyncio.to_thread(starts[name][number]))
            try:
                await asyncio.shield(starting)
            finally:
                running[name][number] = await starting

    async def _moments(self) -> AsyncIterator[None]:
        for count in self._after_turns:
            await self._acknowledged_turns(count)
            yield
        while not self._after_turns:
            enough = self._num_acknowledged + MIN_TURNS
            await asyncio.sleep(KILL_S)
            await self._acknowledged_turns(enough)
            yield

    async def _acknowledged_turns(self, count: int) -> None:
        while self._num_acknowledged < count:
            await asyncio.sleep(0.005)

    async def _check(self, url: str, sessions: int) -> None:
        wrong = []
        async with aiohttp.ClientSession() as http:
            for session in range(sessions):
                async with http.get(f"{url}/s/k{session}/segments") as response:
                    if response.status != 200:
                        raise EtudeError(f"session {session}: {await response.text()}")
                    data = await response.read()
                segments = decode_msgpack(data, tuple[Segment, ...])
                recorded = [
                    tuple(segment.tokens[place] for place in turn)
                    for segment in segments
                    for turn in turns(segment)
                ]
                told = self._acknowledged[session]
                if recorded != told or len(segments) != 1:
                    wrong.append(
                        f"session {session}: told {told}, recorded {recorded} in {len(segments)} "
                        f"segments"
                    )
        if wrong:
            raise EtudeError(
                f"{len(wrong)} of {sessions} sessions differ from the answers that were "
                f"acknowledged; {wrong[0]}"
            )
