"""Benchmark of weight updates while a model is trained: the real loop, with every version checked.

`--model DIR` is a Hugging Face directory (`make model` fetches SmolLM2-135M); without one, a small
fresh model. Launcher, trainer, gateway, two workers, sandboxes and sessions are those of `etude
run`, at a learning rate of 1e-6, with two differences. Rewards alternate between 1 and 0, since
such a model solves no task, and a group without a difference teaches nothing: the gradients are
real, but what they teach is meaningless. And an observer asks the gateway after each version for
the root hash that each worker computes from its tensors; it must equal the one that the trainer
computed from its own.

    ratio, ratio_least       bytes of the model per byte that a step published; the same for the
                             largest step
    equal                    versions at which both workers were bit-equal to the trainer, of
                             `versions`
    pause_ms_p50, _max       pause of a worker's engine at a swap
    live_s                   from a version's commit until both workers serve it, mean
    stall_ms, stall_share    time per step for which the trainer waited for copying and publishing,
                             mean; the same over step_s
    late_ratio               bytes that a late joiner downloads, over those of the model; it must be
                             bit-equal too
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.events import EVENTS, Event, PublishStarted, StepDone, WeightsLive
from etude.core.lineage import stage_spans
from etude.core.protocols import Environment
from etude.core.sandbox import Sandbox
from etude.core.types import Attempt, Manifest, Score, Task
from etude.launch.launcher import LocalLauncher, Program, locked, python, server_programs
from etude.run.controller import open_controller
from etude.run.gateway_client import GatewayClient
from etude.run.process import run_process
from etude.serve.tokens import Scope
from etude.serve.worker_protocol import WorkerWeights
from etude.store.codec import Stamped, from_json, to_json
from etude.store.runs import Run
from etude.weights.follow import Follower
from etude.weights.manifest import Chain
from etude.weights.tensors import root_of

STEPS = 50
REGIONS = ("east", "west")
REPORT = "bench/publish.json"
LOOK_EVERY_S = 0.1

CONFIG = """
name = "publish"
[model]
max_context = 512
{model}
[tasks]
train = 64
heldout = 1
novel = 0
[harness]
max_turns = 1
max_tokens = 24
[engine]
regions = ["east", "west"]
max_num_seqs = 4
device = "auto"
[[stage]]
kind = "rl"
steps = {steps}
groups_per_step = 1
group_size = 2
max_lag = 1
lr = 1e-6
warmup_steps = 0
microbatch_tokens = 1024
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """Observations of the workers."""

    equal: int
    """Number of versions at which all workers were bit-equal to the trainer."""
    pauses_s: list[float]
    late_bytes: int


class Alternating:
    """An environment whose rewards alternate between 1 and 0, regardless of the attempt."""

    def __init__(self, inner: Environment) -> None:
        self.tasks = inner.tasks
        self.open = inner.open
        self._inner = inner
        self._attempts = Counter[str]()

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        score = await self._inner.score(task, sandbox, attempt)
        self._attempts[task.id] += 1
        return replace(score, reward=float(self._attempts[task.id] % 2))


def run(model: str | None = None, steps: int = STEPS) -> dict[str, float]:
    shape = f"path = {json.dumps(str(Path(model).absolute()))}" if model else ""
    config = parse(CONFIG.format(model=shape, steps=steps))
    with (
        tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch,
        locked(Path(scratch)) as lock,
    ):
        work = Run.open(scratch)
        work.put_config(config)
        launcher = LocalLauncher(Path(scratch), threads=1, resume="etude bench publish", lock=lock)
        servers, url = server_programs(f"file:{scratch}", config.engine)
        store = ("--store", f"file:{scratch}")
        trainer = Program("trainer", python("etude.trainer.trainer", *store))
        program = python("etude.bench.publish", *store, "--gateway", url)
        controller = Program("controller", program, scope=Scope.ADMIN)

        async def execute() -> None:
            await launcher.run_to_end(
                Program("preparation", python("etude.trainer.prepare", *store))
            )
            await launcher.run_all([*servers, trainer, controller], until="controller")

        asyncio.run(execute())
        seen = from_json(work.objects.get(REPORT), Seen, REPORT)
        chain = Chain(work.objects)
        return metrics([chain.find(version)[1] for version in range(steps + 1)], events(work), seen)


def events(run: Run) -> list[Stamped[Event]]:
    return [
        stamped for process in run.processes() for stamped in run.events(process, EVENTS).read()[0]
    ]


def metrics(
    manifests: Sequence[Manifest], events: Sequence[Stamped[Event]], seen: Seen
) -> dict[str, float]:
    """The figures. `manifests` are those of all versions in order, the first one a snapshot."""
    size = manifests[0].bytes
    steps = manifests[1:]
    stalls = [
        e.record.stall_s
        for e in events
        if isinstance(e.record, PublishStarted) and e.record.version > 0
    ]
    seconds = [e.record.seconds for e in events if isinstance(e.record, StepDone)]
    live = {e.record.version: e.t for e in events if isinstance(e.record, WeightsLive)}
    return {
        "ratio": size / mean(m.route.bytes for m in steps),
        "ratio_least": size / max(m.route.bytes for m in steps),
        "versions": len(manifests),
        "equal": seen.equal,
        "pause_ms_p50": 1e3 * median(seen.pauses_s),
        "pause_ms_max": 1e3 * max(seen.pauses_s),
        "live_s": mean(live[m.version] - m.time for m in steps if m.version in live),
        "step_s": mean(seconds),
        "stall_ms": 1e3 * mean(stalls),
        "stall_share": sum(stalls) / sum(seconds),
        "late_ratio": seen.late_bytes / size,
    }


async def observe(gateway: GatewayClient, chain: Chain, last: int) -> tuple[int, list[float]]:
    """Follow the workers from version to version. Return the number of versions at which all had
    the right bits, and all pauses."""
    equal = 0
    version = -1
    pauses_s = []
    while version < last:
        await asyncio.sleep(LOOK_EVERY_S)
        status = await asked(gateway, "status")
        if len(status["regions"]) < len(REGIONS) or status["version"] == version:
            continue
        held = [WorkerWeights(**worker) for worker in await asked(gateway, "weights")]
        for worker in held:
            if worker.root != (await asyncio.to_thread(chain.find, worker.version))[1].root:
                raise EtudeError(
                    f"the weights of worker {worker.region} differ from version {worker.version}"
                )
        if {worker.region for worker in held} == set(REGIONS) and len(
            {worker.version for worker in held}
        ) == 1:
            equal, version = equal + 1, held[0].version
        # The first swap is left out: the engine is still idle then.
        pauses_s = [pause for worker in held for pause in worker.pauses_s[1:]]
    return equal, pauses_s


async def asked(gateway: GatewayClient, what: str) -> Any:
    async with gateway.http.get(f"{gateway.url}/{what}", headers=gateway.headers) as response:
        response.raise_for_status()
        return await response.json()


def join_late(run: Run, last: int) -> int:
    """Bytes that a reader downloads who joins at the end. Its weights are checked like those of the
    workers."""
    totals: list[int] = []
    chain = Chain(run.objects)
    tensors = Follower(chain, progress=lambda done, total: totals.append(total)).fetch(last)
    if root_of(tensors) != chain.find(last)[1].root:
        raise EtudeError(f"the weights of a late joiner differ from version {last}")
    return totals[-1]


async def control(store: str, gateway_url: str) -> None:
    """Run the controller with the benchmark's rewards, and the observer concurrently."""
    async with open_controller(store, gateway_url, "controller") as controller:
        controller.environment = Alternating(controller.environment)
        last = stage_spans(controller.config.stage)[-1].end
        observing = asyncio.create_task(
            observe(controller.gateway, Chain(controller.run.objects), last)
        )
        await controller.run_stages()
        equal, pauses_s = await observing
        seen = Seen(equal, pauses_s, await asyncio.to_thread(join_late, controller.run, last))
        controller.run.objects.put(REPORT, to_json(seen))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="etude.bench.publish", description="Run the controller of the benchmark's run."
    )
    parser.add_argument("--store", required=True)
    parser.add_argument("--gateway", required=True)
    args = parser.parse_args()
    return run_process(lambda: control(args.store, args.gateway))


if __name__ == "__main__":
    sys.exit(main())
