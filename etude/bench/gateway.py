"""The gateway before fake workers, which answer at a pace of their own: what it adds to a turn.

`make bench-gateway` installs LiteLLM's proxy in an environment of its own and runs this. One after
the other, with the same sessions: the worker alone, Etude's gateway before it (recording every
session, journal and all), and LiteLLM's proxy if it is there.

    turns_per_s          answers that were whole, by the time from the first question to the last
    added_p50_ms, p99    time of a turn beyond that of the worker alone, percentile by percentile
    first_added_*        the same of the time to the first token
    rss_mb, rss_growth   of the gateway, after one pass, and what a second one adds
    gateway_cpu_ms       processor time of the gateway for one turn

With `--kills`, gateways and workers are killed every other second instead, and every acknowledged
turn must be recorded once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop

from etude.bench._load import Load, Measured
from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.model.directory import MODEL_FILES
from etude.model.from_scratch import tokenizer_files
from etude.model.tokenizer import ChatTokenizer
from etude.store.objects import Objects
from etude.store.runs import Run

LITELLM = Path(".venv-litellm/bin/litellm")
SESSIONS = 1000
TURNS = 20
TOKENS = 8
FIRST_S = 0.1
EACH_S = 0.05
TEXTS = ["task turn word answer question file line test call tool edit read write run the of and"]
WORDS = " answer question file line test call tool edit read write run"
RUN = 'name = "bench"\n[model]\nmax_context = 8192\n[[stage]]\nkind = "rl"\nsteps = 1\n'
READY_S = 120.0


def run(sessions: int = SESSIONS, kills: bool = False, shards: int = 1) -> dict[str, float]:
    if kills:
        from etude.bench._kills import kill_run

        return kill_run(sessions, TURNS)
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
        return uvloop.run(compare(Path(scratch), sessions, shards))


async def compare(folder: Path, sessions: int, shards: int) -> dict[str, float]:
    files = model_files()
    figures: dict[str, float] = {"sessions": sessions, "load_before": os.getloadavg()[0]}
    with contextlib.ExitStack() as stack:
        gateways = start_gateways(stack, make_store(folder, files), shards)
        pace = ("--tokens", TOKENS, "--first-s", FIRST_S, "--each-s", EACH_S)
        worker = start_worker(stack, files, [each.url for each in gateways], *pace)
        async with ready(gateways):
            alone = await measure(lambda n: worker.url, lambda n: "/v1/chat/completions", sessions)
            figures |= told("worker", alone)
            urls = [each.url for each in gateways]
            cpu_s = sum(each.cpu_s() for each in gateways)
            own = await measure(lambda n: urls[n % shards], session_path("a"), sessions)
            cpu_s = sum(each.cpu_s() for each in gateways) - cpu_s
            await forget(urls, "a", sessions)
            rss_mb = sum(each.rss_mb() for each in gateways)
            await measure(lambda n: urls[n % shards], session_path("b"), sessions)
            await forget(urls, "b", sessions)
        figures |= told("etude", own) | added("etude", own, alone)
        figures["etude.gateway_cpu_ms"] = 1000 * cpu_s / len(own.turn_s)
        figures["etude.rss_mb"] = rss_mb
        figures["etude.rss_growth_mb"] = sum(each.rss_mb() for each in gateways) - rss_mb
        for each in gateways:
            each.kill()
        if LITELLM.exists():
            proxy = await start_litellm(stack, folder, worker.url)
            other = await measure(lambda n: proxy.url, lambda n: "/v1/chat/completions", sessions)
            figures |= told("litellm", other) | added("litellm", other, alone)
            figures["litellm.rss_mb"] = proxy.rss_mb()
        else:
            print(f"{LITELLM} is not there: `make bench-gateway` installs it", file=sys.stderr)
    return figures | {"load_after": os.getloadavg()[0]}


async def measure(url: Callable[[int], str], path: Callable[[int], str], sessions: int) -> Measured:
    turn_s = FIRST_S + EACH_S * (TOKENS - 1)
    load = Load(path=path, url=url, turns=TURNS, spread_s=turn_s)
    return await load.run(range(sessions))


def session_path(name: str) -> Callable[[int], str]:
    return lambda session: f"/s/{name}{session}/v1/chat/completions"


async def forget(urls: Sequence[str], name: str, sessions: int) -> None:
    async with aiohttp.ClientSession() as http:
        for session in range(sessions):
            async with http.delete(f"{urls[0]}/s/{name}{session}") as response:
                assert response.status == 204, await response.text()


def told(side: str, measured: Measured) -> dict[str, float]:
    return {
        f"{side}.turns_per_s": len(measured.turn_s) / measured.seconds,
        f"{side}.turn_p50_ms": 1000 * percentile(measured.turn_s, 0.5),
        f"{side}.turn_p99_ms": 1000 * percentile(measured.turn_s, 0.99),
        f"{side}.first_p50_ms": 1000 * percentile(measured.first_s, 0.5),
    }


def added(side: str, measured: Measured, alone: Measured) -> dict[str, float]:
    pairs = {"": (measured.turn_s, alone.turn_s), "first_": (measured.first_s, alone.first_s)}
    return {
        f"{side}.{what}added_p{share}_ms": 1000
        * (percentile(own, share / 100) - percentile(base, share / 100))
        for what, (own, base) in pairs.items()
        for share in (50, 99)
    }


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


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
    """A process that says its URL at the end of its first line."""
    argv = [sys.executable, "-P", "-m", module, *map(str, arguments)]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    stack.callback(child.wait)
    stack.callback(child.kill)
    assert child.stdout is not None
    url = child.stdout.readline().rpartition(" ")[2].strip()
    if not url:
        raise EtudeError(f"{module} ended with code {child.wait()} before it served")
    return Started(child, url)


def start_gateways(stack: contextlib.ExitStack, store: str, shards: int) -> list[Started]:
    if shards == 1:
        return [start_gateway(stack, store)]
    from etude.launch.launcher import free_ports

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
    """All of them have a worker."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(READY_S):
        for each in gateways:
            async with http.get(f"{each.url}/up") as response:
                assert response.status == 204
    yield


def model_files() -> dict[str, bytes]:
    """A vocabulary, and the shape of a model that is never made."""
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


async def start_litellm(stack: contextlib.ExitStack, folder: Path, worker: str) -> Started:
    from etude.launch.launcher import free_ports

    (port,) = free_ports(1)
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n- model_name: fake\n  litellm_params:\n    model: openai/fake\n"
        f"    api_base: {worker}/v1\n    api_key: x\nlitellm_settings:\n  telemetry: false\n"
    )
    argv = [str(LITELLM), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    log = stack.enter_context((folder / "litellm.log").open("w"))
    child = subprocess.Popen(argv, stdout=log, stderr=log, text=True, env=environment | own)
    stack.callback(child.wait)
    stack.callback(child.kill)
    proxy = Started(child, f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + READY_S
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < deadline and child.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{proxy.url}/health/liveliness") as response:
                    if response.ok:
                        return proxy
            await asyncio.sleep(0.2)
    raise EtudeError(f"LiteLLM did not start: {(folder / 'litellm.log').read_text()[-2000:]}")
