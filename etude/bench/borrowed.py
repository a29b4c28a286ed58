"""Replay of a day of production load in minutes: the idle capacity that RL uses, and its cost for
users.

A gateway and one worker with a small model run as processes. Users arrive at random by a daily
curve: a quiet night, a busy day, and bursts beyond the worker's capacity. The day is cut into
slices, and each is replayed twice in a row with the same requests, once with RL on the same worker
and once without, so that both see the same machine. RL always has more sessions to sample than
there are slots. The worker has a processor of its own, as a worker of a fleet has its own GPU, so
that a busy engine does not slow down gateway and users.

    idle_used               slot-seconds that RL held, over those that users left, with RL
    users_ttft_p99_ms       time to first token of users with RL; alone_* without RL
    users_ttft_p99_ratio    the former over the latter; also p50
    users_turn_p50_ratio    the same for whole answers
    requests, lost          requests of users, with RL; and incomplete answers, in both replays
    late_share              share of users with RL who waited longer than [engine.lend] max_ttft_s,
                            which is the p99 of the worst hours without RL, measured before
    rl_tokens_per_s         tokens that RL sampled
    preemptions             preemptions of RL by users
    idle_share              idle share of all slot-seconds, in the day with RL

`--simulate` plays days under virtual time instead (`_borrowed_days`), with the engine's own
scheduler, on this processor (`cpu.`) and by the data sheet of a GPU (`h100.`, a model of 8B). The
figures are medians of several days, independent of other load on the machine. There `idle_used` is
the number of tokens that RL sampled over the number that it could have sampled alone in the time
in which the engine is idle without it; `idle_slots_used` is by slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import aiohttp
import msgspec

from etude.bench._borrowed_days import Day, PassCost, Work, gpu_cost, measured_cost
from etude.bench._load import BrokenOff, Connection
from etude.bench._servers import Started, ready, start, start_gateway
from etude.core.config import parse
from etude.core.lending import SlotPolicy
from etude.model.files import hf_state_dict
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.store.objects import Objects
from etude.store.runs import Run
from etude.trainer.prepare import scratch_files
from etude.weights.publish import publish

RUN = """
name = "borrowed"
[model]
max_context = 512
[engine]
regions = ["here"]
max_num_seqs = {slots}
{lend}
[[stage]]
kind = "rl"
steps = 1
"""
SLOTS = 8
DAY_S = 120.0
SLICES = 12
PROMPT, ANSWER, ROLLOUT = 96, 24, 64
"""Tokens of a user's prompt, of its answer, and of one turn of RL."""
BUSY = 0.6
"""Load at noon, as a share of the worker's capacity."""
NIGHT = 0.05
BURSTS = {10.0: 1.3, 14.5: 1.6, 20.0: 1.3}
"""Hour -> load of a burst of 20 minutes, as a multiple of the worker's capacity."""
BURST_H = 1 / 3
WORST = 7
"""The slice with the greatest burst."""
WORK = Work(prompt=PROMPT, answer=ANSWER, rollout=ROLLOUT, slots=SLOTS)
DAYS = 5


@dataclass(slots=True)
class Measured:
    """Measurements of the users' requests."""

    ttft_s: list[float] = field(default_factory=list)
    turn_s: list[float] = field(default_factory=list)
    lost: int = 0


class FirstEvent(Connection):
    """A connection that records the time of its first event, which is the first token."""

    def data_received(self, data: bytes) -> None:
        if not self.first_at and b"data: {" in data:
            self.first_at = time.perf_counter()
        Connection.data_received(self, data)


class Client:
    """A client of one server that keeps its connections."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._idle: list[FirstEvent] = []

    async def ask(self, path: str, body: dict[str, object]) -> tuple[float, float]:
        """Seconds to the first token and to the last. Raises `BrokenOff` if the answer is
        incomplete."""
        data = msgspec.json.encode(body)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        began = time.perf_counter()
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            answer = await connection.ask(head.encode() + data)
        except BaseException:
            connection.transport.close()
            raise
        if not answer.startswith(b"HTTP/1.1 200") or (b"[DONE]" not in answer and body["stream"]):
            raise BrokenOff(answer[:500].decode(errors="replace"))
        self._idle.append(connection)
        return connection.first_at - began, time.perf_counter() - began

    async def _connect(self) -> FirstEvent:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(FirstEvent, self._host, self._port))[1]


def day(capacity: float, rng: random.Random, day_s: float = DAY_S) -> list[float]:
    """The arrival times of users, in seconds from midnight. `capacity` is the number of requests
    per second that the worker can answer."""
    arrivals, at = [], 0.0
    most = capacity * max(BURSTS.values())
    while (at := at + rng.expovariate(most)) < day_s:
        if rng.random() < capacity * share(24.0 * at / day_s) / most:
            arrivals.append(at)
    return arrivals


def slices(arrivals: Sequence[float]) -> list[list[tuple[int, float]]]:
    """The day in slices: the number of each user, with the arrival time within the slice."""
    parts: list[list[tuple[int, float]]] = [[] for _ in range(SLICES)]
    for number, at in enumerate(arrivals):
        which, since = divmod(at, DAY_S / SLICES)
        parts[int(which)].append((number, since))
    return parts


def share(hour: float) -> float:
    """The load of users at an hour, as a share of the worker's capacity."""
    for begin, load in BURSTS.items():
        if begin <= hour < begin + BURST_H:
            return load
    return NIGHT + (BUSY - NIGHT) * max(0.0, math.sin(math.pi * (hour - 6) / 16)) ** 2


class Replay:
    """Requests of users and RL to one gateway."""

    def __init__(self, gateway: str, worker: str, vocabulary: int) -> None:
        self._client = Client(gateway)
        self._worker = worker
        self._vocabulary = vocabulary
        self._sessions = 0

    async def user(self, number: int, measured: Measured) -> None:
        rng = random.Random(number)
        prompt = [rng.randrange(10, self._vocabulary) for _ in range(PROMPT)]
        asked = {"prompt": prompt, "max_tokens": ANSWER, "seed": number, "stop_token_ids": []}
        try:
            first, turn = await self._client.ask("/v1/completions", {**asked, "stream": True})
        except (BrokenOff, OSError) as e:
            print(f"lost: {e}", file=sys.stderr)
            measured.lost += 1
            return
        measured.ttft_s.append(first)
        measured.turn_s.append(turn)

    async def users(self, arrivals: Sequence[tuple[int, float]], measured: Measured) -> None:
        """Send each request at its time, and return when all are answered."""
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, at in arrivals:
                await asyncio.sleep(began + at - time.perf_counter())
                group.create_task(self.user(number, measured))

    @contextlib.asynccontextmanager
    async def rl(self) -> AsyncIterator[None]:
        """Let RL sample while the block runs, with one and a half times as many sessions as there
        are slots."""

        async def sample() -> None:
            while True:
                self._sessions += 1
                said = {"role": "user", "content": f"task {self._sessions} " * 8}
                asked = {"messages": [said], "max_tokens": ROLLOUT, "seed": self._sessions}
                path = f"/s/rl{self._sessions}/v1/chat/completions"
                await self._client.ask(path, {**asked, "stream": False})

        tasks = [asyncio.create_task(sample()) for _ in range(SLOTS * 3 // 2)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def gauges(self) -> dict[str, float]:
        async with aiohttp.ClientSession() as http, http.get(f"{self._worker}/metrics") as told:
            lines = re.findall(r"^etude_(\w+) (\S+)$", await told.text(), re.MULTILINE)
        return {name: float(value) for name, value in lines} | {"wall": time.perf_counter()}


def make_store(folder: Path, max_ttft_s: float | None) -> tuple[str, int]:
    """Make the store of a run with random weights. Return its URL and the vocabulary size."""
    lend = "" if max_ttft_s is None else f"[engine.lend]\nmax_ttft_s = {max_ttft_s:.4f}"
    config = parse(RUN.format(slots=SLOTS, lend=lend))
    store = f"file:{folder}/store"
    objects = Objects.open(store)
    Run(objects).put_config(config)
    if max_ttft_s is None:
        files = scratch_files(config)
        for name, data in files.items():
            objects.put_sealed(f"model/{name}", data)
        model = init_from_scratch(ModelConfig.from_json(files["config.json"]), seed=0)
        publish(objects, 0, hf_state_dict(model), stage="bench", step=0)
    shape = msgspec.json.decode(Run(objects).model_files()["config.json"])
    return store, int(shape["vocab_size"])


@contextlib.contextmanager
def on_processors(chosen: set[int]) -> Iterator[None]:
    """Pin the processes that the block starts to these processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.asynccontextmanager
async def served(folder: Path, max_ttft_s: float | None) -> AsyncIterator[Replay]:
    """Start a gateway and a worker. With `max_ttft_s` the worker lends slots within this bound."""
    store, vocabulary = make_store(folder, max_ttft_s)
    *others, own = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack, on_processors({*others} or {own}):
        gateway: Started = start_gateway(stack, store)
        with on_processors({own}):
            worker = start(
                stack, "etude.serve.worker", "--store", store, "--region", "here", "--port", 0,
                "--gateway", gateway.url, "--version", 0,
            )  # fmt: skip
        async with ready([gateway]):
            yield Replay(gateway.url, worker.url, vocabulary)


async def calibrate(folder: Path) -> tuple[float, float]:
    """Requests per second that the worker can answer, and the p99 of the time to first token in the
    hours with the greatest burst."""
    async with served(folder, None) as replay:
        warm, measured = Measured(), Measured()
        await replay.users([(n, 0.0) for n in range(8 * SLOTS)], warm)
        began = time.perf_counter()
        count = 40 * SLOTS
        await replay.users([(n, 0.0) for n in range(count)], warm)
        capacity = count / (time.perf_counter() - began)
        await replay.users(slices(day(capacity, random.Random(1)))[WORST], measured)
    return capacity, _percentile(measured.ttft_s, 0.99)


async def replay_day(folder: Path, capacity: float, max_ttft_s: float) -> dict[str, float]:
    parts = slices(day(capacity, random.Random(0)))
    alone, beside = Measured(), Measured()
    held = {"users": 0.0, "batch": 0.0, "wall": 0.0, "tokens": 0.0, "preemptions": 0.0}
    async with served(folder, max_ttft_s) as replay:
        await replay.users([(n, 0.0) for n in range(4 * SLOTS)], Measured())
        for number, part in enumerate(parts):
            for with_rl in (number % 2 == 0, number % 2 == 1):
                if not with_rl:
                    await replay.users(part, alone)
                    continue
                async with replay.rl():
                    before = await replay.gauges()
                    await replay.users(part, beside)
                    _add(held, before, await replay.gauges())
            print(f"hour {24 * (number + 1) // SLICES}", file=sys.stderr, flush=True)
    idle = SLOTS * held["wall"] - held["users"]
    figures = {
        "idle_used": held["batch"] / idle,
        "users_ttft_p99_ms": 1e3 * _percentile(beside.ttft_s, 0.99),
        "users_alone_ttft_p99_ms": 1e3 * _percentile(alone.ttft_s, 0.99),
        "users_ttft_p50_ms": 1e3 * median(beside.ttft_s),
        "users_alone_ttft_p50_ms": 1e3 * median(alone.ttft_s),
        "users_turn_p50_ratio": median(beside.turn_s) / median(alone.turn_s),
        "requests": len(beside.ttft_s),
        "lost": alone.lost + beside.lost,
        "late_share": sum(s > max_ttft_s for s in beside.ttft_s) / len(beside.ttft_s),
        "rl_tokens_per_s": (held["tokens"] - ANSWER * len(beside.ttft_s)) / held["wall"],
        "preemptions": held["preemptions"],
        "idle_share": idle / (SLOTS * held["wall"]),
        "capacity_per_s": capacity,
        "max_ttft_ms": 1e3 * max_ttft_s,
    }
    for which in ("p99", "p50"):
        name = f"ttft_{which}_ms"
        ratio = figures[f"users_{name}"] / figures[f"users_alone_{name}"]
        figures[f"users_ttft_{which}_ratio"] = ratio
    return figures


def _add(held: dict[str, float], before: dict[str, float], after: dict[str, float]) -> None:
    names = {"users": "engine_slot_seconds_users", "batch": "engine_slot_seconds_batch"}
    names |= {"wall": "wall", "tokens": "engine_generation_tokens"}
    names |= {"preemptions": "engine_preemptions"}
    for name, gauge in names.items():
        held[name] += after[gauge] - before[gauge]


def simulated(days: int = DAYS, day_s: float = DAY_S) -> dict[str, float]:
    """The medians over simulated days, on this processor and on a GPU."""
    files = scratch_files(parse(RUN.format(slots=SLOTS, lend="")))
    config = ModelConfig.from_json(files["config.json"])
    costs = {
        "cpu": measured_cost(config, SLOTS, PROMPT),
        "h100": gpu_cost("h100", parameters=8e9, kv_bytes=147e3, context=PROMPT + ANSWER),
    }
    figures: dict[str, float] = {}
    for name, cost in costs.items():
        found = [simulate_day(config, cost, seed, day_s) for seed in range(days)]
        for key in found[0]:
            figures[f"{name}.{key}"] = median(each[key] for each in found)
        figures[f"{name}.users_ttft_p99_ratio_max"] = max(
            each["users_ttft_p99_ratio"] for each in found
        )
    return figures


def simulate_day(config: ModelConfig, cost: PassCost, seed: int, day_s: float) -> dict[str, float]:
    """Play a day under virtual time, with RL and without. The idle time of the engine without RL is
    the most that RL could have used."""

    def lending(max_ttft_s: float) -> Day:
        return Day(config, cost, WORK, SlotPolicy(slots=SLOTS, max_ttft_s=max_ttft_s))

    count = 40 * SLOTS
    capacity = count / Day(config, cost, WORK, None).play([0.0] * count, 0.0).seconds
    before = day(capacity, random.Random(f"before {seed}"), day_s)
    max_ttft_s = _percentile(Day(config, cost, WORK, None).play(before, day_s).ttft_s, 0.99)
    arrivals = day(capacity, random.Random(f"day {seed}"), day_s)
    alone = Day(config, cost, WORK, None).play(arrivals, day_s)
    beside = lending(max_ttft_s).play(arrivals, day_s)
    rl_alone = lending(math.inf).play([], day_s / 10)
    idle_s = beside.seconds - alone.busy_s
    return {
        "idle_used": (beside.rl_tokens / (rl_alone.rl_tokens / rl_alone.seconds * idle_s)),
        "idle_slots_used": beside.rl_slot_s / (SLOTS * beside.seconds - beside.users_slot_s),
        "users_ttft_p99_ms": 1e3 * _percentile(beside.ttft_s, 0.99),
        "users_alone_ttft_p99_ms": 1e3 * _percentile(alone.ttft_s, 0.99),
        "users_ttft_p99_ratio": _ratio(beside.ttft_s, alone.ttft_s, 0.99),
        "users_ttft_p90_ratio": _ratio(beside.ttft_s, alone.ttft_s, 0.9),
        "users_ttft_p50_ratio": _ratio(beside.ttft_s, alone.ttft_s, 0.5),
        "users_turn_p50_ratio": _ratio(beside.turn_s, alone.turn_s, 0.5),
        "requests": len(beside.ttft_s),
        "lost": len(arrivals) - len(beside.turn_s),
        "late_share": sum(s > max_ttft_s for s in beside.ttft_s) / len(beside.ttft_s),
        "rl_tokens_per_s": beside.rl_tokens / beside.seconds,
        "preemptions": beside.preemptions,
        "idle_share": idle_s / beside.seconds,
        "capacity_per_s": capacity,
        "pass_ms": 1e3 * cost.of(SLOTS, 0),
        "first_pass_ms": 1e3 * cost.of(0, PROMPT),
    }


def _ratio(beside: Sequence[float], alone: Sequence[float], share: float) -> float:
    return _percentile(beside, share) / _percentile(alone, share)


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def run(simulate: bool = False) -> dict[str, float]:
    if simulate:
        return simulated()
    with tempfile.TemporaryDirectory() as folder:
        capacity, ttft_s = asyncio.run(calibrate(Path(folder)))
        told = f"{capacity:.1f} requests/s, p99 of the first token {1e3 * ttft_s:.0f} ms"
        print(told, file=sys.stderr, flush=True)
        return asyncio.run(replay_day(Path(folder), capacity, ttft_s))
