"""Gateways and fake workers as processes, over a store without a model, for benchmarks of the
gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.launch.launcher import free_ports
from etude.model.directory import MODEL_FILES
from etude.model.from_scratch import tokenizer_files
from etude.model.tokenizer import ChatTokenizer
from etude.store.objects import Objects
from etude.store.runs import Run

TEXTS = ["task turn word answer question file line test call tool edit read write run the of and"]
WORDS = " answer question file line test call tool edit read write run"
RUN = 'name = "bench"\n[model]\nmax_context = 8192\n[[stage]]\nkind = "rl"\nsteps = 1\n'
READY_S = 120.0


@dataclass(frozen=True, slots=True)
class Started:
    process: subprocess.Popen[str]
    url: str

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def start(stack: contextlib.ExitStack, module: str, *arguments: object) -> Started:
    """Start a process that prints its URL at the end of its first line."""
    argv = [sys.executable, "-P", "-m", module, *map(str, arguments)]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    stack.callback(child.wait)
    stack.callback(child.kill)
    assert child.stdout is not None
    url = child.stdout.readline().rpartition(" ")[2].strip()
    if not url:
        raise EtudeError(f"{module} ended with code {child.wait()} before it was ready")
    return Started(child, url)


def start_gateways(stack: contextlib.ExitStack, store: str, shards: int) -> list[Started]:
    if shards == 1:
        return [start_gateway(stack, store)]
    ports = free_ports(shards)
    urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    return [
        start(
            stack, "etude.serve.gateway", "--store", store, "--port", port, "--shards", urls,
            "--shard", index,
        )
        for index, port in enumerate(ports)
    ]  # fmt: skip


def start_gateway(stack: contextlib.ExitStack, store: str, port: int = 0) -> Started:
    return start(stack, "etude.serve.gateway", "--store", store, "--port", port)


def start_worker(
    stack: contextlib.ExitStack, files: dict[str, bytes], gateways: Sequence[str], *more: object
) -> Started:
    tokenizer = ChatTokenizer(files)
    words = ",".join(map(str, sorted(set(tokenizer.encode(WORDS)))))
    return start(
        stack, "etude.serve.fake_worker", "--gateway", ",".join(gateways), "--words", words,
        "--end", tokenizer.eos_token_id, *more,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def ready(gateways: Sequence[Started]) -> AsyncIterator[None]:
    """Wait until each gateway has a worker."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(READY_S):
        for each in gateways:
            async with http.get(f"{each.url}/up") as response:
                assert response.status == 204
    yield


def model_files() -> dict[str, bytes]:
    """The files of a model without weights: a vocabulary, and the shape of a model that is never
    built."""
    shape = {"max_position_embeddings": 8192, "vocab_size": 512}
    files = tokenizer_files(TEXTS * 4, 512) | {"config.json": json.dumps(shape).encode()}
    assert set(MODEL_FILES) <= files.keys(), files.keys()
    return files


def make_store(folder: Path, files: dict[str, bytes]) -> str:
    store = f"file:{folder}/store"
    objects = Objects.open(store)
    Run(objects).put_config(parse(RUN))
    for name, data in files.items():
        objects.put_sealed(f"model/{name}", data)
    return store


def session_path(name: str) -> Callable[[int], str]:
    return lambda session: f"/s/{name}{session}/v1/chat/completions"
