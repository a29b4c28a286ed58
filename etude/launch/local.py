"""A run from the command line's point of view: run or resume it, on this machine or from here on a
cluster, evaluate it, summarise it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.console import Console

from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.events import EVENTS, Event, Launched
from etude.core.stages import RolloutStageConfig
from etude.core.types import Json
from etude.launch import screen
from etude.launch.check import check_start
from etude.launch.dashboard import dashboard
from etude.launch.devices import placed
from etude.launch.launcher import (
    Launcher,
    LocalLauncher,
    Program,
    evaluator_programs,
    locked,
    python,
    server_programs,
    trainer_programs,
)
from etude.launch.place import RunPlace
from etude.launch.ray_plan import RayCluster, cluster_programs
from etude.run.audit import audit, evaluated_versions, is_finished
from etude.run.evaluate import Report, report_name, reports
from etude.run.sinks import Sinks, forward_events
from etude.serve.tokens import Scope
from etude.store.codec import Stamped
from etude.store.runs import Run
from etude.store.telemetry import EventReader, event_writer, flush_s
from etude.trainer.prepare import is_prepared
from etude.weights.manifest import find_newest, read_manifest


def execute(
    config: RunConfig,
    place: RunPlace,
    console: Console,
    *,
    resume: str,
    fresh: bool = False,
    dash: bool = False,
    cluster: RayCluster | None = None,
) -> None:
    """Run or resume it to its end; start over if `fresh`. `dash`: with a dashboard, whose link is
    printed. `cluster`: on a Ray cluster instead of on this machine."""
    check_start(config, place, fresh=fresh)
    with locked(place.directory) as lock:
        if fresh:
            place.remove()
        run = Run.open(place.store)
        run.put_config(config)
        if not is_finished(run, config):
            if cluster is None:
                launcher: Launcher = open_launcher(config, place, resume, lock, console)
                programs = partial(_programs, config, place)
            else:
                launcher = _ray_launcher(config, cluster, resume, console)
                programs = partial(cluster_programs, config, place.store, cluster.workers)
            run_until_told(_run(run, config, place, launcher, programs, console, dash=dash))


def _ray_launcher(
    config: RunConfig, cluster: RayCluster, resume: str, console: Console
) -> Launcher:
    from etude.launch.ray import RayLauncher, connect  # from an optional extra

    connect(cluster.address)
    return RayLauncher(
        threads=config.engine.threads,
        resume=resume,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        say=partial(screen.print_line, console),
    )


def open_launcher(
    config: RunConfig, place: RunPlace, resume: str, lock: int, console: Console
) -> LocalLauncher:
    return LocalLauncher(
        place.directory,
        threads=config.engine.threads,
        resume=resume,
        lock=lock,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        say=partial(screen.print_line, console),
    )


def tell_launch(run: Run, resume: str) -> None:
    """Record the launch, so that others can find out how to resume the run."""
    launches = run.events("launcher", EVENTS)
    launches.append(
        Launched(
            resumed=bool(run.checkpoints()),
            command=resume,
            folder=os.getcwd(),
            store=run.objects.url,
        )
    )
    launches.flush()


async def _run(
    run: Run,
    config: RunConfig,
    place: RunPlace,
    launcher: Launcher,
    programs: Callable[[], list[Program]],
    console: Console,
    *,
    dash: bool,
) -> None:
    tell_launch(run, launcher.resume)
    lag_bound = max(
        (stage.max_lag for stage in config.stage if isinstance(stage, RolloutStageConfig)),
        default=0,
    )
    sinks = Sinks(config.trackers, run=config.name, directory=place.directory)
    title = f"etude · {config.name} · {place.absolute}"
    async with (
        _linked(place, console) if dash else contextlib.nullcontext(),
        on_screen(run, launcher, console, title=title, lag_bound=lag_bound),
        in_background(forward_events(run, sinks)) if config.trackers else contextlib.nullcontext(),
    ):
        if not is_prepared(run):
            await launcher.run_to_end(
                Program("preparation", python("etude.trainer.prepare", "--store", place.store))
            )
        await launcher.run_all(programs(), until="controller")


def _programs(config: RunConfig, place: RunPlace) -> list[Program]:
    """The programs of a prepared run on this machine."""
    placement = placed(config)
    servers, url = server_programs(place.store, config.engine, placement)
    trainers = trainer_programs(
        place.store, config.trainer.ranks, place.directory / "rendezvous", placement.trainer
    )
    controller = Program(
        "controller",
        python("etude.run.controller", "--store", place.store, "--gateway", url),
        scope=Scope.ADMIN,
        cpus=placement.sandbox_cpus,
    )
    evaluators = evaluator_programs(place.store, config.eval.every_steps, placement)
    return [*servers, *trainers, *evaluators, controller]


@contextlib.asynccontextmanager
async def _linked(place: RunPlace, console: Console) -> AsyncIterator[None]:
    """Run a dashboard during the block."""
    async with dashboard(place.store, place.directory / "logs") as link:
        console.print(f"dashboard: {link}", highlight=False, markup=False, soft_wrap=True)
        yield


def evaluate(
    place: RunPlace, console: Console, *, version: int | None, split: str, samples: int = 1
) -> Report:
    """Evaluate one version on one split now; return the report, which may exist already."""
    run = place.open()
    config = run.config()
    newest = find_newest(run.objects)
    if newest is None:
        raise EtudeError(f"{place} has no published weights yet: finish its first stage first")
    version = newest.version if version is None else read_manifest(run.objects, version).version
    if getattr(config.tasks, split) == 0:
        raise EtudeError(f"{place} has no {split} tasks: tasks.{split} is 0 in its config")
    name = report_name(version, split, samples)
    if name not in run.evals():
        wanted = ("--version", version, "--split", split, "--samples", samples)
        with locked(place.directory) as lock:
            resume = " ".join(map(str, ("etude eval", place, *wanted)))
            launcher = open_launcher(config, place, resume, lock, console)
            run_until_told(_evaluate(run, config, place, launcher, console, wanted))
    return run.eval(name, Report)


async def _evaluate(
    run: Run,
    config: RunConfig,
    place: RunPlace,
    launcher: Launcher,
    console: Console,
    wanted: Sequence[object],
) -> None:
    tell_launch(run, launcher.resume)
    async with on_screen(
        run, launcher, console, title=f"etude · evaluation of {config.name}", lag_bound=0
    ):
        servers, url = server_programs(place.store, config.engine, placed(config))
        arguments = ("--store", place.store, "--gateway", url, *wanted)
        program = python("etude.run.controller", *arguments)
        evaluation = Program("evaluation", program, scope=Scope.ADMIN)
        await launcher.run_all([*servers, evaluation], until="evaluation")


def run_until_told(program: Coroutine[Any, Any, None]) -> None:
    """Run until SIGTERM, which ends it like Ctrl-C."""

    async def until_told() -> None:
        own = asyncio.current_task()
        assert own is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, own.cancel)
        await program

    try:
        asyncio.run(until_told())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@contextlib.asynccontextmanager
async def on_screen(
    run: Run, launcher: Launcher, console: Console, *, title: str, lag_bound: int
) -> AsyncIterator[None]:
    """Show the run during the block."""
    watching = screen.watch(run, console, title=title, lag_bound=lag_bound)
    async with (
        in_background(screen.while_read(watching, asyncio.current_task())),
        event_writer(run, "launcher") as tell,
        in_background(launcher.watch(tell)),
    ):
        yield
        await asyncio.sleep(flush_s(run))  # for the last events


@contextlib.asynccontextmanager
async def in_background(doing: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run something during the block that must not disturb it: a failure is reported when the block
    is done."""
    task = asyncio.create_task(doing)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The output of `--json`."""

    solve_rate: dict[str, float]
    lag_max: int
    lag_bound: int
    issued: int
    trained: int
    dropped: dict[str, int]
    in_flight: int
    regions: int
    seconds: float


def summary(run: Run, config: RunConfig) -> dict[str, Json]:
    audited = audit(run)
    ends = {report_name(version, "heldout") for version in evaluated_versions(config)}
    return asdict(
        Summary(
            solve_rate={
                report.stage: report.rate for report in reports(run) if report.name in ends
            },
            lag_max=audited.lag_max,
            lag_bound=audited.lag_bound,
            issued=audited.issued,
            trained=audited.trained,
            dropped=audited.dropped,
            in_flight=audited.in_flight,
            regions=len(config.engine.regions),
            seconds=round(seconds_at_work(EventReader(run).new()), 1),
        )
    )


def seconds_at_work(events: Sequence[Stamped[Event]]) -> float:
    """The sum of the times from each launch to the last event before the next one: time in which
    nothing ran does not count."""
    steps = itertools.pairwise(events)
    return sum(
        after.t - before.t for before, after in steps if not isinstance(after.record, Launched)
    )
