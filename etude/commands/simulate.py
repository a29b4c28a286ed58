"""`etude simulate`: simulate a run on a number of GPUs in several regions, and test whether it
survives all kinds of faults."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console

from etude.commands import terminal
from etude.commands.plan import Options as PlanOptions
from etude.commands.plan import model_size, place, rollout_stage, workload
from etude.commands.terminal import counted
from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.placement import ModelSize, Placement, Workload
from etude.core.types import Json
from etude.simulate.faults import play
from etude.simulate.scenario import SMALL, Faults, Scenario
from etude.simulate.state import Outcome

CHANGED = 0.02
"""Share of the weights that a delta contains; more than has been seen in rl
(docs/benchmarks.md)."""
LINK_BYTES_S = 10e9 / 8
"""From a region to the store."""
DECODE_BYTES_S = 2e9
"""Speed at which each GPU of an engine applies a delta."""
SWAP_S = 1.0
GPU_HOURS = 50_000.0
"""Mean time between failures of a GPU or its machine. Meta counted 419 interruptions in 54 days on
16,384 GPUs (arXiv 2407.21783): one in 50,000 GPU-hours."""
RESTART_S = 180.0
"""Until a worker is back with all of the weights."""
PARTITION_S = 24 * 3600.0
"""Mean time between outages of a region's link, which last some minutes."""
MOST_TURNS = 4
"""Limit on the turns of a simulated session; more turns are merged."""
BEAT_S = 10.0
"""Heartbeat interval in a large fleet; a worker is lost after six missed heartbeats."""
LARGE = 64
"""Number of workers from which a fleet counts as large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    plan: PlanOptions
    regions: int
    steps: int
    seeds: int
    """Number of fault schedules to play; 0 simulates only the run itself."""
    first_seed: int = 0


def simulate(config: RunConfig, options: Options, console: Console) -> dict[str, Json]:
    """Print the results, and return the data for `--json`."""
    model, work = model_size(config, options.plan), workload(config, options.plan)
    placed = place(model, work, options.plan)
    if placed.engines < options.regions:
        raise EtudeError(
            f"{options.plan.gpus} GPUs make {counted(placed.engines, 'engine')} of "
            f"{placed.engine_gpus}: too few for {options.regions} regions; raise --gpus or lower "
            "--regions"
        )
    scenario = scenario_of(config, model, work, placed, options)
    began = time.monotonic()
    outcome = play(scenario, options.first_seed)
    told = summary(outcome, scenario)

    def say(text: str) -> None:
        terminal.say(console, text, indent=2)

    say(
        f"trainer: {counted(placed.trainer_gpus, 'GPU')}; {counted(scenario.regions, 'region')} of "
        f"{counted(scenario.workers_per_region, 'engine')} of "
        f"{counted(placed.engine_gpus, 'GPU')}; {counted(work.sessions, 'session')} a step"
    )
    say(
        f"{counted(outcome.steps, 'step')} in {_duration(outcome.seconds)} of virtual time "
        f"(simulated in {time.monotonic() - began:.1f} s): {told['steps_per_hour']:.1f} "
        f"steps/hour, trainer {told['trainer_busy']:.0%} busy, engines "
        f"{told['engine_busy']:.0%}, lag {outcome.lag_max} of {scenario.max_lag}"
    )
    read = outcome.store_bytes / max(1, outcome.versions_read)
    say(
        f"weights: deltas of {scenario.delta_bytes / 1e9:.3g} GB, {read / 1e9:.3g} GB read from "
        f"the store a version"
    )
    arrival_s = scenario.publish_s + scenario.download_s + scenario.swap_s
    say(
        f"`etude plan` predicts {placed.step_s:.3g} s a step; it ignores that weights reach the "
        f"engines {arrival_s:.3g} s later, the empty start, and faults"
    )
    say(f"faults: {_counted(outcome.faults)}")
    violations = _report("the run", outcome, say)
    if options.seeds:
        violations += play_schedules(config, options, console)
    return {"seeds": options.seeds, "violations": violations} | told


def summary(outcome: Outcome, scenario: Scenario) -> dict[str, float]:
    seconds = max(outcome.seconds, 1e-9)
    return {
        "steps_per_hour": round(3600 * outcome.steps / seconds, 3),
        "trainer_busy": round(outcome.trainer_busy_s / seconds, 4),
        "engine_busy": round(outcome.engine_busy_s / max(outcome.engine_s, 1e-9), 4),
        "lag_max": outcome.lag_max,
    }


def scenario_of(
    config: RunConfig, model: ModelSize, work: Workload, placed: Placement, options: Options
) -> Scenario:
    """The run of the file at full size, with the faults to be expected in such a fleet."""
    stage = rollout_stage(config)
    per_region = placed.engines // options.regions
    turns = min(work.turns, MOST_TURNS)
    delta = model.parameters * model.weight_bytes * CHANGED
    is_large = placed.engines > LARGE
    beat_s = BEAT_S if is_large else 1.0
    gpus_s = GPU_HOURS * 3600
    return Scenario(
        steps=options.steps,
        groups_per_step=stage.groups_per_step,
        group_size=stage.group_size,
        max_lag=stage.max_lag,
        reorder_window=stage.reorder_window,
        concurrency=max(config.harness.concurrency, placed.engines * placed.seqs),
        regions=options.regions,
        workers_per_region=per_region,
        max_num_seqs=placed.seqs,
        heartbeat_s=beat_s,
        heartbeat_timeout_s=max(config.heartbeat_timeout_s, 6 * beat_s if is_large else 0.0),
        turns=turns,
        turn_s=placed.turn_s * work.turns / turns,
        tool_s=work.tool_s / turns,
        train_s=placed.train_s + (placed.rollout_s if placed.colocated else 0.0),
        publish_s=delta / LINK_BYTES_S,
        download_s=delta / LINK_BYTES_S,
        swap_s=SWAP_S + delta / placed.engine_gpus / DECODE_BYTES_S,
        delta_bytes=int(delta),
        faults=Faults(
            worker_crash_s=gpus_s / (placed.engines * placed.engine_gpus),
            worker_hang_s=4 * gpus_s / (placed.engines * placed.engine_gpus),
            trainer_crash_s=gpus_s / placed.trainer_gpus,
            partition_s=PARTITION_S / options.regions,
            restart_s=RESTART_S,
            lasting_s=300.0,
            lost=1e-4,
        ),
    )


def storm_of(config: RunConfig) -> Scenario:
    """A small fleet with the window of the file, in which faults are frequent."""
    stage = rollout_stage(config)
    groups = min(4, stage.groups_per_step)
    max_lag = min(4, stage.max_lag)
    return replace(
        SMALL,
        groups_per_step=groups,
        group_size=min(2, stage.group_size),
        max_lag=max_lag,
        reorder_window=min(stage.reorder_window, max_lag * groups + 1),
        concurrency=groups * 2 * (max_lag + 1),
    )


def play_schedules(config: RunConfig, options: Options, console: Console) -> int:
    """Play schedules of faults; returns the total number of violations."""
    storm = storm_of(config)
    violations = 0
    faults = Counter[str]()
    began = time.monotonic()
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        outcome = play(storm, seed)
        faults += outcome.faults
        violations += _report(
            f"seed {seed}",
            outcome,
            lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True),
        )
        if sys.stderr.isatty() and seed % 100 == 0:
            print(f"\r{seed - options.first_seed} schedules", end="\r", file=sys.stderr)
    console.print(
        f"{options.seeds} fault schedules in {time.monotonic() - began:.1f} s, {violations} "
        f"violations; faults: {_counted(faults)}",
        highlight=False,
        soft_wrap=True,
    )
    return violations


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= 360 else f"{seconds:.3g} s"


def _counted(faults: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in faults.most_common()) or "nothing"


def _report(what: str, outcome: Outcome, say: Callable[[str], None]) -> int:
    """Report the violations of one simulation; a run that does not end is a violation too."""
    found = outcome.violations + ([f"stuck: {outcome.stuck}"] if outcome.stuck else [])
    for each in found:
        say(f"violation: {what}: {each}")
    return len(found)
