"""Benchmark of the dashboard over a synthetic run: requests over HTTP to the real server.

open_s            until the first answer, so starting and reading all rows, events and entries
filter_*          a page of rollouts with counts and histograms, for filters of all kinds
view_*            the other views
session_*_s       a session of 200,000 tokens in a group of four: its conversation, and a page of
                  its tokens
any_session_*     with --gigabytes: random sessions among whole groups of that total size
groups_gb         total size of these groups, with the time to write them
live_s            from an event in the store to an answer that contains it
rss_mib           memory of the server at the end
page_kb           size of all files of the page
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from etude.core.config import parse
from etude.core.events import EVENTS, AttemptDone, StepDone
from etude.core.ledger import Batched, Issued, Trained
from etude.core.sampling import VersionSpan
from etude.core.types import Cost, Group, Json, Part, Score, Segment, Trajectory
from etude.store.codec import pack
from etude.store.rollouts import RolloutLog, RolloutRow
from etude.store.runs import Run

ROLLOUTS = 100_000
PER_FILE = 256
TOKENS = 200_000
ANY_SESSIONS = 100
FILTERS = (
    "",
    "reward_min=0.5&reward_max=0.9",
    "status=failed",
    "became=no_signal&length_min=20000",
    "version=77",
    "flag=reads-the-tests",
    "text=timeout",
    "text=task-0123",
    "text=g00777",
    "task=task-01234",
    "step=40&sort=-length",
    "kind=train&solved=false&turns_min=10&sort=-seconds",
)
VIEWS = ("overview", "failures", "ledger", "fleet", "doctor", "review")
ERRORS = (
    "sandbox: timeout after 30 s in test_{n}",
    "agent: KeyError in agent.py, line {n}: 'tool_calls'",
    "model: the worker east was lost ({n})",
)


def run(gigabytes: float = 0.0) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
        store = Run.open(f"file:{scratch}")
        write_run(store)
        written = _write_groups(store, gigabytes) if gigabytes else {}
        began = time.monotonic()
        with server(scratch) as (client, pid):
            client.get("/api/runs")
            figures = {"load": os.getloadavg()[0], "open_s": time.monotonic() - began} | written
            base = f"/api/runs/{Path(scratch).name}"
            figures |= _filters(client, base)
            for view in VIEWS:
                figures[f"view_{view}_ms"] = 1000 * client.timed(f"{base}/{view}")
            long = f"{base}/sessions/g999999.0"
            figures["session_conversation_s"] = client.timed(long)
            figures["session_tokens_s"] = client.timed(f"{long}/tokens?offset=100000&limit=4000")
            if gigabytes:
                figures |= _any_sessions(client, base)
            figures["live_s"] = _live(store, client, base)
            figures["rss_mib"] = _rss_mib(pid)
    figures["page_kb"] = _page_bytes() / 1000
    return figures


def write_run(run: Run) -> None:
    """Write rows like those of a run, some events, and one group of long sessions."""
    run.put_config(parse('name = "bench"\n[[stage]]\nkind = "rl"\nsteps = 1000\n'))
    chance, log = random.Random(0), RolloutLog(run.objects)
    rows = [_row(number, chance) for number in range(ROLLOUTS)]
    for start in range(0, ROLLOUTS, PER_FILE):
        log.append(rows[start : start + PER_FILE])
    run.put_group(_group("g999999", attempts=4, tokens=TOKENS))
    log.append([_long_row()])
    events = run.events("trainer", EVENTS)
    for step in range(1, 1 + ROLLOUTS // PER_FILE):
        events.append(_step(step, chance))
    events.flush()
    for number in range(0, min(ROLLOUTS, 1000), 8):
        group = f"g{number // 8:06d}"
        samples = tuple(f"{group}.{attempt}" for attempt in range(8))
        run.ledger.append(Issued(group=group, task="task", samples=samples, version=0))
        run.ledger.append(Batched(step=number // 8 + 1, samples=samples))
        run.ledger.append(Trained(step=number // 8 + 1))


def _row(number: int, chance: random.Random) -> RolloutRow:
    group = f"g{number // 8:06d}"
    version = number // PER_FILE
    failed = chance.random() < 0.05
    trained = not failed and chance.random() < 0.8
    length = int(chance.lognormvariate(8.5, 1.2))
    return RolloutRow(
        id=f"{group}.{number % 8}",
        task=f"task-{chance.randrange(5000):05d}",
        kind="train",
        group=group,
        slot=number % 64,
        stage="rl",
        step=version + 1 if trained else None,
        dropped=None if trained else "failed" if failed else "no_signal",
        status="failed" if failed else "timeout" if chance.random() < 0.1 else "done",
        error=chance.choice(ERRORS).format(n=chance.randrange(1000)) if failed else None,
        reward=None if failed else chance.choice((0.0, 0.0, 0.25, 0.6, 1.0, 1.0)),
        parts={} if failed else {"tests": chance.random(), "style": chance.random()},
        flags=("reads-the-tests",) if chance.random() < 0.01 else (),
        length=length,
        turns=1 + length // 900,
        versions=(max(0, version - 1), version),
        prompt_tokens=4 * length,
        sampled_tokens=length // 3,
        seconds=chance.expovariate(1 / 60),
        calls=1 + length // 900,
        source=chance.choice(("repo-a:Tests", "repo-b:Tests", "review:Judge")),
        policy="bench",
        object=f"groups/{group}",
    )


def _long_row() -> RolloutRow:
    row = _row(0, random.Random(1))
    return replace(row, id="g999999.0", group="g999999", object="groups/g999999", length=TOKENS)


def _group(id: str, *, attempts: int, tokens: int) -> Group:
    """A group of attempts with `tokens` tokens each, a multiple of 20."""
    sampled = tokens // 2
    segment = Segment(
        prompt=(1, 2, 3),
        tokens=tuple(n % 50_000 for n in range(tokens)),
        mask=(True, False) * sampled,
        logprobs=tuple(-0.01 * (n % 700) if n % 2 == 0 else 0.0 for n in range(tokens)),
        versions=tuple(VersionSpan(version, sampled // 10) for version in range(10)),
    )
    call = {"id": "1", "function": {"name": "run", "arguments": '{"command": "pytest -q"}'}}
    messages: list[dict[str, Json]] = [
        {"role": "assistant", "content": "I look at the next file.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "def f(x):\n    return x + 1\n" * 120},
    ] * (tokens // 800)
    made = tuple(
        Trajectory(
            id=f"{id}.{number}",
            task="task-long",
            group=id,
            segments=(segment,),
            score=Score(0.5, (Part("tests", 0.5, "3 of 6 passed"),)),
            status="done",
            messages=[{"role": "user", "content": "mend it"}, *messages],
            cost=Cost(sampled_tokens=sampled),
        )
        for number in range(attempts)
    )
    return Group(id=id, task="task-long", slot=0, admitted=0, trajectories=made)


def _write_groups(run: Run, gigabytes: float) -> dict[str, float]:
    """Write a group for each of those in the rows. Groups of four different sizes are encoded once
    and written repeatedly under other ids."""
    began = time.monotonic()
    count = ROLLOUTS // 8
    per_token = len(pack(_group("g000000", attempts=8, tokens=8000))) / 8000
    mean = gigabytes * 1e9 / count / per_token
    kinds = [
        pack(_group("g000000", attempts=8, tokens=20 * round(mean * share / 20)))
        for share in (0.25, 0.5, 1.0, 2.25)
    ]
    size = 0
    for number in range(count):
        id = f"g{number:06d}"
        data = kinds[number % len(kinds)].replace(b"g000000", id.encode())
        run.objects.put_sealed(f"groups/{id}", data)
        size += len(data)
    return {"groups_gb": size / 1e9, "groups_written_s": time.monotonic() - began}


def _any_sessions(client: Client, base: str) -> dict[str, float]:
    chance = random.Random(2)
    count = ROLLOUTS // 8
    ids = [f"g{chance.randrange(count):06d}.{chance.randrange(8)}" for _ in range(ANY_SESSIONS)]
    read = sorted(1000 * client.timed(f"{base}/sessions/{id}") for id in ids)
    tokens = sorted(1000 * client.timed(f"{base}/sessions/{id}/tokens?limit=4000") for id in ids)
    return {
        "any_session_p50_ms": median(read),
        "any_session_max_ms": read[-1],
        "any_session_tokens_p50_ms": median(tokens),
        "any_session_tokens_max_ms": tokens[-1],
    }


def _step(step: int, chance: random.Random) -> StepDone:
    return StepDone(
        step=step,
        loss=chance.random(),
        lag=1,
        k1=0.0,
        k3_mean=1e-4,
        k3_p99=1e-3,
        entropy=1.0,
        grad_norm=0.3,
        tokens=10_000,
        seconds=20.0,
        wait_s=4.0,
        reward=chance.random(),
    )


class Client:
    def __init__(self, url: str) -> None:
        self._netloc = urlsplit(url).netloc

    def get(self, path: str) -> dict[str, object]:
        connection = http.client.HTTPConnection(self._netloc, timeout=600)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        assert answer.status == 200, f"{path}: {answer.status} {data[:200]!r}"
        found: dict[str, object] = json.loads(data)
        return found

    def timed(self, path: str) -> float:
        began = time.monotonic()
        self.get(path)
        return time.monotonic() - began


@contextlib.contextmanager
def server(url: str) -> Iterator[tuple[Client, int]]:
    """Start the dashboard by its command."""
    process = subprocess.Popen(
        [sys.executable, "-m", "etude", "dash", url, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield Client(process.stdout.readline().split()[-1]), process.pid
    finally:
        process.terminate()
        process.wait()


def _filters(client: Client, base: str) -> dict[str, float]:
    times = [1000 * client.timed(f"{base}/rollouts?{each}") for each in FILTERS * 5]
    return {
        "filter_p50_ms": median(times),
        "filter_p95_ms": sorted(times)[int(0.95 * len(times))],
        "filter_max_ms": max(times),
    }


def _live(run: Run, client: Client, base: str) -> float:
    before = client.get(f"{base}/rollouts?limit=1")["total"]
    log = run.events("controller", EVENTS)
    log.append(
        AttemptDone(
            id="g888888.0", task="t", split="train", status="done", reward=1.0, error=None,
            seconds=1.0,
        )
    )  # fmt: skip
    log.flush()
    began = time.monotonic()
    while client.get(f"{base}/rollouts?limit=1")["total"] == before:
        time.sleep(0.05)
    return time.monotonic() - began


def _rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def _page_bytes() -> int:
    root = Path(str(resources.files("etude.dash").joinpath("static")))
    return sum(path.stat().st_size for path in root.rglob("*") if path.suffix != ".txt")
