"""Events of a run, one typed record for each thing that happened. The screen, the tables and the
dashboard are views of these.

Every process writes the events that it alone can know, to a log of its own in the run's store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import get_args


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The processes of the run were started, or resumed."""

    resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSilent:
    """A process that is alive has not given a sign of it for so long: it is stopped, or hangs. Told
    again now and then while that lasts."""

    process: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHeard:
    """A process that was silent is not any more, after so long."""

    process: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted:
    stage: str
    steps: int
    """How many steps it takes at most; sft may stop before."""
    done: int = 0
    """Steps that were done before, if the stage is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitStep:
    """A step of a stage that learns from files."""

    stage: str
    step: int
    steps: int
    loss: float
    tokens_per_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics: `heldout`, the loss on documents that are never trained on; of dpo
    `accuracy`, how often the chosen answer wins, and `margin`, by how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongSkipped:
    """Sessions that a stage leaves out because they are too long for the model."""

    stage: str
    count: int
    where: tuple[str, ...]
    """The first few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDone:
    stage: str
    version: int
    """The weights that it ended with."""
    seconds: float


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
    """Sampled ones; these are what the step learns from."""
    seconds: float
    wait_s: float
    """How long the trainer had nothing to do before it."""
    reward: float | None = None
    """Mean over all attempts at the tasks of its batch."""
    lr: float = 0.0
    k1_p99: float = 0.0
    truncated_frac: float = 0.0
    """Share of the tokens whose importance weight was cut or taken away."""
    zero_grad_frac: float = 0.0
    """Share of the tokens that taught nothing although their advantage was not 0."""
    lags: tuple[int, ...] = ()
    """Tokens with lag 0, 1, 2, ..."""
    router_mismatch_frac: float | None = None
    """Share of the tokens for which a router would have chosen other experts than the engine's
    did."""
    experts_replaced_frac: float | None = None
    """Share of the replayed experts that were implausible, and so not used."""
    tokens_per_s: float = 0.0
    """All tokens that went through the model, prompts included and padding not, while the trainer
    worked."""
    mfu: float | None = None
    """Share of the device's arithmetic that the model asked for, while the trainer worked."""
    repeated_rows: int = 0
    """Rows that an earlier batch held already."""
    teacher_kl: float | None = None
    """Of distill: estimate of the KL of student to teacher, in nats a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchStats:
    """Train/inference mismatch: the distance of the trainer's log-probs of some tokens from those
    that the engine recorded. `ratio` is the new probability over the recorded one: the importance
    weight."""

    num_tokens: int
    k1: float
    """Mean of old minus new log-prob: an unbiased estimate of KL(old, new), of either sign."""
    k1_p99: float = math.nan
    """Of its size. Older runs do not tell it."""
    k3: float
    """Mean of ratio - 1 - log ratio: the same estimate, never negative and of smaller variance."""
    k3_p99: float
    k3_max: float
    ratio_p1: float
    ratio_p99: float
    ratio_max: float
    ess: float
    """(sum of ratios)² / (N times the sum of their squares): what the weighted tokens are worth, as
    a share."""
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
    """In the row."""
    token: int
    text: str
    """The token behind a few that stand before it."""
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
    """Empty if nobody said where the tokens come from."""
    worst: tuple[MismatchedToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishStarted:
    """The trainer goes on, and the version is being published in the background."""

    version: int
    stall_s: float
    """How long the trainer was stalled: for the copy of the weights, and for the version before if
    that was not there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDone:
    group: str
    task: str
    admitted: int
    rewards: tuple[float, ...]
    """Of the attempts that have one; those that failed in infrastructure are missing."""
    failed: int
    kept: bool
    """False if there is nothing to learn from it."""
    seconds: float
    malformed: dict[str, str] = field(default_factory=dict)
    """Attempts that cannot be trained on, and why."""
    untrainable: dict[str, str] = field(default_factory=dict)
    """Attempts that were sampled with parameters that the trainer cannot recompute, and which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLive:
    """The weights of this version are live: every worker samples from them, and the slots of what
    they were trained on are free."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionStatus:
    version: int
    busy: float
    """Share of the time since the last look that went into engine steps."""
    running: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The state of the workers, once a second."""

    regions: dict[str, RegionStatus]
    active: int
    """Slots in use."""
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalProgress:
    stage: str
    split: str
    done: int
    total: int
    solved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalDone:
    stage: str
    split: str
    version: int
    solved: int
    total: int
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDone:
    """The run is finished: everything that the config asked for is there."""

    version: int


Event = (
    Launched
    | ProcessSilent
    | ProcessHeard
    | StageStarted
    | FitStep
    | OverlongSkipped
    | StageDone
    | StepDone
    | MismatchMeasured
    | PublishStarted
    | GroupDone
    | WeightsLive
    | FleetStatus
    | EvalProgress
    | EvalDone
    | RunDone
)
EVENTS: tuple[type[Event], ...] = get_args(Event)
