"""Real-time RL on this machine: a gateway for users, workers in pools, the trainer and the loop."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.events import Event, ProcessRestarted
from etude.core.harness_config import CODING_AGENT
from etude.core.realtime_config import RealtimeConfig
from etude.core.traffic import BLUE, GREEN, HELDOUT, Change
from etude.launch.check import check_start
from etude.launch.devices import placed
from etude.launch.launcher import (
    RESTARTS,
    Program,
    check_port,
    free_ports,
    locked,
    python,
    trainer_programs,
)
from etude.launch.local import in_background, open_launcher, run_until_told, tell_launch
from etude.launch.place import RunPlace
from etude.launch.screen import print_line
from etude.run.realtime_probes import probe_splits
from etude.serve.production.config import ProductionConfig, read_production, read_user_key
from etude.serve.tokens import SECRET_VARIABLE, Scope, read_secret
from etude.store.realtime import TrafficLog
from etude.store.runs import Run
from etude.store.telemetry import event_writer
from etude.trainer.prepare import is_prepared

LOOK_S = 0.5


def execute(
    config: RunConfig, place: RunPlace, console: Console, *, resume: str, once: bool
) -> None:
    """Serve users and learn from them until stopped, or for one update with `once`."""
    assert config.realtime is not None
    production = check_realtime(config, config.realtime)
    check_start(config, place)
    read_user_key(Path(production.user_key_file), create=True)
    with locked(place.directory) as lock:
        run = Run.open(place.store)
        run.put_config(config)
        launcher = open_launcher(config, place, resume, lock, console)
        logs = launcher.logs.absolute()
        print_line(console, f"run {config.name} in {place.absolute}; logs in {logs}")

        async def program() -> None:
            tell_launch(run, resume)
            if not is_prepared(run):
                preparing = python("etude.trainer.prepare", "--store", place.store)
                await launcher.run_to_end(Program("preparation", preparing))
            programs, url = realtime_programs(config, config.realtime, place, once=once)
            print_line(console, f"gateway for users: {url} (ready when its workers are up)")

            def told(event: Event) -> None:
                tell(event)
                if isinstance(event, ProcessRestarted):
                    print_line(console, f"the {event.process} {event.how} and is being restarted")

            async with (
                event_writer(run, "launcher") as tell,
                in_background(launcher.watch(told)),
                in_background(show_changes(run, console)),
            ):
                await launcher.run_all(programs, until="loop")
                await asyncio.sleep(2 * LOOK_S)

        run_until_told(program())


def check_realtime(config: RunConfig, realtime: RealtimeConfig) -> ProductionConfig:
    """Raise EtudeError for every mistake that only real-time RL would refuse; otherwise the first
    update, hours later, would be the first to notice."""
    if read_secret() is None:
        raise EtudeError(
            f"real-time RL needs tokens, also for your backend: set {SECRET_VARIABLE} "
            "(docs/production.md)"
        )
    probed = probe_splits(realtime.gate, config.seed)
    harness = config.harness
    if probed and not harness.command and harness.agent_class == CODING_AGENT:
        raise EtudeError(
            "the gate runs its probes through your harness, but the demo's agent can only do the "
            "demo's tasks: add a table [harness.code] (docs/harness.md) or your own agent to the "
            "run, or turn probes off: realtime.gate.safety = 0 and cheats = 0"
        )
    return read_production(Path(realtime.production))


def pools_of(config: RealtimeConfig) -> list[str]:
    return [BLUE, GREEN] + ([HELDOUT] if config.heldout_share else [])


def realtime_programs(
    config: RunConfig, realtime: RealtimeConfig | None, place: RunPlace, *, once: bool
) -> tuple[list[Program], str]:
    """All processes, and the URL for users' requests. Every pool has a worker in every region."""
    assert realtime is not None
    engine = config.engine
    placement = placed(config)
    if engine.port:
        check_port(engine.port)
    homes = [(pool, region) for pool in pools_of(realtime) for region in engine.regions]
    *ports, free = free_ports(len(homes) + 1)
    url = f"http://127.0.0.1:{engine.port or free}"
    listening = ("--store", place.store, "--port", engine.port or free)
    gateway = Program(
        "gateway",
        python("etude.serve.gateway", *listening, "--production", realtime.production),
        serves=True,
        restarts=RESTARTS,
        makes_tokens=True,
    )
    workers = [
        Program(
            f"worker-{pool}-{region}",
            python(
                "etude.serve.worker",
                *("--store", place.store, "--region", region, "--port", port),
                *("--gateway", url, "--pool", pool),
            ),
            serves=True,
            restarts=RESTARTS,
            scope=Scope.WORKER,
            gpus=placement.engines.get(region, ()),
        )
        for (pool, region), port in zip(homes, ports, strict=True)
    ]
    loop = Program(
        "loop",
        python("etude.run.realtime_process", "--store", place.store, *(["--once"] if once else [])),
        cpus=placement.sandbox_cpus,
    )
    trainers = trainer_programs(
        place.store, config.trainer.ranks, place.directory / "rendezvous", placement.trainer
    )
    # users must not notice when one of these is killed; both resume from the store
    kept = [replace(each, restarts=RESTARTS, final=(2,)) for each in (*trainers, loop)]
    return [gateway, *workers, *kept], url


async def show_changes(run: Run, console: Console) -> None:
    """Print the current change, and each new one, until cancelled."""
    log = TrafficLog(run.objects)
    shown = max(0, len(await asyncio.to_thread(log.changes)) - 1)
    while True:
        changes = await asyncio.to_thread(log.changes)
        for change in changes[shown:]:
            print_line(console, described(change))
        shown = len(changes)
        await asyncio.sleep(LOOK_S)


def described(change: Change) -> str:
    """A change as one line for people."""
    traffic = change.traffic
    beside = ""
    if traffic.beside is not None:
        beside = f", {100 * traffic.share:g} % of users with {traffic.pools[traffic.beside]}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(change.time))
    held = ", held" if change.held else ""
    why = f": {change.why}" if change.why else ""
    return f"{when}  {change.action} {change.version} (live {traffic.version}{beside}{held}){why}"
