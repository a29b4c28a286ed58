"""A store with some of everything that the dashboard shows, and text hostile to browsers
everywhere."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import ASGIApp, Message

from etude.core.config import parse
from etude.core.events import (
    EVENTS,
    AttemptDone,
    FleetStatus,
    GroupDone,
    Launched,
    RegionStatus,
    StageStarted,
    StepDone,
    WeightsLive,
)
from etude.core.ledger import Batched, Dropped, Issued, Trained
from etude.core.sampling import VersionSpan
from etude.core.types import (
    Batch,
    Cost,
    Group,
    Part,
    RecomputedRow,
    Row,
    Score,
    Segment,
    Trajectory,
)
from etude.run.loop import attempt_done
from etude.store.rollouts import RolloutLog, group_rows
from etude.store.runs import Run
from tests.small_model import small_files

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><svg onload=alert(1)>",
    "\"><img src=x onerror='alert(1)'>",
    "javascript:alert(1)",
    "{{constructor.constructor('alert(1)')()}}",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "\u2028\u2029<!--<script>",
    "=cmd|' /C calc'!A0",
)
ALL_HOSTILE = " ".join(HOSTILE)

SEGMENT = Segment(
    prompt=(1, 2),
    tokens=(3, 4, 5, 6),
    mask=(True, False, True, True),
    logprobs=(-0.5, 0.0, -1.5, -2.5),
    versions=(VersionSpan(0, 1), VersionSpan(1, 2)),
)


def trajectory(id: str, reward: float | None, *, task: str = "t1", said: str = "") -> Trajectory:
    call = {"id": "c1", "function": {"name": f"edit{said}", "arguments": json.dumps({"x": said})}}
    return Trajectory(
        id=id,
        task=task,
        group=id.rpartition(".")[0],
        segments=(SEGMENT,),
        score=None
        if reward is None
        else Score(reward, (Part("checks", reward, f"error: {said}"),), (said,) if said else ()),
        status="failed" if reward is None else "done",
        error=f"sandbox: no room for 17 of {said}" if reward is None else None,
        messages=[
            {"role": "user", "content": f"fix it {said}"},
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": f"error: {said}"},
        ],
        source=f"env{said}",
        policy="p",
        cost=Cost(prompt_tokens=9, sampled_tokens=3, seconds=2.0, calls=2),
    )


def group(number: int, *attempts: Trajectory) -> Group:
    id = f"g{number:06d}"
    task = attempts[0].task
    return Group(id=id, task=task, slot=0, admitted=0, stage="rl", trajectories=attempts)


def step(number: int) -> StepDone:
    return StepDone(
        step=number, loss=0.1, lag=1, k1=0.0, k3_mean=0.5, k3_p99=0.9, entropy=1.0, grad_norm=1.0,
        tokens=9, seconds=1.0, wait_s=3.0, reward=0.5, lags=(3, 6),
    )  # fmt: skip


def write_run(run: Run, said: str = ALL_HOSTILE) -> None:
    """Write a run: group 1 is trained on, group 2 is dropped except for one attempt that waits, and
    one attempt of group 3 has ended."""
    run.put_config(parse('name = "x"\n[[stage]]\nkind = "rl"\nsteps = 3\nmax_lag = 2\n'))
    for name, data in small_files().items():
        run.put_model_file(name, data)
    first = group(1, trajectory("g000001.0", 1.0), trajectory("g000001.1", 0.25, said=said))
    second = group(2, trajectory("g000002.0", 0.0, task=f"t2{said}"), trajectory("g000002.1", None))
    evaluated = [trajectory("eval-1-heldout.h1", 1.0, task="h1")]
    key = run.put_eval_sessions("000001.heldout", evaluated)
    log = RolloutLog(run.objects)
    run.put_group(first)
    run.put_group(second)
    log.append([replace(row, step=2) for row in group_rows(first)])
    log.put_evaluation("000001.heldout", evaluated, stage="rl", split="heldout", object=key)
    _write_batch(run, first)
    for number in (1, 2, 3):
        samples = tuple(f"g{number:06d}.{attempt}" for attempt in (0, 1))
        run.ledger.append(Issued(group=f"g{number:06d}", task="t", samples=samples, version=0))
    run.ledger.append(Batched(step=2, samples=("g000001.0", "g000001.1")), Trained(step=2))
    run.ledger.append(Dropped(samples=("g000002.1",), reason="failed"))
    _write_events(run, first, second, said)


def _write_batch(run: Run, trained: Group) -> None:
    rows = tuple(
        Row(
            sample=t.id,
            tokens=(*SEGMENT.prompt, *SEGMENT.tokens),
            mask=(False, False, *SEGMENT.mask),
            logprobs=(0.0, 0.0, *SEGMENT.logprobs),
            advantages=(0.0,) * 6,
            versions=SEGMENT.versions,
        )
        for t in trained.trajectories
    )
    run.put_batch(Batch(step=2, rows=rows, oldest=0, reward=0.5))
    run.put_recomputed(2, tuple(RecomputedRow(logprobs=(-0.4, -1.5, -2.0)) for _ in rows))


def _write_events(run: Run, first: Group, second: Group, said: str) -> None:
    events = run.events("controller", EVENTS)
    region = RegionStatus(version=2, busy=0.5, running=3, waiting=1)
    ended = [t for each in (first, second) for t in each.trajectories]
    late = trajectory("g000003.0", 0.5, task=f"t3{said}")
    events.append(
        Launched(resumed=False),
        StageStarted(stage="rl", steps=3),
        FleetStatus(regions={"east": region}, active=2, capacity=4, sessions=2),
        *(attempt_done(t, "train") for t in [*ended, late]),
        GroupDone(
            group="g000002", task="t2", admitted=0, rewards=(0.0,), failed=1, kept=True, seconds=1.0
        ),
        step(2),
        WeightsLive(version=2),
    )
    events.flush()


def attempt(id: str) -> AttemptDone:
    return AttemptDone(
        id=id, task="t", split="train", status="done", reward=1.0, error=None, seconds=1.0
    )


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    app: ASGIApp,
    path: str,
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes = b"",
) -> Answer:
    """Send one request to the app as a server would. `host` is loopback by default."""
    given = {"host": "127.0.0.1:8765"} | (headers or {})
    bare, _, query = path.partition("?")
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": bare,
        "raw_path": bare.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
        "server": ("127.0.0.1", 8765),
        "client": ("127.0.0.1", 1),
    }
    sent: list[Message] = []
    asked = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if asked:
            return asked.pop()
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    start = sent[0]
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], found, b"".join(part.get("body", b"") for part in sent[1:]))
