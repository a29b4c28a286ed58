"""The evaluator process: evaluates held-out tasks at pinned versions while a loop runs.

It has an engine of its own, which holds the version under evaluation however far the workers have
moved on, and it never touches the ledger: its samples are never trained on. If it falls behind, it
takes the newest version that is due and skips the earlier ones. It also skips a version that does
not exist.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from etude.core.config import RunConfig
from etude.core.events import EvalDone, Event
from etude.core.lineage import periodic_versions, stage_of
from etude.core.protocols import Environment, WeightStore
from etude.core.rewards_config import RewardsConfig
from etude.core.sandbox import SandboxPool
from etude.run.controller import build_runner, open_environment, read_tasks
from etude.run.evaluate import evaluate_and_keep, report_name
from etude.run.process import run_process
from etude.run.realtime_probes import Probes, suite_of
from etude.serve.alone import PolicySessions
from etude.serve.engine_thread import EngineThread
from etude.serve.worker import own_engine
from etude.serve.worker_protocol import read_model_files
from etude.store.objects import Missing
from etude.store.runs import Run
from etude.store.telemetry import event_writer
from etude.weights.follow import Follower
from etude.weights.manifest import Chain, PublishedVersions, VersionGone, read_manifest

SPLIT = "heldout"
EvaluateVersion = Callable[..., Awaitable[None]]
"""(version, split, samples=1) -> returns when its report is in the store"""
NICENESS = 10
"""The loop has priority: an evaluation may be late."""


async def follow(
    due: Sequence[int], versions: WeightStore, evaluate: Callable[[int], Awaitable[None]]
) -> None:
    """Evaluate the versions that are due. Returns when no further one can become due."""
    seen = -1
    while any(version > seen for version in due):
        newest = (await versions.wait(after=seen)).version
        if reached := [version for version in due if seen < version <= newest]:
            await evaluate(reached[-1])
        seen = newest


async def run_evaluator(store: str) -> None:
    run = Run.open(store, create=False)
    config = run.config()
    due = [
        version
        for version in periodic_versions(config.stage, config.eval.every_steps)
        if config.tasks.heldout and report_name(version, SPLIT) not in run.evals()
    ]
    if not due:
        return
    async with event_writer(run, "evaluator") as emit, evaluating(run, config, emit) as evaluate:

        async def evaluate_if_there(version: int) -> None:
            if await asyncio.to_thread(_is_there, run, version):
                await evaluate(version, SPLIT)

        await follow(due, PublishedVersions(run.objects), evaluate_if_there)


def _is_there(run: Run, version: int) -> bool:
    """True if the version exists. A trainer that was killed may have resumed from a checkpoint
    whose previous version it had not published yet, and `etude weights gc` deletes old versions."""
    try:
        read_manifest(run.objects, version)
    except (Missing, VersionGone):
        return False
    return True


@dataclass(frozen=True, slots=True)
class OwnSessions:
    """The means to attempt tasks without a gateway: the process's own engine holds the version."""

    environment: Environment
    pool: SandboxPool
    engine: EngineThread
    sessions: PolicySessions
    http: aiohttp.ClientSession


@asynccontextmanager
async def own_sessions(run: Run, config: RunConfig) -> AsyncIterator[OwnSessions]:
    files = read_model_files(run)
    fetch = Follower(Chain(run.objects), name="evaluator").fetch
    async with (
        open_environment(config) as (environment, pool),
        own_engine(files, fetch, config) as engine,
        aiohttp.ClientSession() as http,
    ):
        sessions = PolicySessions(engine, files, max_context=engine.max_context)
        async with sessions.open():
            yield OwnSessions(environment, pool, engine, sessions, http)


@asynccontextmanager
async def evaluating(
    run: Run, config: RunConfig, emit: Callable[[Event], None]
) -> AsyncIterator[EvaluateVersion]:
    """A function that evaluates versions with an engine of its own."""
    async with own_sessions(run, config) as own:

        async def evaluate(version: int, split: str, samples: int = 1) -> None:
            temperature = config.eval.temperature_of(samples)
            asked, how = own.environment, config
            if suite_of(split) in Probes.suites:
                assert config.realtime is not None
                asked = Probes(own.pool, config.realtime.gate, config.seed)
                # probes score themselves: the run's own rules for its rewards do not apply to them
                how = config.model_copy(update={"rewards": RewardsConfig(detector="off")})
            runner = build_runner(
                how, asked, own.sessions, own.http, desk=None, temperature=temperature
            )
            await own.engine.load(version)
            await evaluate_and_keep(
                run,
                await read_tasks(asked, config.tasks, split),
                runner.attempt,
                stage=stage_of(version, config.stage),
                split=split,
                version=version,
                seed=config.seed,
                samples=samples,
                emit=only_results(emit),
            )

        yield evaluate


def only_results(emit: Callable[[Event], None]) -> Callable[[Event], None]:
    """Report only the results: the screen shows the progress of the loop alone."""
    return lambda event: emit(event) if isinstance(event, EvalDone) else None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="etude.run.evaluator", description="Evaluate versions while the run continues."
    )
    parser.add_argument("--store", required=True, help="the run's store")
    args = parser.parse_args()
    os.nice(NICENESS)
    return run_process(lambda: run_evaluator(args.store))


if __name__ == "__main__":
    sys.exit(main())
