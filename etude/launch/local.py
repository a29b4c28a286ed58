"""A run from the command line's point of view: plan it, run or resume it, on this machine or from
here on a cluster, evaluate it, sum it up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.console import Console

from etude.core.config import AnyStage, RunConfig
from etude.core.errors import EtudeError
from etude.core.events import EVENTS, Event, Launched
from etude.core.harness_config import CODE_AGENT, CODING_AGENT
from etude.core.lineage import stage_spans
from etude.core.placement import LESS_MEMORY
from etude.core.stages import MidtrainConfig, RolloutStageConfig
from etude.core.tasks_config import TasksConfig
from etude.core.types import EVAL_SPLITS, Json
from etude.launch import screen
from etude.launch.check import Findings, check_start
from etude.launch.dashboard import dashboard
from etude.launch.devices import described_placement, placed
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


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run goes on that was begun before."""

    version: int
    evaluations_left: float
    """Share of all."""
    finished: bool

    @classmethod
    def of(cls, place: RunPlace, config: RunConfig) -> Standing | None:
        """None if nothing has been done yet."""
        if (run := place.find()) is None:
            return None
        if not (saved := run.checkpoints()):
            return None
        splits = [split for split in EVAL_SPLITS if getattr(config.tasks, split)]
        versions = evaluated_versions(config)
        wanted = {report_name(version, split) for version in versions for split in splits}
        left = len(wanted - set(run.evals())) / max(1, len(wanted))
        return cls(int(saved[-1].partition(".")[0]), left, is_finished(run, config))


def plan(
    config: RunConfig,
    place: RunPlace,
    findings: Findings | None = None,
    standing: Standing | None = None,
    recorded: Mapping[str, int] | None = None,
) -> str:
    """What `etude run` would do, or has yet to. `findings`: of the check before a start;
    `recorded`: how many tasks of each split the run began with."""
    model, tasks, harness, engine = config.model, config.tasks, config.harness, config.engine
    counts = _described_tasks(tasks, findings.tasks if findings else recorded or {})
    lines = [
        f"run {config.name}, seed {config.seed}, in {place.absolute}",
        f"  model: {config.as_written(model.path or 'fresh weights')}, "
        f"sessions of {model.max_context} tokens at most"
        + (f"{_size_of_model(findings)}" if findings else ""),
        f"  environment: {config.as_written(tasks.environment)}; tasks: {counts}",
        f"  agent: {_described_agent(config)} within {harness.timeout_s:g} s",
        *_short_context(config, findings),
        *_nothing_held_out(tasks),
    ]
    if standing is not None:
        version = standing.version
        is_over = f"finished at version {version}: nothing is left to do"
        lines.append("  " + (is_over if standing.finished else f"resumes at version {version}"))
    reached = standing.version if standing else 0
    for span in stage_spans(config.stage):
        if span.end <= reached:
            continue
        values = ", ".join(f"{key} {value}" for key, value in _settings(span.stage).items())
        start = max(span.start, reached)
        lines.append(f"  {span.name}: version {start} -> {span.end} ({values})")
        lines += _long_warmup(span.stage)
    lines += [
        f"  workers: {', '.join(engine.regions)}, {engine.max_num_seqs} requests each at once",
        f"  sandboxes: {config.sandbox.isolation}, {harness.concurrency} sessions at once",
        *described_placement(placed(config)),
    ]
    if findings is not None:
        lines += _expected(_seconds_left(config, findings, standing), findings, place)
    return "\n".join(lines)


def _described_tasks(tasks: TasksConfig, there: Mapping[str, int]) -> str:
    """An environment gives as many as it has, which may be fewer than are asked for."""
    told = []
    for split, name in {"train": "to train on", "heldout": "held out", "novel": "novel"}.items():
        wanted = getattr(tasks, split)
        if not wanted:
            continue
        if split not in there:
            told.append(f"at most {wanted} {name}")
        elif there[split] < wanted:
            told.append(f"{there[split]} {name} ({wanted} asked for)")
        else:
            told.append(f"{wanted} {name}")
    return ", ".join(told)


def _described_agent(config: RunConfig) -> str:
    harness = config.harness
    if config.tasks.is_remote:
        return f"the environment's own, answers of {harness.max_tokens} tokens at most,"
    agent = " ".join(harness.command) or config.as_written(harness.agent_class)
    # A program asks as often as it likes; code of the user's own is told a limit, if one is meant.
    are_counted = agent in (CODING_AGENT, CODE_AGENT) or "max_turns" in harness.model_fields_set
    if harness.command or not are_counted:
        return f"{agent}, answers of {harness.max_tokens} tokens at most,"
    return f"{agent}, {harness.max_turns} turns of {harness.max_tokens} tokens at most,"


def _short_context(config: RunConfig, findings: Findings | None) -> list[str]:
    """That an answer may be longer than a session is no error, and hardly meant."""
    context = config.model.max_context
    if findings is not None:
        context = min(context, findings.model_context)
    if config.harness.max_tokens <= context:
        return []
    return [
        f"  look: harness.max_tokens = {config.harness.max_tokens} is more than a whole session "
        f"has, prompt included ({context} tokens): answers are cut there; lower it, or raise "
        f"model.max_context"
    ]


def _nothing_held_out(tasks: TasksConfig) -> list[str]:
    if any(getattr(tasks, split) for split in EVAL_SPLITS):
        return []
    return [
        "  look: no task is held out (tasks.heldout and tasks.novel are 0): nothing is evaluated, "
        "and `etude compare` will have nothing to compare"
    ]


def _long_warmup(stage: AnyStage) -> list[str]:
    """That a stage ends before its learning rate is reached is no error, and hardly meant."""
    if (
        not isinstance(stage, MidtrainConfig | RolloutStageConfig)
        or stage.warmup_steps < stage.steps
    ):
        return []
    reached = stage.lr * stage.steps / (stage.warmup_steps + 1)
    steps = "1 step" if stage.steps == 1 else f"{stage.steps} steps"
    return [
        f"  look: stage.{stage.name}.warmup_steps = {stage.warmup_steps}, and the stage has "
        f"{steps}: lr = {stage.lr:g} is never reached, only {reached:.2g}; lower warmup_steps"
    ]


def _settings(stage: AnyStage) -> dict[str, Json]:
    """What a stage does; not the defaults of what only sparse models have."""
    told = stage.model_dump(exclude={"name", "kind"} if stage.name == stage.kind else {"name"})
    changed = stage.model_dump(exclude_defaults=True)
    return {
        key: value
        for key, value in told.items()
        if value is not None and (not key.startswith("router_") or key in changed)
    }


def _seconds_left(
    config: RunConfig, findings: Findings, standing: Standing | None
) -> dict[str, float]:
    if standing is None:
        return findings.seconds
    left = {
        span.name: (span.end - max(span.start, min(standing.version, span.end)))
        / (span.end - span.start)
        for span in stage_spans(config.stage)
    }
    left["evaluations"] = standing.evaluations_left
    return {name: seconds * left.get(name, 1.0) for name, seconds in findings.seconds.items()}


def _size_of_model(findings: Findings) -> str:
    return f"; {findings.parameters / 1e6:.1f} M parameters, context {findings.model_context}"


def _expected(seconds: dict[str, float], findings: Findings, place: RunPlace) -> list[str]:
    directory = place.directory.absolute()
    there = next(path for path in (directory, *directory.parents) if path.exists())
    needed, free = findings.disk_bytes, shutil.disk_usage(there).free
    short = "" if needed < free else ", which is too little"
    parts = ", ".join(f"{name} {_duration(s)}" for name, s in seconds.items() if s)
    if not parts:
        return []
    whole = _duration(sum(seconds.values()))
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    busy = f"; this machine is busy now, load {load:.0f} on {cores} cores" if load > cores else ""
    return [
        f"  expected time: some {whole} of computing ({parts}), beside tools and tests of yours"
        f"{busy}",
        f"  expected disk: some {needed / 1e9:.2g} GB, and {free / 1e9:.3g} GB are free{short}",
        _expected_memory(findings),
    ]


def _expected_memory(findings: Findings) -> str:
    needed, free = findings.memory_bytes, findings.memory_free
    short = "" if needed < free else f", which is too little: {LESS_MEMORY}"
    return (
        f"  expected memory: some {needed / 1e9:.2g} GB of the trainer "
        f"({findings.activation_bytes / 1e9:.2g} GB are activations), beside the engines', and "
        f"{free / 1e9:.3g} GB are free{short}"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}"
    return f"{max(1.0, seconds):.0f} s"


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
    """Runs it to its end, from wherever it stands; from nothing, if it shall be `fresh`. `dash`:
    with a dashboard beside it, whose link is printed. `cluster`: there, instead of on this
    machine."""
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
    from etude.launch.ray import RayLauncher, connect  # of an extra

    connect(cluster.address)
    return RayLauncher(**_settings_of_both(config, resume, console))


def open_launcher(
    config: RunConfig, place: RunPlace, resume: str, lock: int, console: Console
) -> LocalLauncher:
    return LocalLauncher(place.directory, lock=lock, **_settings_of_both(config, resume, console))


def _settings_of_both(config: RunConfig, resume: str, console: Console) -> dict[str, Any]:
    """What a launcher is told, on this machine or from here."""
    return {
        "threads": config.engine.threads,
        "resume": resume,
        "heartbeat_timeout_s": config.heartbeat_timeout_s,
        "say": partial(screen.print_line, console),
    }


def tell_launch(run: Run, resume: str) -> None:
    """So that others can say how to go on with it."""
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
    """Of a run on this machine that is prepared."""
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
    """A dashboard beside the block."""
    async with dashboard(place.store, place.directory / "logs") as link:
        console.print(f"dashboard: {link}", highlight=False, markup=False, soft_wrap=True)
        yield


def evaluate(
    place: RunPlace, console: Console, *, version: int | None, split: str, samples: int = 1
) -> Report:
    """One version on one split, now; the report, which may be there already."""
    run = place.open()
    config = run.config()
    newest = find_newest(run.objects)
    if newest is None:
        raise EtudeError(
            f"{place} has no published weights yet: run its first stage to the end first"
        )
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
    """SIGTERM ends it like Ctrl-C."""

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
    """Shows the run while the block works."""
    watching = screen.watch(run, console, title=title, lag_bound=lag_bound)
    async with (
        in_background(screen.while_read(watching, asyncio.current_task())),
        event_writer(run, "launcher") as tell,
        in_background(launcher.watch(tell)),
    ):
        yield
        await asyncio.sleep(flush_s(run))  # the last events


@contextlib.asynccontextmanager
async def in_background(doing: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Does something beside the block that must not disturb it: if it breaks, that is told when the
    block is done."""
    task = asyncio.create_task(doing)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What `--json` prints."""

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
    """From each launch to the last event before the next one: the time in which nothing ran does
    not count."""
    steps = itertools.pairwise(events)
    return sum(
        after.t - before.t for before, after in steps if not isinstance(after.record, Launched)
    )
