"""Prediction of the simulator against a real run: the whole rl stage of the demo on this machine.
The run measures the durations of its parts (a session, a step of the trainer, the delivery of
weights) and the share of groups with signal; the simulator plays the run from these alone.

`steps_per_hour` is that of the run, `predicted` the simulator's, and `error` their difference as a
share of the former; the goal is at most 0.15. `early.*` predicts the rest of the run from the parts
of its first steps. Such a prediction can be made while a run goes on, and is off by what the policy
learns later. `parts.*` are the inputs. Nothing else may run on the machine. Takes as long as `etude
demo`."""

from __future__ import annotations

import math
import tempfile
from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import fmean, pstdev, pvariance

from etude.bench.loop import events, execute
from etude.core.config import RunConfig, parse
from etude.core.events import AttemptDone, Event, GroupDone, StepDone, WeightsLive
from etude.core.stages import RolloutStageConfig
from etude.run.journal import group_of
from etude.simulate.faults import play
from etude.simulate.scenario import Scenario
from etude.store.codec import Stamped

FIRST = 15
"""Number of first steps for `early`."""
SEEDS = 10
ROUNDS = 8
"""Pieces of a session: the duration of each depends on the number of sessions at its beginning."""
EVEN = math.sqrt(3)
"""Half the width of a uniform distribution over its standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The measured durations of the parts of the loop."""

    session_s: float
    at_once: float
    """Concurrent sessions, averaged over the sessions: all share the cores."""
    session_spread: float
    """Half the width of the uniform distribution of the sessions of one group, as a share of the
    mean."""
    task_spread: float
    """The same for the part that the sessions of a group have in common."""
    train_s: float
    live_s: float
    """Time from the end of a step until every new request begins with its weights."""
    with_signal: float


def run() -> dict[str, float]:
    text = resources.files("etude.commands").joinpath("demo.toml").read_text()
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
        told = events(execute(Path(scratch) / "demo", text))
    return figures(parse(text), told)


def figures(config: RunConfig, told: Sequence[Stamped[Event]]) -> dict[str, float]:
    stage = next(each for each in config.stage if isinstance(each, RolloutStageConfig))
    lived = {e.record.version: e.t for e in told if isinstance(e.record, WeightsLive)}
    last = max(lived)
    first = last - stage.steps + FIRST
    parts = parts_of(told)
    early = parts_of([each for each in told if each.t <= lived[first]])
    begin = min(began for began, _, _ in _sessions(told))
    return {
        **_compared(
            3600 * stage.steps / (lived[last] - begin),
            predict(scenario_of(config, stage, parts)),
        ),
        **{
            f"early.{name}": value
            for name, value in _compared(
                3600 * (last - first) / (lived[last] - lived[first]),
                predict(scenario_of(config, stage, early), FIRST),
            ).items()
        },
        **{f"parts.{name}": value for name, value in asdict(parts).items()},
        "early.with_signal": early.with_signal,
    }


def _compared(real: float, predicted: float) -> dict[str, float]:
    return {
        "steps_per_hour": real,
        "predicted": predicted,
        "error": abs(predicted - real) / real,
    }


def _sessions(told: Sequence[Stamped[Event]]) -> list[tuple[float, float, str]]:
    """The start time, duration in seconds and group of each session."""
    return [
        (e.t - e.record.seconds, e.record.seconds, group_of(e.record.id))
        for e in told
        if isinstance(e.record, AttemptDone) and e.record.split == "train"
    ]


def parts_of(told: Sequence[Stamped[Event]]) -> Parts:
    sessions = _sessions(told)
    begins = sorted(began for began, _, _ in sessions)
    ends = sorted(began + seconds for began, seconds, _ in sessions)
    session_s = fmean(seconds for _, seconds, _ in sessions)
    at_once = [
        fmean(
            bisect(begins, t) - bisect(ends, t)
            for t in (began + seconds * (piece + 0.5) / ROUNDS for piece in range(ROUNDS))
        )
        for began, seconds, _ in sessions
    ]
    # Duration of each session if it ran alone, as a share of the mean, by group.
    alone_s = session_s / fmean(at_once)
    paces = defaultdict[str, list[float]](list)
    for (_, seconds, group), others in zip(sessions, at_once, strict=True):
        paces[group].append(seconds / others / alone_s)
    steps = {e.record.step: (e.t, e.record.seconds) for e in told if isinstance(e.record, StepDone)}
    on_their_way = [
        e.t - steps[e.record.version][0]
        for e in told
        if isinstance(e.record, WeightsLive) and e.record.version in steps
    ]
    return Parts(
        session_s=session_s,
        at_once=fmean(at_once),
        session_spread=EVEN * math.sqrt(fmean(map(pvariance, paces.values()))),
        task_spread=EVEN * pstdev(map(fmean, paces.values())),
        train_s=fmean(seconds for _, seconds in steps.values()),
        live_s=max(0.0, fmean(on_their_way)),
        with_signal=fmean(e.record.kept for e in told if isinstance(e.record, GroupDone)),
    )


def scenario_of(config: RunConfig, stage: RolloutStageConfig, parts: Parts) -> Scenario:
    """The scenario of the stage. Turns and tools are modelled together. The workers share the
    cores, so that a session on one of them is slowed down by the sessions of all."""
    workers = len(config.engine.regions)
    return Scenario(
        steps=stage.steps,
        groups_per_step=stage.groups_per_step,
        group_size=stage.group_size,
        max_lag=stage.max_lag,
        reorder_window=stage.reorder_window,
        concurrency=config.harness.concurrency,
        regions=workers,
        workers_per_region=1,
        max_num_seqs=1,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        turns=ROUNDS,
        turn_s=parts.session_s / parts.at_once * workers / ROUNDS,
        tool_s=0.0,
        train_s=parts.train_s,
        publish_s=parts.live_s,
        download_s=0.0,
        swap_s=0.0,
        delta_bytes=0,
        with_signal=parts.with_signal,
        # The pieces of a session vary more than their sum.
        spread=min(1.0, parts.session_spread * math.sqrt(ROUNDS)),
        task_spread=min(1.0, parts.task_spread),
    )


def predict(scenario: Scenario, first: int = 0) -> float:
    """Predicted steps per hour after the `first` steps."""
    seconds = [
        play(scenario, seed).seconds
        - (play(replace(scenario, steps=first), seed).seconds if first else 0.0)
        for seed in range(SEEDS)
    ]
    return 3600 * (scenario.steps - first) / fmean(seconds)
