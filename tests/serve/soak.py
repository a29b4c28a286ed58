"""Soak test: many requests of every kind, clients that disconnect at any moment, and weights that
change meanwhile. Nothing may leak.

    python -m tests.serve.soak --requests 10000

Every request must end in the intended way: with a complete answer, an error that was provoked, or a
disconnect of the client. Afterwards no slot, block, inbox or task may be left, and memory use must
be as after a fifth of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
import uvloop
from torch import Tensor

from etude.engine.engine import Engine
from etude.model.files import hf_state_dict
from etude.model.transformer import ModelConfig
from etude.serve.engine_thread import EngineThread
from etude.serve.http import create_app
from etude.serve.worker import Worker
from tests.serve.conftest import served
from tests.small_model import sharp, small_files

CLIENTS = 24
MAX_ANSWERS = 20
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, 3]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "test", "parameters": {}}}]


@dataclass(frozen=True, slots=True)
class Report:
    outcomes: Counter[str]
    swaps: int
    seconds: float
    rss_early_mb: float
    rss_end_mb: float


async def soak(requests: int, seed: int = 0, swap_s: float = 1.0) -> Report:
    files = small_files()
    config = ModelConfig.from_json(files["config.json"])
    versions = [hf_state_dict(sharp(config, seed)) for seed in (0, 1)]

    def fetch(version: int) -> Mapping[str, Tensor]:
        return versions[version % 2]

    engine = EngineThread(
        Engine(sharp(config, 0), max_num_seqs=16, kv_cache_bytes=1 << 20), fetch, files
    )
    server = Worker(engine, files, "here")
    server.model.concurrency.limit = MAX_ANSWERS
    outcomes: Counter[str] = Counter()
    began, early_mb = time.monotonic(), 0.0
    async with served(create_app(server.routes(), None, server.model.metrics)) as url:
        before = asyncio.all_tasks()
        swapping = asyncio.create_task(swap(engine, swap_s))
        numbers = iter(range(requests))

        async def client(http: aiohttp.ClientSession) -> None:
            nonlocal early_mb
            for number in numbers:
                outcomes[await one(http, url, random.Random(seed * requests + number), number)] += 1
                if sum(outcomes.values()) == requests // 5:
                    early_mb = rss_mb()

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client(http))
        swapping.cancel()
        await settled(server, engine, before | {asyncio.current_task()})
        check_empty(server, engine)
    swaps = engine.engine.version
    engine.close()
    return Report(outcomes, swaps, time.monotonic() - began, early_mb, rss_mb())


async def swap(engine: EngineThread, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        await engine.load(engine.engine.version + 1)


async def settled(server: Worker, engine: EngineThread, before: set[Any]) -> None:
    """Wait until everything is released that disconnected clients left behind; fail if that takes
    too long."""
    async with asyncio.timeout(20):
        while (
            asyncio.all_tasks() - before
            or not engine.engine.idle
            or server.model.concurrency.in_use
        ):
            await asyncio.sleep(0.02)


def check_empty(server: Worker, engine: EngineThread) -> None:
    stats = engine.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_free) == (0, 0, stats.blocks), stats
    assert engine._inboxes == {}
    assert server.model.concurrency.in_use == 0


async def one(http: aiohttp.ClientSession, url: str, rng: random.Random, number: int) -> str:
    """Send one request; returns the name of its outcome."""
    path, body = question(rng, number)
    patience_s = rng.uniform(0, 0.2) if rng.random() < 0.25 else None
    try:
        async with asyncio.timeout(patience_s):
            while True:
                status, answer = await ask(http, url + path, body)
                if status != 429:
                    break
                await asyncio.sleep(rng.uniform(0, 0.05))
    except TimeoutError:
        return "left"
    if body["user"] == "oversize":
        assert status == 400 and "no room" in str(answer), answer
        return "refused"
    assert status == 200, answer
    check(body, answer)
    return "streamed" if body["stream"] else "whole"


def question(rng: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "seed": number, "max_tokens": rng.randrange(1, 40), "stream": rng.random() < 0.5,
        "n": rng.choice([1, 1, 1, 3]), "temperature": rng.choice([0, 1, 1.5]),
        "return_token_ids": True, "user": "soak",
    }  # fmt: skip
    words = " ".join(
        rng.choice(["read", "area", "return a", "é"]) for _ in range(rng.randrange(1, 20))
    )
    if rng.random() < 0.05:
        words, body["user"] = "return a + b " * 200, "oversize"
    if rng.random() < 0.3:
        body["stop"] = ["a", "\n", "tool"]
    if rng.random() < 0.5:
        return "/v1/completions", body | {"prompt": words}
    if rng.random() < 0.3:
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    elif rng.random() < 0.3:
        body |= {"tools": TOOLS, "tool_choice": rng.choice(["auto", "required"])}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}]}


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with http.post(url, json=body) as response:
        if response.content_type == "application/json":
            return response.status, await response.json()
        events = [line[6:].strip() async for line in response.content if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]"
        return response.status, [json.loads(event) for event in events[:-1]]


def check(body: dict[str, Any], answer: Any) -> None:
    """Check that every choice has ended, has as many tokens as were allowed, and has weight
    versions for all of them."""
    pieces = [
        choice for chunk in (answer if body["stream"] else [answer]) for choice in chunk["choices"]
    ]
    for index in range(body["n"]):
        own = [piece for piece in pieces if piece["index"] == index]
        assert [piece["finish_reason"] for piece in own if piece["finish_reason"]] in (
            ["stop"],
            ["length"],
            ["tool_calls"],
        )
        num_tokens = sum(len(piece["token_ids"]) for piece in own)
        assert 1 <= num_tokens <= body["max_tokens"]
        spans = [span for piece in own for span in piece.get("weight_version", ())]
        assert sum(span["count"] for span in spans) == num_tokens
        assert [span["version"] for span in spans] == sorted({span["version"] for span in spans})


def rss_mb() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(soak(args.requests, args.seed))
    print(dict(report.outcomes), f"{report.swaps} swaps in {report.seconds:.0f} s")
    print(
        f"memory {report.rss_early_mb:.1f} MB after a fifth, {report.rss_end_mb:.1f} MB at the end"
    )
    assert sum(report.outcomes.values()) == args.requests
    assert report.rss_end_mb < report.rss_early_mb * 1.05 + 4


if __name__ == "__main__":
    main()
