"""The state of a run as a person wants to see it, folded from its events. Pure: the caller passes
the events in."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from etude.core.alarms import Alarm, Alarms
from etude.core.events import (
    AttemptDone,
    AttemptsInterrupted,
    BatchReady,
    EvalDone,
    EvalProgress,
    Event,
    FewTasks,
    FitStep,
    FleetStatus,
    GroupDone,
    Launched,
    RegionStatus,
    RunDone,
    StageDone,
    StageStarted,
    StepDone,
    StepProgress,
    StoreUsed,
    WeightsLive,
)

UNDER_WAY = AttemptDone | EvalProgress | FitStep | RunDone | StageDone | StageStarted | StepDone
"""Events that show that a run is at work again after a start."""
RECENT = 64
"""Groups behind the running mean reward and solve rate."""
NEWEST = 12
"""Newest sessions that are kept for the screen."""
SPEED_S = 15.0
"""Length of the time window of speeds."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A session that failed, and the time at which it did."""

    t: float
    id: str
    error: str


@dataclass
class Ending:
    """Tracks if a run is at its end. A later evaluation of the run (`etude eval`) launches it once
    more without beginning a stage: with the result, the run is at its end again."""

    reached: bool = False
    _before: bool = False
    """True if the run was at its end before and no stage has begun since."""

    def apply(self, event: Event) -> None:
        match event:
            case RunDone():
                self.reached = self._before = True
            case StageStarted():
                self.reached = self._before = False
            case Launched() | EvalProgress():
                self.reached = False
            case EvalDone():
                self.reached = self._before


@dataclass
class Groups:
    """Statistics of the finished groups of training."""

    done: int = 0
    with_signal: int = 0
    sessions_compared: int = 0
    """Sessions of all groups that could teach something."""
    sessions_without: int = 0
    """Sessions of groups without signal: all attempts earned the same."""
    untrainable: int = 0
    """Sessions that were sampled with parameters that the trainer cannot recompute."""
    quarantined: int = 0
    """Sessions that are suspected of a trick."""
    earned: set[float] = field(default_factory=set)
    """The rewards in groups without signal."""
    by_task: dict[str, bool] = field(default_factory=dict)
    """Task -> True if any of its groups had a difference."""

    @property
    def tasks_without(self) -> list[str]:
        """Tasks that have taught nothing yet."""
        return [task for task, taught in self.by_task.items() if not taught]


@dataclass
class StoreCost:
    """Requests and bytes of all processes of a run to its bucket."""

    requests: int = 0
    lists: int = 0
    """Number of list requests among them."""
    read_bytes: int = 0
    written_bytes: int = 0
    steps: int = 0
    """Optimizer steps in the same time, of any stage."""

    def __post_init__(self) -> None:
        self._lives: dict[str, StoreUsed] = {}

    def add(self, now: StoreUsed) -> None:
        """Add the counters of a process. They count from its start, so a smaller number than
        before means that the process was restarted."""
        before = self._lives.get(now.process)
        self._lives[now.process] = now

        def more(name: str) -> int:
            count, then = int(getattr(now, name)), int(getattr(before, name, 0))
            return count - then if count >= then else count

        self.lists += more("lists")
        self.requests += more("reads") + more("writes") + more("lists")
        self.read_bytes += more("read_bytes")
        self.written_bytes += more("written_bytes")

    def __str__(self) -> str:
        steps = max(1, self.steps)
        return (
            f"{self.requests / steps:.0f} requests a step, {self.lists / steps:.1f} of them "
            f"listings; {self.read_bytes / steps / 1e6:.2f} MB read, "
            f"{self.written_bytes / steps / 1e6:.2f} MB written"
        )


@dataclass
class RunView:
    stage: str = "starting"
    done: int = 0
    steps: int = 0
    """0 if not known yet."""
    groups_per_step: int = 0
    """Groups that a step of the stage needs; 0 if none or not known yet."""
    stage_began: float = 0.0
    resumed_at: int = 0
    """Steps that were done before this start; they are not counted in its speed."""
    loss: float | None = None
    tokens_per_s: float | None = None
    step: StepDone | None = None
    """The newest step of rl."""
    stepping: StepProgress | None = None
    """Progress of the current step, if it takes long."""
    lag: int | None = None
    lag_max: int = 0
    """Over all batches written, as in an audit: the step of the newest may not be done."""
    first_step: int = 0
    live: int | None = None
    trainer_busy: float | None = None
    few_tasks: dict[str, FewTasks] = field(default_factory=dict)
    """By split."""
    regions: dict[str, RegionStatus] = field(default_factory=dict)
    store: StoreCost = field(default_factory=StoreCost)
    window_slots: tuple[int, int] = (0, 0)
    held: int = 0
    resuming: bool = False
    """True if the run was started again and is not at work yet."""
    evaluating: EvalProgress | None = None
    eval_began: float = 0.0
    evals: dict[tuple[str, str], EvalDone] = field(default_factory=dict)
    """(stage, split) -> result."""
    reward_curve: list[float] = field(default_factory=list)
    """Mean reward of the groups that ended during each step of the stage."""
    solve_curve: list[float] = field(default_factory=list)
    """Share of the attempts in these groups that solved the task."""
    entropy_curve: list[float] = field(default_factory=list)
    loss_curve: list[float] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    """Status -> number of training sessions that ended with it; `interrupted` counts those of
    groups that were cut short when the run was stopped."""
    groups: Groups = field(default_factory=Groups)
    running: int = 0
    """Number of sessions under way."""
    newest_sessions: deque[AttemptDone] = field(default_factory=lambda: deque(maxlen=NEWEST))
    failure: Failure | None = None
    """The newest failure, of training or of an evaluation."""
    alarms: Alarms = field(default_factory=Alarms)
    ending: Ending = field(default_factory=Ending)
    began: float | None = None
    """This and all other times here are by a clock that stops while nothing runs."""
    now: float = 0.0

    def __post_init__(self) -> None:
        self._rewards: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._since_step: list[tuple[float, float]] = []
        self._ends: deque[float] = deque()
        self._steps: deque[StepDone] = deque(maxlen=8)
        self._stopped_s = 0.0
        self._steps_before = 0
        """Steps of the stage, as known before the last start."""
        self._batches: dict[int, float] = {}
        """Steps with a batch that the trainer has not done yet -> time of the batch."""
        self._trainer_free: float | None = None
        """Time at which the trainer was ready for its current step; None while it starts."""
        self._unsettled: dict[str, dict[str, str]] = {}
        """Unfinished group -> the status of each of its sessions that has ended."""

    def apply(self, t: float, event: Event) -> list[Alarm]:
        """Add an event to the state. Return the alarms that begin with it."""
        if isinstance(event, Launched):
            self._stopped_s = t - self.now
        t -= self._stopped_s
        self.began = t if self.began is None else min(self.began, t)
        self.now = max(self.now, t)
        if isinstance(event, UNDER_WAY):
            self.resuming = False
        self.ending.apply(event)
        match event:
            case Launched():  # whatever was under way ended with the previous start
                self.resuming = event.resumed
                self.failure = self.evaluating = self.stepping = None
                self.few_tasks = {}
                self._steps_before = self.steps or self._steps_before
                self.steps = 0  # the stage may have been extended
                self._trainer_free = None
            case FewTasks():
                self.few_tasks[event.split] = event
            case StageStarted():
                self._begun(t, event)
            case StoreUsed():
                self.store.add(event)
            case FitStep():
                self._fitted(event)
            case BatchReady():
                self._batches[event.step] = t
                self.lag_max = max(self.lag_max, event.lag)
            case StepProgress():
                self.stepping = event
            case StepDone():
                self._stepped(event)
                self._trainer_free = t
                self._batches = {s: since for s, since in self._batches.items() if s > event.step}
            case StageDone():
                self.done = self.steps = self.steps or self.done
            case AttemptDone():
                self._ended(t, event)
            case AttemptsInterrupted():
                self._interrupted(event)
            case GroupDone():
                self._grouped(event)
            case WeightsLive():
                self.live = event.version
            case FleetStatus():
                self.regions = event.regions
                self.window_slots = (event.active, event.capacity)
                self.running, self.held = event.sessions, event.held
            case EvalProgress():
                if self.evaluating is None or event.done == 0:
                    self.eval_began = t
                self.evaluating = event
                self.steps = self.steps or self._steps_before  # `etude eval` begins no stage
            case EvalDone():
                self.evaluating = None
                self.evals[event.stage, event.name] = event
        return self.alarms.apply(event)

    @property
    def finished(self) -> bool:
        return self.ending.reached

    @property
    def recent_groups(self) -> int:
        """Groups behind `mean_reward` and `solve_rate`."""
        return len(self._rewards)

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of the last groups of training."""
        return _means(self._rewards)[0] if self._rewards else None

    @property
    def solve_rate(self) -> float | None:
        """Share of the attempts in the last groups of training that solved their task."""
        return _means(self._rewards)[1] if self._rewards else None

    @property
    def trainer_ready(self) -> bool:
        """True if the trainer has begun its stage since the last start."""
        return self._trainer_free is not None

    @property
    def stepping_since(self) -> float | None:
        """Time at which the trainer began its current step; None if it has no batch or is still
        starting."""
        if not self._batches or self._trainer_free is None:
            return None
        return max(self._batches[min(self._batches)], self._trainer_free)

    @property
    def sessions_per_s(self) -> float:
        return sum(t > self.now - SPEED_S for t in self._ends) / SPEED_S

    @property
    def eta_s(self) -> float | None:
        """Seconds until the end of the stage, at its mean speed so far."""
        done = self.done - self.resumed_at
        return (
            (self.now - self.stage_began) / done * (self.steps - self.done)
            if done > 0 and self.steps
            else None
        )

    @property
    def eval_eta_s(self) -> float | None:
        """Seconds until the end of the current evaluation."""
        if (doing := self.evaluating) is None or doing.done == 0:
            return None
        return (self.now - self.eval_began) / doing.done * (doing.total - doing.done)

    def _begun(self, t: float, event: StageStarted) -> None:
        if event.stage != self.stage:
            self._clear_curves()
        self.stage = event.stage
        self.done = event.done
        self.steps = event.steps
        self.groups_per_step = event.groups_per_step
        self.stage_began = self._trainer_free = t
        self.resumed_at = event.done
        self.loss = None
        self.tokens_per_s = None

    def _fitted(self, event: FitStep) -> None:
        self.store.steps += event.step - self.done if event.step > self.done else 1
        self.done = event.step
        self.steps = event.steps
        self.loss = event.loss
        self.loss_curve.append(event.loss)
        self.tokens_per_s = event.tokens_per_s

    def _stepped(self, event: StepDone) -> None:
        self.store.steps += 1
        self.stepping = None
        if not self._steps:
            self.first_step = event.step - self.done - 1
        self.done = event.step - self.first_step
        self.loss = event.loss
        self.lag = event.lag
        self.step = event
        self.tokens_per_s = event.tokens_per_s or None
        self.lag_max = max(self.lag_max, event.lag)
        self._steps.append(event)
        self.loss_curve.append(event.loss)
        self.entropy_curve.append(event.entropy)
        busy, idle = sum(e.seconds for e in self._steps), sum(e.wait_s for e in self._steps)
        self.trainer_busy = busy / (busy + idle) if busy + idle else None
        if self._since_step:
            reward, solved = _means(self._since_step)
            self.reward_curve.append(reward)
            self.solve_curve.append(solved)
            self._since_step = []

    def _clear_curves(self) -> None:
        for curve in (self.reward_curve, self.solve_curve, self.entropy_curve, self.loss_curve):
            curve.clear()

    def _ended(self, t: float, event: AttemptDone) -> None:
        self.newest_sessions.append(event)
        if event.error is not None:
            self.failure = Failure(t, event.id, event.error)
        self._ends.append(t)
        while self._ends[0] < t - 2 * SPEED_S:
            self._ends.popleft()
        if event.split == "train":
            self.ended[event.status] += 1
            group = event.id.rpartition(".")[0]
            self._unsettled.setdefault(group, {})[event.id] = event.status

    def _interrupted(self, event: AttemptsInterrupted) -> None:
        self.ended["interrupted"] += len(event.samples)
        for group in {sample.rpartition(".")[0] for sample in event.samples}:
            self.ended -= Counter(self._unsettled.pop(group, {}).values())

    def _grouped(self, event: GroupDone) -> None:
        self.groups.done += 1
        self._unsettled.pop(event.group, None)
        self.groups.untrainable += len(event.untrainable)
        self.groups.quarantined += len(event.quarantined)
        compared = len(event.rewards) - len(event.untrainable)
        self.groups.sessions_compared += max(compared, 0)
        if compared > 0:
            self.groups.by_task[event.task] = event.kept or self.groups.by_task.get(
                event.task, False
            )
        if event.kept:
            self.groups.with_signal += 1
        elif compared > 0:
            self.groups.sessions_without += compared
            self.groups.earned |= set(event.rewards)
        if count := len(event.rewards):
            solved = sum(reward == 1.0 for reward in event.rewards)
            means = (sum(event.rewards) / count, solved / count)
            self._rewards.append(means)
            self._since_step.append(means)


def _means(pairs: Collection[tuple[float, float]]) -> tuple[float, float]:
    first, second = zip(*pairs, strict=True)
    return sum(first) / len(pairs), sum(second) / len(pairs)
