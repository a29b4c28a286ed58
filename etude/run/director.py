"""The controller process: follows the lineage, evaluates what each stage made, and runs the loops in their place.

While the trainer works on sft the engines are free, so the evaluation of mid-training happens then. No evaluation
overlaps with a loop: the version stands still under each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from etude.core.config import RunConfig
from etude.core.errors import EtudeError, blame
from etude.core.events import Fleet, RunDone
from etude.core.ledger import Issued, Trained
from etude.core.liveness import Trouble
from etude.core.seams import Agent, Environment
from etude.core.stages import LoopConfig
from etude.core.types import Group, Task
from etude.core.window import Window
from etude.run import journal
from etude.run.controller import Attempt, Controller, endless
from etude.run.evaluate import evaluate, report_name
from etude.run.gateway import Gateway
from etude.run.plan import Leg, credit_of, legs, stage_of
from etude.run.plugins import build, load
from etude.run.process import run_process
from etude.run.rollout import Rollouts
from etude.run.telemetry import Emit, telemetry
from etude.store.runs import Run
from etude.weights.manifest import Versions
from etude.worlds.pool import open_worlds

AGENT_GRACE_S = 10.0
"""An agent ends its session after harness.timeout_s by itself; what does not is ended so much later."""
SPLITS = ("heldout", "novel")
LOOK_EVERY_S = 1.0


class Director:
    def __init__(
        self,
        run: Run,
        config: RunConfig,
        gateway: Gateway,
        environment: Environment,
        emit: Emit,
        owing: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """`owing`: as of `core.seams.Worlds`."""
        self.run, self.config, self.gateway, self.environment, self.emit = run, config, gateway, environment, emit
        self.versions = Versions(run.objects)
        self.window: Window[Group] | None = None
        self.owing = owing
        self.trouble = Trouble(config.silence_s, time.monotonic())

    async def direct(self) -> None:
        """The whole run, from wherever it stands."""
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self.look())
            for leg in legs(self.config.stage):
                if isinstance(leg.stage, LoopConfig):
                    await self.loop(leg, leg.stage)
                else:
                    await self.reached(leg.end)
                for split in SPLITS:
                    await self.examine(leg.end, split)
            self.emit(RunDone(version=leg.end))
            looking.cancel()

    async def reached(self, version: int) -> int:
        """The newest version, as soon as it is this one or a later one."""
        return (await self.versions.wait(after=version - 1)).version

    async def examine(self, version: int, split: str) -> None:
        """Evaluates a version on a split, unless there are no tasks in it or it was done before."""
        name = report_name(version, split)
        if getattr(self.config.tasks, split) == 0 or name in self.run.evals():
            return
        await self.gateway.load(version)
        report = await evaluate(
            await self.tasks(split),
            self.sampling(temperature=self.config.eval.temperature),
            stage=stage_of(version, self.config.stage),
            split=split,
            version=version,
            seed=self.config.seed,
            emit=self.emit,
        )
        self.run.put_eval(name, report)

    async def loop(self, leg: Leg, stage: LoopConfig) -> None:
        credit = credit_of(leg.stage, self.config.model.max_context)
        entries, recovered = await asyncio.to_thread(journal.load, self.run, credit)
        if any(isinstance(entry, Issued) and entry.version >= leg.end for entry in entries):
            return  # a later loop has begun: this one was brought to its end before, and what is open is not its own
        book = journal.Journal(self.run, entries)
        await book.write(*recovered.entries)
        tasks = await self.tasks("train")
        live = min(await self.reached(leg.start), leg.end)  # later stages may have published too
        await self.gateway.load(live)
        if live > max(book.ledger.trained_step, leg.start):
            await book.write(Trained(step=live))
        self.window = Window(
            per_step=stage.groups_per_step, max_lag=stage.max_lag, lookahead=stage.lookahead, live=live
        )
        await Controller(
            journal=book,
            recovered=recovered,
            window=self.window,
            weights=self.versions,
            load=self.gateway.load,
            tasks=endless(tasks, self.config.seed),
            attempt=self.sampling(temperature=stage.temperature, experts=stage.replay),
            group_size=stage.group_size,
            credit=credit,
            seed=self.config.seed,
            last=leg.end,
            emit=self.emit,
            troubled=lambda: self.trouble.last(time.monotonic()),
        ).run()

    def sampling(self, *, temperature: float, experts: bool = False) -> Attempt:
        """`experts`: the trainer will replay them."""
        harness = self.config.harness
        agent: Agent = build(
            harness.agent,
            "harness.agent",
            self.gateway.http,
            max_turns=harness.max_turns,
            max_tokens=harness.max_tokens,
            timeout_s=harness.timeout_s,
            temperature=temperature,
            tool_delay_s=harness.tool_delay_s,
        )
        return Rollouts(
            self.environment,
            agent,
            self.gateway,
            concurrency=harness.concurrency,
            experts=experts,
            agent_s=harness.timeout_s + AGENT_GRACE_S,
            world_s=self.config.tasks.timeout_s,
        ).attempt

    async def tasks(self, split: str) -> Sequence[Task]:
        """Of an environment that may be anyone's."""
        reference = self.config.tasks.environment
        with blame(f"tasks.environment = {reference!r}"):
            tasks = await asyncio.to_thread(self.environment.tasks, split)
        if not tasks:
            raise EtudeError(
                f"tasks.environment = {reference!r} gives no tasks for the split {split!r}, of which the run wants "
                f"{getattr(self.config.tasks, split)}: look at its tasks()"
            )
        if twice := [name for name, count in Counter(task.id for task in tasks).items() if count > 1]:
            raise EtudeError(
                f"tasks.environment = {reference!r} gives several tasks of the split {split!r} the id {twice[0]!r}: "
                f"each needs one of its own"
            )
        return tasks

    async def look(self) -> None:
        """How the workers are, once a second, for whoever watches."""
        while True:
            regions, silent = await self.gateway.regions()
            for event in self.trouble.look(time.monotonic(), self.owing(), silent):
                self.emit(event)
            active, capacity = (self.window.active, self.window.capacity) if self.window else (0, 0)
            self.emit(Fleet(regions=regions, active=active, capacity=capacity))
            await asyncio.sleep(LOOK_EVERY_S)


@contextlib.asynccontextmanager
async def directing(store: str, gateway_url: str, process: str) -> AsyncIterator[Director]:
    """A director with everything that it needs, closed again at the end."""
    run = Run.open(store, create=False)
    config = run.config()
    worlds = open_worlds(config.worlds.isolation, config.silence_s)
    try:
        counts = {split: getattr(config.tasks, split) for split in ("train", *SPLITS)}
        environment = build(config.tasks.environment, "tasks.environment", worlds, counts=counts, seed=config.seed)
        load(config.harness.agent, "harness.agent")  # what is misspelt shall not cost the stages before rl
        async with telemetry(run, process) as emit, Gateway(gateway_url) as gateway:
            await gateway.ready()
            yield Director(run, config, gateway, environment, emit, worlds.owing)
    finally:
        await worlds.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="etude.run.director", description="The controller of one run.")
    parser.add_argument("--store", required=True, help="the run's store")
    parser.add_argument("--gateway", required=True, help="the gateway's URL")
    parser.add_argument("--version", type=int, help="evaluate this version and end")
    parser.add_argument("--split", choices=SPLITS, default="heldout")
    args = parser.parse_args()

    async def program() -> None:
        process = "controller" if args.version is None else "evaluation"
        async with directing(args.store, args.gateway, process) as director:
            await (director.direct() if args.version is None else director.examine(args.version, args.split))

    return run_process(program)


if __name__ == "__main__":
    sys.exit(main())
