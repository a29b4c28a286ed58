"""Benchmark of the gateway in front of fake workers, which answer at a fixed pace: the time that it
adds to a turn.

`make bench-gateway` installs LiteLLM's proxy in an environment of its own and runs this. Three
servers take the same sessions one after the other: the worker alone, Etude's gateway in front of it
(recording every session, with the journal), and LiteLLM's proxy if it is installed.

    turns_per_s          complete answers, by the time from the first request to the last
    added_p50_ms, p99    time of a turn beyond that of the worker alone, percentile by percentile
    first_added_*        the same for the time to the first token
    light.*              the same with a twentieth of the sessions
    rss_mb, rss_growth   memory of the gateway after one pass, and the growth by a second one
    cpu_ms               processor time of the gateway, or of the proxy, per turn
    worker_cpu_ms        the same for the fake worker
    client_cpu_ms        the same for the clients

With `--kills`, gateway and workers are killed every few seconds instead, and every acknowledged
turn must be recorded once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop

from etude.bench._kills import kill_run
from etude.bench._load import Load, Measured
from etude.bench._servers import (
    READY_S,
    Started,
    make_store,
    model_files,
    ready,
    session_path,
    start_gateways,
    start_worker,
)
from etude.core.errors import EtudeError
from etude.launch.launcher import free_ports

LITELLM = Path(".venv-litellm/bin/litellm")
SESSIONS = 1000
TURNS = 20
KILL_TURNS = 40
LIGHT = 20
"""The light load has this many times fewer sessions."""
TOKENS = 8
FIRST_S = 0.1
EACH_S = 0.05
LIMIT_S = 60.0
"""Time limit of a pass, for machines that cannot keep up."""


def run(sessions: int = SESSIONS, kills: bool = False, shards: int = 1) -> dict[str, float]:
    if kills:
        return kill_run(sessions, KILL_TURNS)
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
            alone = await measure("worker", lambda n: worker.url, chat_path, sessions, worker)
            figures |= alone.figures()
            figures |= await etude_side(gateways, worker, alone, sessions)
        for each in gateways:
            each.kill()
        try:
            figures |= await litellm_side(stack, folder, worker, alone, sessions)
        except EtudeError as e:  # keep the figures so far
            print(e, file=sys.stderr)
    return figures | {"load_after": os.getloadavg()[0]}


async def etude_side(
    gateways: Sequence[Started], worker: Started, alone: Side, sessions: int
) -> dict[str, float]:
    urls = [each.url for each in gateways]

    def url(session: int) -> str:
        return urls[session % len(urls)]

    cpu_s = sum(each.cpu_s() for each in gateways)
    own = await measure("etude", url, session_path("a"), sessions, worker)
    cpu_s = sum(each.cpu_s() for each in gateways) - cpu_s
    await forget(urls, "a", sessions)
    rss_mb = sum(each.rss_mb() for each in gateways)
    await measure("again", url, session_path("b"), sessions, worker)
    await forget(urls, "b", sessions)
    return (
        own.figures()
        | own.added_to(alone)
        | {
            "etude.cpu_ms": 1000 * cpu_s / own.num_turns,
            "etude.rss_mb": rss_mb,
            "etude.rss_growth_mb": sum(each.rss_mb() for each in gateways) - rss_mb,
        }
    )


async def litellm_side(
    stack: contextlib.ExitStack, folder: Path, worker: Started, alone: Side, sessions: int
) -> dict[str, float]:
    if not LITELLM.exists():
        raise EtudeError(f"{LITELLM} does not exist: `make bench-gateway` installs it")
    proxy = await start_litellm(stack, folder, worker.url)
    cpu_s = proxy.cpu_s()
    other = await measure("litellm", lambda n: proxy.url, chat_path, sessions, worker)
    return (
        other.figures()
        | other.added_to(alone)
        | {
            "litellm.cpu_ms": 1000 * (proxy.cpu_s() - cpu_s) / other.num_turns,
            "litellm.rss_mb": proxy.rss_mb(),
        }
    )


@dataclass(frozen=True, slots=True)
class Side:
    """Measurements of one server: with a few sessions at once, then with all."""

    name: str
    light: Measured
    full: Measured
    worker_cpu_s: float
    client_cpu_s: float

    @property
    def num_turns(self) -> int:
        return len(self.light.turn_s) + len(self.full.turn_s)

    def figures(self) -> dict[str, float]:
        full = self.full
        return {
            f"{self.name}.turns_per_s": len(full.turn_s) / full.seconds,
            f"{self.name}.turn_p50_ms": 1000 * percentile(full.turn_s, 0.5),
            f"{self.name}.turn_p99_ms": 1000 * percentile(full.turn_s, 0.99),
            f"{self.name}.first_p50_ms": 1000 * percentile(full.first_s, 0.5),
            f"{self.name}.retries": full.num_retries + self.light.num_retries,
            f"{self.name}.worker_cpu_ms": 1000 * self.worker_cpu_s / self.num_turns,
            f"{self.name}.client_cpu_ms": 1000 * self.client_cpu_s / self.num_turns,
        }

    def added_to(self, alone: Side) -> dict[str, float]:
        figures = {}
        for load, own, base in (("", self.full, alone.full), ("light.", self.light, alone.light)):
            pairs = {"": (own.turn_s, base.turn_s), "first_": (own.first_s, base.first_s)}
            for what, (slow, fast) in pairs.items():
                for share in (50, 99):
                    added_s = percentile(slow, share / 100) - percentile(fast, share / 100)
                    figures[f"{self.name}.{load}{what}added_p{share}_ms"] = 1000 * added_s
        return figures


async def measure(
    name: str, url: Callable[[int], str], path: Callable[[int], str], sessions: int,
    worker: Started,
) -> Side:  # fmt: skip
    turn_s = FIRST_S + EACH_S * (TOKENS - 1)
    load = Load(path=path, url=url, turns=TURNS, spread_s=turn_s, limit_s=LIMIT_S)
    few = range(sessions, sessions + max(1, sessions // LIGHT))
    worker_s, client_s = worker.cpu_s(), time.process_time()
    light, full = await load.run(few), await load.run(range(sessions))
    return Side(
        name, light, full,
        worker_cpu_s=worker.cpu_s() - worker_s, client_cpu_s=time.process_time() - client_s,
    )  # fmt: skip


def chat_path(session: int) -> str:
    return "/v1/chat/completions"


async def forget(urls: Sequence[str], name: str, sessions: int) -> None:
    async with aiohttp.ClientSession() as http:
        for session in range(sessions + sessions // LIGHT):
            async with http.delete(f"{urls[0]}/s/{name}{session}") as response:
                assert response.status == 204, await response.text()


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def start_litellm(stack: contextlib.ExitStack, folder: Path, worker: str) -> Started:
    (port,) = free_ports(1)
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n- model_name: fake\n  litellm_params:\n    model: openai/fake\n"
        f"    api_base: {worker}/v1\n    api_key: x\nlitellm_settings:\n  telemetry: false\n"
    )
    argv = [str(LITELLM), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
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
