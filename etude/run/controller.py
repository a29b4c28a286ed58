"""The controller process: follows the stages, evaluates the weights of each, and runs the rollout
loops.

While the trainer works on sft the engines are idle, so mid-training is evaluated then. No
evaluation overlaps with a loop: the version must not change during either.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

import aiohttp

from etude.core.config import RunConfig
from etude.core.curriculum import Curriculum
from etude.core.errors import EtudeError, user_code
from etude.core.events import AttemptsInterrupted, FewTasks, FleetStatus, RunDone
from etude.core.expression import Expression
from etude.core.harness_config import SERVERS, HarnessConfig
from etude.core.jumps import RewardJumps
from etude.core.ledger import Issued, Trained
from etude.core.lineage import StageSpan, estimator_of, stage_of, stage_spans
from etude.core.liveness import DisturbanceTracker
from etude.core.protocols import Agent, Environment
from etude.core.rewards_config import RewardsConfig
from etude.core.sandbox import SandboxPool, SandboxSpec
from etude.core.sandbox_config import BudgetConfig, SandboxConfig
from etude.core.stages import RlConfig, RolloutStageConfig
from etude.core.tasks_config import PULL, TasksConfig
from etude.core.types import EVAL_SPLITS, Group, Task
from etude.core.window import Window
from etude.rewards.judge import Judge
from etude.rewards.review import Review
from etude.run import journal
from etude.run.drift import DriftWatch
from etude.run.evaluate import evaluate_and_keep, report_name
from etude.run.gateway_client import GatewayClient
from etude.run.loop import RolloutLoop, RunAttempt
from etude.run.plugins import build, import_from, load
from etude.run.process import run_process
from etude.run.pull import PullEnvironment
from etude.run.rollout import RolloutRunner, SessionDesk, SessionRecorder
from etude.run.service import ServiceClient, ServiceEnvironment
from etude.run.task_record import keep_record
from etude.sandbox.egress import Outside, forget, log_to
from etude.sandbox.fleet import Need
from etude.sandbox.mounts import mount_programs
from etude.sandbox.pool import check_tier, open_sandbox_pool
from etude.store.runs import Run
from etude.store.telemetry import USAGE_S, Emit, event_writer
from etude.weights.manifest import PublishedVersions

AGENT_GRACE_S = 10.0
"""An agent ends its session by itself after harness.timeout_s; one that does not is stopped this
much later."""
FLEET_REPORT_S = 1.0
COMMAND_AGENT = "etude.harness.program:CommandAgent"


class Controller:
    """Takes a run through its stages: waits for the trainer, runs rollout loops, evaluates."""

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        gateway: GatewayClient,
        environment: Environment,
        emit: Emit,
        owing: Callable[[], dict[str, float]] = dict,
        check_spec: Callable[[SandboxSpec], None] = lambda spec: None,
    ) -> None:
        """`owing` and `check_spec` are the methods of `core.sandbox.SandboxPool`."""
        self.run = run
        self.config = config
        self.gateway = gateway
        self.environment = environment
        self.emit = emit
        self.versions = PublishedVersions(run.objects)
        self.window: Window[Group] | None = None
        self.owing = owing
        self.runner: RolloutRunner | None = None
        self._check_spec = check_spec
        self._tasks: dict[str, Sequence[Task]] = {}
        self.drift = DriftWatch(run, config.engine.quarantine_k3_ratio, emit)
        self.trouble = DisturbanceTracker(config.heartbeat_timeout_s, time.monotonic())

    async def run_stages(self) -> None:
        """Run all stages that are not finished yet."""
        await self.check_tasks()
        if self.config.evaluates_start:
            await self.evaluate_start()
        for span in stage_spans(self.config.stage):
            if isinstance(span.stage, RolloutStageConfig):
                await self.run_loop(span, span.stage)
            else:
                await self.wait_for_version(span.end)
            for split in EVAL_SPLITS:
                await self.evaluate(span.end, split)
        self.emit(RunDone(version=span.end))

    async def evaluate_start(self) -> None:
        """Evaluate the model that the run was given, as the baseline for comparisons."""
        await self.wait_for_version(0)
        for split in EVAL_SPLITS:
            await self.evaluate(0, split)

    async def load(self, version: int) -> None:
        """Load the version in all regions that have not drifted."""
        self.gateway.quarantined = await asyncio.to_thread(self.drift.look)
        await self.gateway.load(version)

    async def wait_for_version(self, version: int) -> int:
        """Return the newest version, as soon as it is this one or a later one."""
        return (await self.versions.wait(after=version - 1)).version

    async def evaluate(self, version: int, split: str, samples: int = 1) -> None:
        """Evaluate a version on a split, unless the split has no tasks or this was done before."""
        name = report_name(version, split, samples)
        if getattr(self.config.tasks, split) == 0 or name in self.run.evals():
            return
        await self.gateway.load(version)
        await evaluate_and_keep(
            self.run,
            await self.tasks(split),
            self.rollouts(temperature=self.config.eval.temperature_of(samples)),
            stage=stage_of(version, self.config.stage),
            split=split,
            version=version,
            seed=self.config.seed,
            samples=samples,
            emit=self.emit,
        )

    async def run_loop(self, span: StageSpan, stage: RolloutStageConfig) -> None:
        estimator = estimator_of(
            span.stage,
            self.config.model.max_context,
            quarantine=self.config.rewards.quarantines,
        )
        entries, recovered = await asyncio.to_thread(journal.load, self.run, estimator)
        if any(isinstance(entry, Issued) and entry.version >= span.end for entry in entries):
            # a later loop has started: this one was completed before, and the open samples belong
            # to the later one
            return
        records = journal.Journal(self.run, entries, recovered.unlisted)
        await records.write(*recovered.entries, flush=True)
        if recovered.interrupted:
            self.emit(AttemptsInterrupted(samples=recovered.interrupted))
        tasks = await self.tasks("train")
        families = {task.id: task.family for task in tasks}
        # later stages may have published too
        live = min(await self.wait_for_version(span.start), span.end)
        await self.load(live)
        if live > max(records.ledger.trained_step, span.start):
            await records.write(Trained(step=live))
        self.window = Window(
            per_step=stage.groups_per_step,
            max_lag=stage.max_lag,
            reorder_window=stage.reorder_window,
            live=live,
        )
        await RolloutLoop(
            journal=records,
            recovered=recovered,
            window=self.window,
            weights=self.versions,
            load=self.load,
            tasks=tasks,
            curriculum=Curriculum(
                families,
                seed=self.config.seed,
                fresh_frac=stage.fresh_frac if isinstance(stage, RlConfig) else 1.0,
                max_lag=stage.max_lag,
                past=recovered.past,
            ),
            jumps=(
                RewardJumps(families, max_lag=stage.max_lag, past=recovered.past)
                if isinstance(stage, RlConfig) and self.config.rewards.jumps != "off"
                else None
            ),
            quarantine_jumps=self.config.rewards.jumps == "quarantine",
            attempt=self.rollouts(
                temperature=stage.temperature, experts=stage.router_replay, is_training=True
            ),
            group_size=stage.group_size,
            estimator=estimator,
            stage=span.name,
            seed=self.config.seed,
            last=span.end,
            emit=self.emit,
            troubled=lambda: self.trouble.last(time.monotonic()),
        ).run()

    def rollouts(
        self, *, temperature: float, experts: bool = False, is_training: bool = False
    ) -> RunAttempt:
        """`experts`: record the routed experts, which the trainer will replay."""
        self.runner = build_runner(
            self.config,
            self.environment,
            self.gateway,
            self.gateway.http,
            desk=self.gateway,
            temperature=temperature,
            experts=experts,
            is_training=is_training,
        )
        return self.runner.attempt

    async def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, which must be those that the run started with."""
        if split not in self._tasks:
            tasks = await read_tasks(self.environment, self.config.tasks, split)
            await asyncio.to_thread(keep_record, self.run, split, tasks)
            self._tasks[split] = tasks
        return self._tasks[split]

    async def check_tasks(self) -> None:
        """Check all tasks that the run will need: a mistake in one must not be found only after
        earlier stages, nor attempt by attempt."""
        for split in wanted_splits(self.config):
            tasks = await self.tasks(split)
            for task in tasks:
                check_task(task, split, self._check_spec)
            if len(tasks) < (wanted := getattr(self.config.tasks, split)):
                self.emit(FewTasks(split=split, wanted=wanted, given=len(tasks)))

    async def report_fleet(self) -> None:
        """Report the state of the workers once a second, and from time to time the requests that
        they and the gateway make to the store."""
        told = time.monotonic()
        while True:
            regions, silent = await self.gateway.regions()
            for event in self.trouble.look(time.monotonic(), self.owing(), silent):
                self.emit(event)
            active, capacity, held = self.window.usage if self.window else (0, 0, 0)
            sessions = self.runner.running if self.runner else 0
            self.emit(
                FleetStatus(
                    regions=regions, active=active, capacity=capacity, held=held, sessions=sessions
                )
            )
            if time.monotonic() - told >= USAGE_S:
                told = time.monotonic()
                for used in self.gateway.store_used:
                    self.emit(used)
            await asyncio.sleep(FLEET_REPORT_S)


def build_runner(
    config: RunConfig,
    environment: Environment,
    sessions: SessionRecorder,
    http: aiohttp.ClientSession,
    *,
    desk: SessionDesk | None,
    temperature: float,
    experts: bool = False,
    is_training: bool = False,
) -> RolloutRunner:
    """A runner for attempts that follows the run's configuration."""
    harness = config.harness
    # how long a session may wait until it is claimed
    claim_s = config.tasks.timeout_s if config.tasks.environment == PULL else 0.0
    return RolloutRunner(
        environment,
        build_agent(
            harness,
            environment,
            http,
            desk=desk,
            temperature=temperature,
            is_training=is_training,
        ),
        sessions,
        concurrency=harness.concurrency,
        source=config.as_written(config.tasks.environment),
        policy=config.name,
        experts=experts,
        agent_timeout_s=harness.timeout_s + AGENT_GRACE_S + claim_s,
        sandbox_timeout_s=_open_timeout_s(config.tasks),
        review=build_review(config.rewards, http),
    )


def _open_timeout_s(config: TasksConfig) -> float:
    """The time limit for opening. Waiting for a service has a time limit of its own, with a better
    error message, so this one must be later."""
    return config.timeout_s + (AGENT_GRACE_S if config.is_remote else 0.0)


def wanted_splits(config: RunConfig) -> list[str]:
    """The splits that the run uses."""
    trains = any(isinstance(stage, RolloutStageConfig) for stage in config.stage)
    splits = (["train"] if trains else []) + [*EVAL_SPLITS]
    return [split for split in splits if getattr(config.tasks, split)]


async def read_tasks(environment: Environment, config: TasksConfig, split: str) -> Sequence[Task]:
    """Read the tasks of a split, and check them: the environment may be the user's own."""
    reference = config.environment
    with user_code(f"tasks.environment = {reference!r}"):
        tasks = await asyncio.to_thread(environment.tasks, split)
    if not tasks:
        is_ours = reference.startswith("etude.")
        advice = "give it more tasks" if is_ours else "check its tasks()"
        otherwise = f", or set tasks.{split} = 0" if split in EVAL_SPLITS else ""
        raise EtudeError(
            f"tasks.environment = {reference!r} returns no tasks for the split {split!r}, but "
            f"the run wants {getattr(config, split)}: {advice}{otherwise}"
        )
    if twice := [name for name, count in Counter(task.id for task in tasks).items() if count > 1]:
        raise EtudeError(
            f"tasks.environment = {reference!r} returns several tasks of the split {split!r} "
            f"with the id {twice[0]!r}: ids must be unique"
        )
    return tasks


def check_task(task: Task, split: str, check_spec: Callable[[SandboxSpec], None]) -> None:
    """Refuse a task whose sandbox cannot be provided."""
    try:
        check_spec(task.sandbox)
    except (EtudeError, ValueError) as e:
        raise EtudeError(f"task {task.id!r} of the split {split!r}: {e}") from e


def build_agent(
    config: HarnessConfig,
    environment: Environment,
    http: aiohttp.ClientSession,
    *,
    desk: SessionDesk | None,
    temperature: float,
    is_training: bool = False,
) -> Agent:
    """The agent that belongs to the environment, or else the one that the config names.
    `is_training`: some sessions have no system prompt."""
    limits = {
        "max_turns": config.max_turns,
        "max_tokens": config.max_tokens,
        "timeout_s": config.timeout_s,
        "temperature": temperature,
        "tool_delay_s": config.tool_delay_s,
    }
    if own := getattr(environment, "own_agent", None):
        agent: Agent = own(desk, **limits)
    elif config.command:
        told = {"argv": config.command, "env": config.env}
        agent = build(COMMAND_AGENT, "harness.command", http, **limits, **told)
    elif config.code is not None:
        code = config.code if is_training else config.code.for_evaluation()
        kept = getattr(environment, "test_results", None)
        more = {**config.summaries, **({} if kept is None else {"test_results": kept})}
        agent = build(config.agent_class, "harness.agent", http, **limits, **more, code=code)
    else:
        agent = build(config.agent, "harness.agent", http, **limits, **config.summaries)
    return agent


def server_mounts(config: RunConfig) -> tuple[str, ...]:
    """The mounts that let sandboxes find the language servers of the harness."""
    if config.harness.code is None or config.sandbox.isolation == "process":
        return ()
    commands = config.harness.code.diagnostics.values()
    return mount_programs([argv[0] for argv in commands], SERVERS)


def build_review(config: RewardsConfig, http: aiohttp.ClientSession) -> Review | None:
    """The review that the scores of a run undergo; None if they are final."""
    if (config.detector, config.judge, config.reward, config.failed_call) == ("off", None, None, 0):
        return None
    judge = None
    if config.judge is not None:
        key = os.environ.get("ETUDE_JUDGE_KEY", "")
        judge = Judge(http, **config.judge.model_dump(), api_key=key)
    return Review(
        detector=config.detector != "off",
        judge=judge,
        failed_call=config.failed_call,
        reward=Expression.parse(config.reward) if config.reward else None,
    )


def _outside(config: SandboxConfig) -> Outside:
    mirrors = {host: to.rpartition(":") for host, to in config.mirrors.items()}
    return Outside(
        log=log_to(config.network_log) if config.network_log else forget,
        mirrors={host: (address, int(port)) for host, (address, _, port) in mirrors.items()},
    )


def _budget(config: BudgetConfig) -> Need | None:
    if config == BudgetConfig():
        return None
    return Need(
        cpus=config.cpus or math.inf,
        memory_bytes=(config.memory_mib or math.inf) * 2**20,
        disk_bytes=(config.disk_mib or math.inf) * 2**20,
    )


@contextlib.asynccontextmanager
async def open_environment(config: RunConfig) -> AsyncIterator[tuple[Environment, SandboxPool]]:
    """The environment of a run over a pool of its sandboxes, both closed at the end."""
    import_from(config.folder)
    sandbox = config.sandbox
    pool = open_sandbox_pool(
        sandbox.isolation,
        config.heartbeat_timeout_s,
        mounts=[*sandbox.mounts, *config.tasks.mounts, *server_mounts(config)],
        limits=sandbox.limits,
        hosts=sandbox.hosts,
        image=sandbox.image,
        budget=_budget(sandbox.budget),
        outside=_outside(sandbox),
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        check_tier(pool, config.sandbox.min_isolation)
        reference = config.tasks.environment
        counts: dict[str, int] = {
            split: getattr(config.tasks, split) for split in ("train", *EVAL_SPLITS)
        }
        environment: Environment
        if reference == PULL:
            assert config.tasks.path is not None
            environment = PullEnvironment(
                config.tasks.path, counts=counts, claim_s=config.tasks.timeout_s
            )
        elif config.tasks.is_remote:
            service = await stack.enter_async_context(ServiceClient(reference))
            environment = ServiceEnvironment(
                service, counts=counts, path=config.tasks.path, wait_s=config.tasks.timeout_s
            )
        else:
            places = {"path": config.tasks.path, "results": config.tasks.results}
            told = {name: place for name, place in places.items() if place is not None}
            environment = build(
                reference, "tasks.environment", pool, counts=counts, seed=config.seed, **told
            )
        # a typing error must be found before the stages that precede rl
        load(config.harness.agent_class, "harness.agent")
        yield environment, pool


@contextlib.asynccontextmanager
async def open_controller(store: str, gateway_url: str, process: str) -> AsyncIterator[Controller]:
    """A controller with everything that it needs, closed again at the end. Until then it polls the
    fleet in the background: a restarted gateway lets no worker answer before that poll tells it the
    permitted weights."""
    run = Run.open(store, create=False)
    config = run.config()
    async with (
        open_environment(config) as (environment, pool),
        event_writer(run, process) as emit,
        GatewayClient(gateway_url, config.engine.public_url) as gateway,
    ):
        await gateway.ready()
        controller = Controller(run, config, gateway, environment, emit, pool.owing, pool.check)
        async with asyncio.TaskGroup() as group:
            reporting = group.create_task(controller.report_fleet())
            yield controller
            reporting.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="etude.run.controller", description="The controller of one run."
    )
    parser.add_argument("--store", required=True, help="the run's store")
    parser.add_argument("--gateway", required=True, help="the gateway's URL")
    parser.add_argument("--version", type=int, help="evaluate this version, then exit")
    parser.add_argument("--split", choices=EVAL_SPLITS, default="heldout")
    parser.add_argument("--samples", type=int, default=1, help="attempts per task")
    args = parser.parse_args()

    async def program() -> None:
        process = "controller" if args.version is None else "evaluation"
        async with open_controller(args.store, args.gateway, process) as controller:
            await (
                controller.run_stages()
                if args.version is None
                else controller.evaluate(args.version, args.split, args.samples)
            )

    return run_process(program)


if __name__ == "__main__":
    sys.exit(main())
