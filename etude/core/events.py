"""Events of a run, one typed record for each occurrence. The screen, the tables and the dashboard
are views of these.

Every process writes the events that only it can know, to a log of its own in the run's store.
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
    """The command that resumes the run."""
    folder: str = ""
    """The working directory of the command."""
    store: str = ""
    """The URL of the run's store, which may have been moved or copied since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSilent:
    """A process has sent no heartbeat for `seconds`: it is stopped, or hangs. Repeated from time to
    time while the silence lasts."""

    process: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRestarted:
    """A process has died and is being restarted."""

    process: str
    how: str
    """Its end, in words."""
    limit: int | None
    """The number of restarts allowed within a minute; None: the node is to blame, and there is no
    limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDied:
    """A process has died, and the run has stopped with it."""

    process: str
    how: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHeard:
    """A process sends heartbeats again, after `seconds` without one."""

    process: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted:
    """A stage was started, or resumed."""

    stage: str
    steps: int
    """Steps of the stage, at most; sft may stop earlier."""
    done: int = 0
    """Steps that were done before, if the stage is resumed."""
    repeated: int = 0
    """Published steps that are repeated first, because no checkpoint holds them."""
    groups_per_step: int = 0
    """Groups that a step needs; 0 for a stage without groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitStep:
    """A step of a supervised stage: midtrain, sft or dpo."""

    stage: str
    step: int
    steps: int
    loss: float
    tokens_per_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics: `heldout`, the loss on documents that are never trained on; for dpo also
    `accuracy`, the share of pairs in which the chosen answer wins, and `margin`, by how much it
    wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewTasks:
    """An environment has fewer tasks of a split than the run asks for."""

    split: str
    wanted: int
    given: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongSkipped:
    """Sessions that a stage skips because they are too long for the model."""

    stage: str
    count: int
    where: tuple[str, ...]
    """The places of the first few skipped sessions."""


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
    """Progress within a step of rl or distill; written from time to time if the step takes long."""

    step: int
    done: int
    """Rows of the batch that are done."""
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A finished step of rl or distill. Version `step` is published."""

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
    """Share of the tokens whose importance weight was truncated or masked."""
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
    """Tokens per second through the model, with prompts and without padding, while the trainer was
    working."""
    mfu: float | None = None
    """Model FLOPs utilisation while the trainer was working."""
    repeated_rows: int = 0
    """Rows that an earlier batch contained already."""
    teacher_kl: float | None = None
    """Estimate of the KL of student to teacher, in nats per token; for distill only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPassedOver:
    """A step whose batch is empty because all users in it were deleted. Version `step` is
    published, with the weights that the step started from."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchStats:
    """Train/inference mismatch: the distance between the trainer's log-probs of some tokens and
    those that the engine recorded. `ratio`, the importance weight, is the new probability over the
    recorded one."""

    num_tokens: int
    k1: float
    """Mean of old minus new log-prob: an unbiased estimate of KL(old, new), which may be
    negative."""
    k1_p99: float = math.nan
    """The 99th percentile of |old - new|; NaN in runs that did not record it."""
    k3: float
    """Mean of ratio - 1 - log ratio: an estimate of the same KL, never negative and of smaller
    variance."""
    k3_p99: float
    k3_max: float
    ratio_p1: float
    ratio_p99: float
    ratio_max: float
    ess: float
    """Effective sample size of the importance weights, as a share: (sum of ratios)² / (N times the
    sum of their squares)."""
    argmax_flip_frac: float | None
    """Share of tokens whose likeliest token is another one for the trainer, among those that the
    engine certainly ranked first; None if the trainer's ranking is not known."""
    router_mismatch_frac: float | None
    """Share of the tokens for which the router of at least one layer chose other experts."""


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
    """The train/inference mismatch over the batch of a step; `Run.recomputed` has it for each
    token."""

    step: int
    all: MismatchStats
    by_lag: dict[int, MismatchStats]
    by_region: dict[str, MismatchStats]
    """Empty if the regions of the tokens are not known."""
    worst: tuple[MismatchedToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishStarted:
    """The weights are copied, and published in the background while the trainer continues."""

    version: int
    stall_s: float
    """Time that the trainer was stalled: for the copy of the weights, and for the previous version
    if that was not published yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDone:
    """A finished attempt at a task, in training or in an evaluation."""

    id: str
    task: str
    split: str
    status: Status
    reward: float | None
    """The reward; None if the attempt failed."""
    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptsInterrupted:
    """Attempts whose groups were cut short when the run stopped, though some attempts were
    finished. Written when the run resumes: their tasks are issued again."""

    samples: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDone:
    """All attempts at a task are finished."""

    group: str
    task: str
    admitted: int
    rewards: tuple[float, ...]
    """The rewards of the attempts, without those that failed in infrastructure and those that are
    quarantined: a reward from a trick is not progress."""
    failed: int
    kept: bool
    """False if there is nothing to learn from the group."""
    seconds: float
    malformed: dict[str, str] = field(default_factory=dict)
    """Attempts that cannot be trained on, and why."""
    untrainable: dict[str, str] = field(default_factory=dict)
    """Attempts sampled with parameters that the trainer cannot recompute, and the parameters."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Attempts that were set aside on suspicion of a trick, and the trick."""
    jump: str = ""
    """The anomaly in the group's rewards (`core.jumps`); empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLive:
    """The weights of this version are live: every request starts with them or newer ones, and the
    slots of the groups that they were trained on are free."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionStatus:
    """The state of the worker of a region."""

    version: int
    busy: float
    """Share of the time since the last look that was spent in engine steps."""
    running: int
    waiting: int
    quarantined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionQuarantined:
    """A region that computes something different from the others, by the trainer's measure, gets no
    more requests in this launch."""

    region: str
    step: int
    """The last of the steps that it was measured over."""
    factor: float
    """The ratio of its k3 to that of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The state of the workers, once per second."""

    regions: dict[str, RegionStatus]
    active: int
    """Slots in use."""
    capacity: int
    sessions: int = 0
    """Sessions in progress."""
    held: int = 0
    """Finished groups that wait for an older one (`reorder_window`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsed:
    """Requests to the bucket that the run lies in, and bytes transferred, since a process of the
    run started; written from time to time. The controller reports for the workers and the
    gateway."""

    process: str
    reads: int
    """GET and HEAD requests."""
    writes: int
    lists: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalProgress:
    """Progress of an evaluation."""

    stage: str
    split: str
    done: int
    total: int
    solved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalDone:
    """A finished evaluation; `low` and `high` bound its solve rate."""

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
        """The name under which evaluations are comparable: several attempts at each task are
        sampled at another temperature than a single one."""
        return self.split if self.samples == 1 else f"{self.split} ×{self.samples}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDone:
    """The run is finished: it has done everything that the config asked for."""

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
