"""A gateway, a worker, and a scripted model with a real tokenizer that plays along with an agent.
Prints the gateway's URL and, at the end of its input, the recorded session.

    python -m tests.agents.play --call '{"name": "bash", "arguments": {"command": "date > made"}}'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import zlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from etude.core.sampling import Request, Sample
from etude.core.types import Segment
from etude.serve.fake import Scripted
from etude.serve.gateway import Gateway
from etude.serve.http import create_app
from etude.serve.router import Router
from etude.serve.worker import Worker
from etude.store.objects import Objects
from tests.serve.client import post, segments
from tests.serve.conftest import served
from tests.serve.scripted import FILES, TOKENIZER, answers

CONTEXT = 4_000_000
"""Large, since agents send long prompts and the small vocabulary has one token per letter."""


def logprobs_of(tokens: Iterable[int]) -> list[float]:
    """Fake log-probs that, like a model's, depend on the token and on all tokens before it."""
    digest, found = 0, []
    for token in tokens:
        digest = zlib.crc32(token.to_bytes(4), digest)
        found.append(-(digest % 4096) / 1024)
    return found


def recomputed(segment: Segment) -> tuple[float, ...]:
    """The log-probs of a segment, computed from its tokens alone."""
    found = logprobs_of((*segment.prompt, *segment.tokens))[len(segment.prompt) :]
    return tuple(
        logprob if drawn else 0.0 for logprob, drawn in zip(found, segment.mask, strict=True)
    )


class Player(Scripted):
    """A model that calls a tool once and then ends. It answers requests without tools with a title,
    since agents send such requests for one."""

    tokenizer = TOKENIZER
    max_context = CONTEXT

    def __init__(self, call: dict[str, Any], end: str) -> None:
        super().__init__([])
        self._end = end
        said = f"<tool_call>{json.dumps(call)}</tool_call>"
        self._call = f"<think>I should.</think>I do it now.{said}"
        self.said: list[tuple[int, ...]] = []

    async def sample(self, request: Request) -> Sample:
        shown = TOKENIZER.decode(request.prompt)
        if "<|tools|>" not in shown:
            text = "A title"
        else:
            text = self._end if "<|tool|>" in shown.rpartition("<|user|>")[2] else self._call
        return await self.say(text, request)

    async def say(self, text: str, request: Request) -> Sample:
        self._answers = iter(answers([text]))
        sample = await super().sample(request)
        self.said.append(sample.tokens)
        logprobs = logprobs_of((*request.prompt, *sample.tokens))[len(request.prompt) :]
        return replace(sample, logprobs=tuple(logprobs))


@asynccontextmanager
async def playing(call: dict[str, Any], end: str) -> AsyncIterator[tuple[str, Player]]:
    """A gateway's URL, and the model behind it."""
    player = Player(call, end)
    async with playing_with(player) as url:
        yield url, player


@asynccontextmanager
async def playing_with(player: Player) -> AsyncIterator[str]:
    """A gateway's URL."""
    worker = Worker(player, FILES, "east")  # type: ignore[arg-type]
    with TemporaryDirectory() as directory:
        async with aiohttp.ClientSession() as http:
            gateway = Gateway(
                Router(http), Objects.open(f"file:{directory}"), FILES, max_context=CONTEXT
            )
            async with (
                served(create_app(worker.routes(), None)) as at,
                served(create_app(gateway.routes(), None)) as url,
            ):
                await post(http, f"{url}/workers", {"url": at, "region": "east", "version": 0})
                yield url


async def recorded(url: str, session: str) -> tuple[Segment, ...]:
    async with aiohttp.ClientSession() as http:
        return await segments(http, url, session)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--call", type=json.loads, required=True)
    parser.add_argument("--shown", type=Path, help="where to write what the model was shown")
    given = parser.parse_args()
    async with playing(given.call, "Done.") as (url, player):
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for segment in await recorded(url, "one"):
            print(segment.kind, len(segment.prompt), len(segment.tokens), sum(segment.mask))
        if given.shown:
            texts = [TOKENIZER.decode(request.prompt) for request in player.asked]
            given.shown.write_text("\n\n=====\n\n".join(texts))


if __name__ == "__main__":
    asyncio.run(main())
