"""What happened in a run, one typed record for each thing. The screen, the tables and the dashboard are views of these.

Every process writes the events that it alone can know, to a log of its own in the run's store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import get_args


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Somebody started, or resumed, the processes of the run."""

    resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """A process that is alive has not given a sign of it for so long: it is stopped, or hangs. Told again now and then
    while that lasts."""

    process: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
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
    figures: dict[str, float] = field(default_factory=dict)
    """What else was seen: `held_out`, the loss on documents that are never trained on; of dpo `accuracy`, how often the
    chosen answer wins, and `margin`, by how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """What a stage does not learn from, because it is too long for the model."""

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
    capped: float = 0.0
    """Share of the tokens whose importance weight was cut or taken away."""
    silenced: float = 0.0
    """Share of the tokens that taught nothing although their advantage was not 0."""
    lags: tuple[int, ...] = ()
    """Tokens with lag 0, 1, 2, ..."""
    router_disagreement: float | None = None
    """Share of the tokens for which a router would have chosen other experts than the engine's did."""
    tokens_per_s: float = 0.0
    """All tokens that went through the model, prompts included and padding not, while the trainer worked."""
    mfu: float | None = None
    """Share of the device's arithmetic that the model asked for, while the trainer worked."""
    repeats: int = 0
    """Rows that an earlier batch held already."""
    teacher_kl: float | None = None
    """Of distill: estimate of the KL of student to teacher, in nats a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far the trainer's log-probs of some tokens are from those that the engine recorded. `ratio` is the new
    probability over the recorded one: the importance weight."""

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
    effective: float
    """(sum of ratios)² / (N times the sum of their squares): what the weighted tokens are worth, as a share."""
    flips: float | None
    """Share of the tokens that the engine certainly held to be the likeliest, and the trainer did not; None if nobody
    said what the trainer holds to be."""
    routed_otherwise: float | None
    """Share of the tokens for which any layer's router chose other experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """A token on which the two disagree most."""

    sample: str
    place: int
    """In the row."""
    token: int
    text: str
    """The token behind a few that stand before it."""
    old: float
    new: float
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Metered:
    """Engine and trainer over the batch of a step; `Run.recomputed` has it token by token."""

    step: int
    all: Gap
    by_lag: dict[int, Gap]
    by_region: dict[str, Gap]
    """Empty if nobody said where the tokens come from."""
    worst: tuple[Worst, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """The trainer goes on, and the version is being published behind its back."""

    version: int
    stall_s: float
    """How long it did not: for the copy of the weights, and for the version before if that was not there yet."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Every worker samples from this version now, and the slots of what it was trained on are free."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    version: int
    busy: float
    """Share of the time since the last look that went into engine steps."""
    running: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A look at the workers."""

    regions: dict[str, Region]
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
    """Everything that the config asked for is there."""

    version: int


Event = (
    Launched
    | Silent
    | Heard
    | StageStarted
    | FitStep
    | Skipped
    | StageDone
    | StepDone
    | Metered
    | HandedOver
    | GroupDone
    | Live
    | Fleet
    | EvalProgress
    | EvalDone
    | RunDone
)
EVENTS: tuple[type[Event], ...] = get_args(Event)
