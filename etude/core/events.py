"""Events of a run, one typed record for each thing that happened. The screen, the tables and the
dashboard are views of these.

Every process writes the events that it alone can know, to a log of its own in the run's store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import get_args

from etude.core.types import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The processes of the run were started, or resumed."""

    resumed: bool
    command: str = ""
    """That resumes it again."""
    folder: str = ""
    """The working directory of the command."""
    store: str = ""
    """The URL of the run's store, which may have been moved or copied since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSilent:
    """A process has sent no heartbeat for so long: it is stopped, or hangs. Repeated now and then
    while that lasts."""

    process: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRestarted:
    """A process has died and is started again."""

    process: str
    how: str
    """It died."""
    limit: int | None
    """How often it may be within a minute; None: the node is to blame, and it may be always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDied:
    """A process has died, and the run has stopped with it."""

    process: str
    how: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHeard:
    """A process sends heartbeats again, after so long without one."""

    process: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted:
    """A stage was started, or resumed."""

    stage: str
    steps: int
    """The most steps that it takes; sft may stop before."""
    done: int = 0
    """Steps that were done before, if the stage is resumed."""
    repeated: int = 0
    """Published steps that are repeated first, because no checkpoint holds them."""
    groups_per_step: int = 0
    """Groups that a step needs; 0 for a stage without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitStep:
    """A step of a supervised stage: midtrain, sft or dpo."""

    stage: str
    step: int
    steps: int
    loss: float
    tokens_per_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics: `heldout`, the loss on documents that are never trained on; of dpo
    `accuracy`, how often the chosen answer wins, and `margin`, by how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewTasks:
    """An environment gives fewer tasks of a split than the run asks for."""

    split: str
    wanted: int
    given: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongSkipped:
    """Sessions that a stage leaves out because they are too long for the model."""

    stage: str
    count: int
    where: tuple[str, ...]
    """The places of the first few of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDone:
    """A stage is finished."""

    stage: str
    version: int
    """The version of the weights that it ended with."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReady:
    """The batch of a step of rl or distill is in the store: the trainer can begin it."""

    step: int
    lag: int = 0
    """Steps between the weights that sampled its oldest token and those that will train on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """A step of rl or distill goes on; told now and then, if it takes long."""

    step: int
    done: int
    """Rows of its batch."""
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A step of rl or distill. Version `step` is published."""

    step: int
    loss: float
    lag: int
    k1: float
    k3_mean: float
    k3_p99: float
    entropy: float
    grad_norm: float
    tokens: int
    """The number of sampled tokens that the step trained on."""
    seconds: float
    wait_s: float
    """Time that the trainer was idle before the step."""
    reward: float | None = None
    """Mean over all attempts at the tasks of its batch."""
    lr: float = 0.0
    k1_p99: float = 0.0
    corrected_frac: float = 0.0
    """Share of the tokens whose importance weight was cut or taken away."""
    zero_grad_frac: float = 0.0
    """Share of the tokens with zero gradient although their advantage was not 0."""
    lags: tuple[int, ...] = ()
    """Histogram of the lag: the number of tokens with lag 0, 1, 2, ..."""
    router_mismatch_frac: float | None = None
    """Share of the tokens for which a router would have chosen other experts than the engine's
    did."""
    experts_replaced_frac: float | None = None
    """Share of the replayed experts that were replaced (`router_replay_min_score`)."""
    tokens_per_s: float = 0.0
    """Tokens a second through the model, prompts included and padding not, while the trainer
    worked."""
    mfu: float | None = None
    """Model FLOPs utilisation, while the trainer worked."""
    repeated_rows: int = 0
    """Rows that an earlier batch held already."""
    teacher_kl: float | None = None
    """Estimate of the KL of student to teacher, in nats a token; only of distill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPassedOver:
    """A step whose batch is empty, since all users that it was made of were deleted. Version `step`
    is published, with the weights that the step began with."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchStats:
    """Train/inference mismatch: the distance of the trainer's log-probs of some tokens from those
    that the engine recorded. `ratio` is the new probability over the recorded one: the importance
    weight."""

    num_tokens: int
    k1: float
    """Mean of old minus new log-prob: an unbiased estimate of KL(old, new), of either sign."""
    k1_p99: float = math.nan
    """The 99th percentile of |old - new|; NaN in runs that did not record it."""
    k3: float
    """Mean of ratio - 1 - log ratio: the same estimate, never negative and of smaller variance."""
    k3_p99: float
    k3_max: float
    ratio_p1: float
    ratio_p99: float
    ratio_max: float
    ess: float
    """Effective sample size of the importance weights, as a share: (sum of ratios)² / (N times the
    sum of their squares)."""
    argmax_flip_frac: float | None
    """Share of the tokens that the engine certainly held to be the likeliest, and the trainer did
    not; None if nobody said what the trainer holds to be."""
    router_mismatch_frac: float | None
    """Share of the tokens for which any layer's router chose other experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchedToken:
    """One of the tokens with the largest mismatch."""

    sample: str
    position: int
    """The position in the row."""
    token: int
    text: str
    """The text of the token and of a few before it."""
    old: float
    new: float
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchMeasured:
    """The train/inference mismatch over the batch of a step; `Run.recomputed` has it token by
    token."""

    step: int
    all: MismatchStats
    by_lag: dict[int, MismatchStats]
    by_region: dict[str, MismatchStats]
    """Empty if the regions of the tokens are not known."""
    worst: tuple[MismatchedToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishStarted:
    """The weights are copied, and published in the background while the trainer goes on."""

    version: int
    stall_s: float
    """Time that the trainer was stalled: for the copy of the weights, and for the version before if
    that was not published yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDone:
    """An attempt at a task is over, in training or in an evaluation."""

    id: str
    task: str
    split: str
    status: Status
    reward: float | None
    """None if it failed."""
    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptsInterrupted:
    """A stop of the run cut their groups short, though some of them were over. Told when it goes
    on: their tasks are issued again."""

    samples: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDone:
    """All attempts at a task are finished."""

    group: str
    task: str
    admitted: int
    rewards: tuple[float, ...]
    """The rewards of the attempts, without those that failed in infrastructure and those that are
    quarantined: what was got by a trick is no progress."""
    failed: int
    kept: bool
    """False if there is nothing to learn from it."""
    seconds: float
    malformed: dict[str, str] = field(default_factory=dict)
    """Attempts that cannot be trained on, and why."""
    untrainable: dict[str, str] = field(default_factory=dict)
    """Attempts that were sampled with parameters that the trainer cannot recompute, and which."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Attempts that are suspected of a trick and were set aside, and which trick."""
    jump: str = ""
    """What is odd about what it earned (`core.jumps`), if anything is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLive:
    """The weights of this version are live: every request is begun with them or newer ones, and the
    slots of what they were trained on are free."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionStatus:
    """The state of the worker of a region."""

    version: int
    busy: float
    """Share of the time since the last look that went into engine steps."""
    running: int
    waiting: int
    quarantined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionQuarantined:
    """A region computes otherwise than the others, by the trainer's measure, and is sent no more
    requests in this launch."""

    region: str
    step: int
    """The last of the steps that it was measured over."""
    factor: float
    """How many times that of the others its k3 is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The state of the workers, once a second."""

    regions: dict[str, RegionStatus]
    active: int
    """Slots in use."""
    capacity: int
    sessions: int = 0
    """Sessions under way."""
    held: int = 0
    """Finished groups that wait for an older one (`reorder_window`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsed:
    """Requests to the bucket that the run lies in, and bytes, since a process of the run began;
    now and then. The controller tells it of workers and gateway."""

    process: str
    reads: int
    """GET and HEAD."""
    writes: int
    lists: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalProgress:
    """An evaluation goes on."""

    stage: str
    split: str
    done: int
    total: int
    solved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalDone:
    """An evaluation is finished; `low` and `high` bound its solve rate."""

    stage: str
    split: str
    version: int
    solved: int
    total: int
    low: float
    high: float
    samples: int = 1
    """Attempts at each task; `solved` and `total` count attempts."""

    @property
    def name(self) -> str:
        """Of what can be compared: attempts are sampled at another temperature if they are several
        at each task."""
        return self.split if self.samples == 1 else f"{self.split} ×{self.samples}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDone:
    """The run is finished: everything that the config asked for is there."""

    version: int


Event = (
    Launched
    | ProcessSilent
    | ProcessRestarted
    | RegionQuarantined
    | ProcessDied
    | ProcessHeard
    | FewTasks
    | StageStarted
    | FitStep
    | OverlongSkipped
    | StageDone
    | BatchReady
    | StepProgress
    | StepDone
    | StepPassedOver
    | MismatchMeasured
    | PublishStarted
    | AttemptDone
    | AttemptsInterrupted
    | GroupDone
    | WeightsLive
    | FleetStatus
    | StoreUsed
    | EvalProgress
    | EvalDone
    | RunDone
)
EVENTS: tuple[type[Event], ...] = get_args(Event)
