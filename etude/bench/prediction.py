"""What the simulator predicts, beside what a run then does: the rl of the demo, whole, on this
machine. Its first steps say how long the parts take (a session, a step of the trainer, weights on
their way) and how many groups have signal; the simulator plays the rest from those alone.

`steps_per_hour` is of the rest of the run, `predicted` the simulator's, `error` their difference as
a share of the former; wanted is 0.15 at most. `parts.*` are what went in. Nothing else may run
beside it. Takes as long as `etude demo`."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import fmean, stdev

from etude.bench.loop import events, execute
from etude.core.config import RunConfig, parse
from etude.core.events import AttemptDone, Event, GroupDone, StepDone, WeightsLive
from etude.core.stages import RolloutStageConfig
from etude.simulate.faults import play
from etude.simulate.scenario import Scenario
from etude.store.codec import Stamped

FIRST = 15
"""Steps that the parts are measured over."""
SEEDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a part of the loop takes, by measurement."""

    session_s: float
    session_spread: float
    """Half the width of the even distribution that varies as much, as a share of the mean."""
    train_s: float
    live_s: float
    """From the end of a step until every request is begun with its weights."""
    with_signal: float


def run() -> dict[str, float]:
    text = resources.files("etude.commands").joinpath("demo.toml").read_text()
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
        told = events(execute(Path(scratch) / "demo", text))
    config = parse(text)
    stage = next(each for each in config.stage if isinstance(each, RolloutStageConfig))
    lived = {e.record.version: e.t for e in told if isinstance(e.record, WeightsLive)}
    last = max(lived)
    first = last - stage.steps + FIRST
    parts = parts_of([each for each in told if each.t <= lived[first]])
    real = 3600 * (last - first) / (lived[last] - lived[first])
    predicted = predict(scenario_of(config, stage, parts), FIRST)
    return {
        "steps_per_hour": real,
        "predicted": predicted,
        "error": abs(predicted - real) / real,
        **{f"parts.{name}": value for name, value in asdict(parts).items()},
    }


def parts_of(told: Sequence[Stamped[Event]]) -> Parts:
    sessions = [
        e.record.seconds
        for e in told
        if isinstance(e.record, AttemptDone) and e.record.split == "train"
    ]
    steps = {e.record.step: (e.t, e.record.seconds) for e in told if isinstance(e.record, StepDone)}
    groups = [e.record.kept for e in told if isinstance(e.record, GroupDone)]
    on_their_way = [
        e.t - steps[e.record.version][0]
        for e in told
        if isinstance(e.record, WeightsLive) and e.record.version in steps
    ]
    return Parts(
        session_s=fmean(sessions),
        session_spread=min(1.0, math.sqrt(3) * stdev(sessions) / fmean(sessions)),
        train_s=fmean(seconds for _, seconds in steps.values()),
        live_s=max(0.0, fmean(on_their_way)),
        with_signal=fmean(groups),
    )


def scenario_of(config: RunConfig, stage: RolloutStageConfig, parts: Parts) -> Scenario:
    """Turns and tools are taken together: how they share the cores is in what was measured."""
    return Scenario(
        steps=stage.steps,
        groups_per_step=stage.groups_per_step,
        group_size=stage.group_size,
        max_lag=stage.max_lag,
        reorder_window=stage.reorder_window,
        concurrency=config.harness.concurrency,
        regions=len(config.engine.regions),
        workers_per_region=1,
        max_num_seqs=config.engine.max_num_seqs,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        turns=1,
        turn_s=parts.session_s,
        tool_s=0.0,
        train_s=parts.train_s,
        publish_s=parts.live_s,
        download_s=0.0,
        swap_s=0.0,
        delta_bytes=0,
        with_signal=parts.with_signal,
        spread=parts.session_spread,
    )


def predict(scenario: Scenario, first: int) -> float:
    """Steps an hour after the `first` ones, whose start is empty."""
    seconds = [
        play(scenario, seed).seconds - play(replace(scenario, steps=first), seed).seconds
        for seed in range(SEEDS)
    ]
    return 3600 * (scenario.steps - first) / fmean(seconds)
