"""The state of a run as a person wants to see it, folded from its events. Pure: whoever has events
hands them in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from etude.core.alarms import Alarm, Alarms
from etude.core.events import (
    EvalDone,
    EvalProgress,
    Event,
    FitStep,
    FleetStatus,
    GroupDone,
    Launched,
    RegionStatus,
    RunDone,
    StageDone,
    StageStarted,
    StepDone,
    WeightsLive,
)

RECENT = 64
"""Groups behind the running solve rate."""
SPEED_S = 15.0
"""Time behind the running speeds."""


@dataclass
class RunView:
    stage: str = "starting"
    done: int = 0
    steps: int = 0
    """0: not known yet."""
    stage_began: float = 0.0
    resumed_at: int = 0
    """Steps that were done before this start; they tell nothing about its speed."""
    loss: float | None = None
    tokens_per_s: float | None = None
    step: StepDone | None = None
    """The newest one of rl."""
    lag: int | None = None
    lag_max: int = 0
    first_step: int = 0
    live: int | None = None
    trainer_busy: float | None = None
    regions: dict[str, RegionStatus] = field(default_factory=dict)
    window_slots: tuple[int, int] = (0, 0)
    evaluating: EvalProgress | None = None
    eval_began: float = 0.0
    evals: dict[tuple[str, str], EvalDone] = field(default_factory=dict)
    """(stage, split) -> result."""
    reward_curve: list[float] = field(default_factory=list)
    """Mean reward of the groups that ended during each step."""
    alarms: Alarms = field(default_factory=Alarms)
    finished: bool = False
    began: float | None = None
    """This and all other times here are of a clock that stands still while nothing runs."""
    now: float = 0.0

    def __post_init__(self) -> None:
        self._rewards: deque[float] = deque(maxlen=RECENT)
        self._since_step: list[float] = []
        self._ends: deque[tuple[float, int]] = deque()
        self._steps: deque[StepDone] = deque(maxlen=8)
        self._stopped_s = 0.0

    def apply(self, t: float, event: Event) -> list[Alarm]:
        """The alarms that begin with the event."""
        if isinstance(event, Launched) and self.began is not None:
            self._stopped_s = t - self.now
        t -= self._stopped_s
        self.began = t if self.began is None else min(self.began, t)
        self.now = max(self.now, t)
        match event:
            case StageStarted():
                self.stage = event.stage
                self.done = event.done
                self.steps = event.steps
                self.stage_began = t
                self.resumed_at, self.loss, self.tokens_per_s = event.done, None, None
            case FitStep():
                self.done = event.step
                self.steps = event.steps
                self.loss = event.loss
                self.tokens_per_s = event.tokens_per_s
            case StepDone():
                self._stepped(event)
            case StageDone():
                self.done = self.steps = self.steps or self.done
            case GroupDone():
                self._grouped(t, event)
            case WeightsLive():
                self.live = event.version
            case FleetStatus():
                self.regions, self.window_slots = event.regions, (event.active, event.capacity)
            case EvalProgress():
                if self.evaluating is None or event.done == 0:
                    self.eval_began = t
                self.evaluating = event
            case EvalDone():
                self.evaluating = None
                self.evals[event.stage, event.split] = event
            case RunDone():
                self.finished = True
        return self.alarms.apply(event)

    @property
    def solve_rate(self) -> float | None:
        """Of the last groups of training."""
        return sum(self._rewards) / len(self._rewards) if self._rewards else None

    @property
    def sessions_per_s(self) -> float:
        recent = [count for t, count in self._ends if t > self.now - SPEED_S]
        return sum(recent) / SPEED_S

    @property
    def eta_s(self) -> float | None:
        """Until the end of the stage, if it goes on as it went so far."""
        done = self.done - self.resumed_at
        return (
            (self.now - self.stage_began) / done * (self.steps - self.done)
            if done > 0 and self.steps
            else None
        )

    @property
    def eval_eta_s(self) -> float | None:
        """Until the end of the evaluation that is under way."""
        if (doing := self.evaluating) is None or doing.done == 0:
            return None
        return (self.now - self.eval_began) / doing.done * (doing.total - doing.done)

    def _stepped(self, event: StepDone) -> None:
        if not self._steps:
            self.first_step = event.step - self.done - 1
        self.done = event.step - self.first_step
        self.loss = event.loss
        self.lag = event.lag
        self.step = event
        self.tokens_per_s = event.tokens_per_s or None
        self.lag_max = max(self.lag_max, event.lag)
        self._steps.append(event)
        busy, idle = sum(e.seconds for e in self._steps), sum(e.wait_s for e in self._steps)
        self.trainer_busy = busy / (busy + idle) if busy + idle else None
        if self._since_step:
            self.reward_curve.append(sum(self._since_step) / len(self._since_step))
            self._since_step = []

    def _grouped(self, t: float, event: GroupDone) -> None:
        self._ends.append((t, len(event.rewards) + event.failed))
        while self._ends[0][0] < t - 2 * SPEED_S:
            self._ends.popleft()
        if event.rewards:
            mean = sum(event.rewards) / len(event.rewards)
            self._rewards.append(mean)
            self._since_step.append(mean)
