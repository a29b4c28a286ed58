"""The curves of a run, folded from its events. Pure: the caller passes the events in.

A point of a curve is a step of a loop (rl, distill) or of a stage that learns from files. Events
that come once a second are aggregated in a bounded number of intervals, however long the run is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from etude.core.alarms import Alarm
from etude.core.events import (
    EvalDone,
    Event,
    FitStep,
    FleetStatus,
    GroupDone,
    MismatchMeasured,
    PublishStarted,
    RegionStatus,
    StageDone,
    StageStarted,
    StepDone,
    WeightsLive,
)

MOST_INTERVALS = 480

STEP_CURVES = (
    "loss",
    "reward",
    "entropy",
    "k3_mean",
    "k3_p99",
    "lag",
    "grad_norm",
    "tokens",
    "tokens_per_s",
    "corrected_frac",
    "zero_grad_frac",
    "seconds",
    "wait_s",
    "lr",
    "mfu",
    "teacher_kl",
)
"""Fields of `StepDone` that are drawn as curves."""


@dataclass
class Interval:
    """Means of one worker's reports within an interval of time."""

    t: float
    count: int
    busy: float
    running: float
    waiting: float
    version: int

    def merge(self, other: Interval) -> None:
        count = self.count + other.count
        for name in ("busy", "running", "waiting"):
            both = getattr(self, name) * self.count + getattr(other, name) * other.count
            setattr(self, name, both / count)
        self.count = count
        self.version = max(self.version, other.version)


class Timeline:
    """One worker over time. If there are too many intervals, neighbours are merged in pairs."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self.width_s = 1.0

    def add(self, t: float, status: RegionStatus) -> None:
        found = Interval(t, 1, status.busy, status.running, status.waiting, status.version)
        if self.intervals and t < self.intervals[-1].t + self.width_s:
            self.intervals[-1].merge(found)
            return
        self.intervals.append(found)
        if len(self.intervals) > MOST_INTERVALS:
            self.width_s *= 2
            merged: list[Interval] = []
            for each in self.intervals:
                if merged and each.t < merged[-1].t + self.width_s:
                    merged[-1].merge(each)
                else:
                    merged.append(each)
            self.intervals = merged


@dataclass
class Version:
    """The times at which a version of the weights was trained, published, and live in each
    region."""

    step_done: float | None = None
    publish_started: float | None = None
    stall_s: float | None = None
    live: float | None = None
    regions: dict[str, float] = field(default_factory=dict)
    """Region -> first time at which its worker was seen to serve this version or a newer one."""


@dataclass(frozen=True, slots=True)
class Begun:
    """An alarm, and the time at which it began."""

    t: float
    alarm: Alarm


class History:
    def __init__(self) -> None:
        self.steps: dict[str, list[float | None]] = {"step": [], "t": []}
        self.fits: dict[str, dict[str, list[float]]] = {}
        """Stage -> its curves."""
        self.stages: list[dict[str, Any]] = []
        self.evals: list[EvalDone] = []
        self.alarms: list[Begun] = []
        self.workers: defaultdict[str, Timeline] = defaultdict(Timeline)
        self.versions: defaultdict[int, Version] = defaultdict(Version)
        self._busy: defaultdict[str, list[float]] = defaultdict(list)
        self._attempts = [0, 0]
        """Number of solved attempts, and of all attempts, since the last step."""
        self._ess: dict[int, float] = {}
        self._serving: dict[str, int] = {}

    def apply(self, t: float, event: Event, begun: list[Alarm]) -> None:
        """Add an event to the curves. `begun` are the alarms that begin with it."""
        self.alarms += [Begun(t, alarm) for alarm in begun]
        match event:
            case StageStarted():
                self.stages.append({"stage": event.stage, "began": t, "steps": event.steps})
            case StageDone():
                self.stages.append(
                    {"stage": event.stage, "ended": t, "version": event.version}
                    | {"seconds": event.seconds}
                )
            case FitStep():
                self._fit(event)
            case StepDone():
                self._step(t, event)
            case MismatchMeasured():
                self._ess[event.step] = event.all.ess
            case GroupDone():
                self._attempts[0] += sum(reward == 1.0 for reward in event.rewards)
                self._attempts[1] += len(event.rewards)
            case EvalDone():
                self.evals.append(event)
            case PublishStarted():
                version = self.versions[event.version]
                version.publish_started = t
                version.stall_s = event.stall_s
            case WeightsLive():
                self.versions[event.version].live = t
            case FleetStatus():
                self._fleet(t, event)

    def _fit(self, event: FitStep) -> None:
        curves = self.fits.setdefault(event.stage, {"step": [], "loss": [], "tokens_per_s": []})
        values = {"step": event.step, "loss": event.loss, "tokens_per_s": event.tokens_per_s}
        for name, value in values.items():
            curves[name].append(value)

    def _step(self, t: float, event: StepDone) -> None:
        solved, attempts = self._attempts
        busy = event.seconds + event.wait_s
        values: dict[str, float | None] = {"step": event.step, "t": t}
        values |= {name: getattr(event, name) for name in STEP_CURVES}
        values["solve_rate"] = solved / attempts if attempts else None
        values["trainer_busy"] = event.seconds / busy if busy else None
        values |= {
            f"busy {region}": sum(told) / len(told) for region, told in self._busy.items() if told
        }
        count = len(self.steps["step"])
        for name, value in values.items():
            self.steps.setdefault(name, [None] * count).append(value)
        for curve in self.steps.values():
            curve += [None] * (count + 1 - len(curve))
        self.versions[event.step].step_done = t
        self._attempts = [0, 0]
        self._busy.clear()

    @property
    def ess(self) -> list[float | None]:
        """Effective sample size of each step; None where it was not measured."""
        return [self._ess.get(int(step or 0)) for step in self.steps["step"]]

    def _fleet(self, t: float, event: FleetStatus) -> None:
        for region, status in event.regions.items():
            self.workers[region].add(t, status)
            self._busy[region].append(status.busy)
            before = self._serving.get(region, -1)
            for version in range(before + 1, status.version + 1):
                self.versions[version].regions.setdefault(region, t)
            self._serving[region] = max(before, status.version)
