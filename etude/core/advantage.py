"""Advantage estimators: from the rewards of a group to one advantage for each attempt. To add one,
add an entry to `ADVANTAGE`.

    reward less effort      what an attempt was worth, and what it cost (`core.effort`; nothing by
                            default)
    within a group          attempts are each other's baseline
    across a batch          one scale for the advantages of all its groups

An attempt whose reward is None broke in infrastructure: it gets no advantage and changes no
statistic of the others. Advantages follow from the group alone, so that recovery and audit can work
it out again from disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from etude.core.checks import LARGEST, row_fault
from etude.core.effort import Effort
from etude.core.sampling import expand_spans
from etude.core.types import Group, Row, Trajectory

GroupAdvantages = Callable[[Sequence[float]], list[float]]
"""The rewards of a group -> an advantage for each attempt; 0 is nothing to learn."""
BatchScale = Callable[[Sequence[float]], float]
"""All advantages of a batch -> the positive factor that they are multiplied by."""

ROUNDING = 1e-9
"""Rewards that differ by a smaller share of themselves are the same."""


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Dr. GRPO: reward minus the group mean. No division by the standard deviation: that would blow
    up the small differences within groups that are nearly always, or nearly never, solved."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """RLOO: reward minus the mean of the others, an unbiased baseline; `dr_grpo` up to the factor n
    / (n - 1)."""
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    total = sum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def grpo(rewards: Sequence[float]) -> list[float]:
    """GRPO: `dr_grpo` divided by the group's own standard deviation, as in the paper: every group
    pulls equally hard, also the one in which a single attempt differs."""
    advantages = dr_grpo(rewards)
    deviation = root_mean_square(advantages)
    return (
        [advantage / deviation for advantage in advantages] if deviation else [0.0] * len(rewards)
    )


def self_imitation(rewards: Sequence[float]) -> list[float]:
    """Self-imitation: the positive part of `dr_grpo`, so an attempt below the mean is passed over.
    What went well says what to do; what went badly only says what not to do, and a small policy
    that is pushed away from what it said drifts to where nobody has looked."""
    return [max(0.0, advantage) for advantage in dr_grpo(rewards)]


def constant_advantage(rewards: Sequence[float]) -> list[float]:
    """The same advantage for every attempt: for `distill`, where a teacher scores each token and
    every attempt is trained on."""
    return [1.0] * len(rewards)


def unscaled(advantages: Sequence[float]) -> float:
    return 1.0


def unit_std(advantages: Sequence[float]) -> float:
    """Scale to unit standard deviation over the batch (REINFORCE++-baseline): the size of a step
    does not depend on the scale of the rewards, while groups keep their differences."""
    return 1.0 / (root_mean_square(advantages) or 1.0)


def root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def differ(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by more than rounding, which a division by the deviation would make as
    large as any other difference."""
    return bool(rewards) and max(rewards) - min(rewards) > ROUNDING * max(map(abs, rewards))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """The outcome of each attempt of a group, by its id: its advantage, or why it is not trained
    on."""

    advantages: dict[str, float]
    """Those that teach something."""
    failed: tuple[str, ...] = ()
    """No score, or not a word from the policy."""
    malformed: dict[str, str] = field(default_factory=dict)
    """Those that cannot be trained on, and why."""
    no_signal: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator:
    per_group: GroupAdvantages = dr_grpo
    batch_scale: BatchScale = unscaled
    effort: Effort | None = None
    keep_zero_std: bool = False
    """Also where all attempts were worth the same."""
    max_tokens: int | None = None
    """Of a row; None: any number."""
    max_lag: int | None = None
    """How much newer than its admission a token of a group can be; None: no matter."""

    def estimate(self, group: Group) -> GroupOutcome:
        said = [t for t in group.trajectories if t.reward is not None and t.num_sampled]
        heard = {t.id for t in said}
        malformed = {t.id: why for t in said if (why := self._fault(t, group.admitted))}
        attempts = [t for t in said if t.id not in malformed]
        worth = [self._net_reward(t) for t in attempts]
        credited = (
            self.per_group(worth) if self.keep_zero_std or differ(worth) else [0.0] * len(worth)
        )
        if not all(map(math.isfinite, credited)):
            malformed |= {
                t.id: f"the advantages of its group are not finite: {credited}" for t in attempts
            }
            attempts, credited = [], []
        pairs = list(zip(attempts, credited, strict=True))
        return GroupOutcome(
            advantages={attempt.id: advantage for attempt, advantage in pairs if advantage != 0.0},
            failed=tuple(t.id for t in group.trajectories if t.id not in heard),
            malformed=malformed,
            no_signal=tuple(attempt.id for attempt, advantage in pairs if advantage == 0.0),
        )

    def _net_reward(self, trajectory: Trajectory) -> float:
        assert trajectory.reward is not None
        return trajectory.reward - (self.effort.penalty(trajectory) if self.effort else 0.0)

    def _fault(self, trajectory: Trajectory, admitted: int) -> str | None:
        assert trajectory.reward is not None
        if not abs(trajectory.reward) <= LARGEST:  # nor if it is no number
            return f"its reward is {trajectory.reward}"
        newest = admitted + self.max_lag if self.max_lag is not None else 1 << 62
        faults = (
            row_fault(row, oldest=admitted, newest=newest, max_tokens=self.max_tokens)
            for row in to_rows(trajectory, 0.0)
        )
        return next((fault for fault in faults if fault is not None), None)


ADVANTAGE: dict[str, AdvantageEstimator] = {
    "dr_grpo": AdvantageEstimator(),
    "rloo": AdvantageEstimator(per_group=rloo),
    "grpo": AdvantageEstimator(per_group=grpo),
    "reinforce_plus_plus_baseline": AdvantageEstimator(batch_scale=unit_std),
    "self_imitation": AdvantageEstimator(per_group=self_imitation),
}


def to_rows(trajectory: Trajectory, advantage: float) -> list[Row]:
    """One row a segment; the one advantage of the trajectory goes to every sampled token of all of
    them."""
    return [
        Row(
            sample=trajectory.id,
            tokens=segment.prompt + segment.tokens,
            mask=(False,) * len(segment.prompt) + segment.mask,
            logprobs=(0.0,) * len(segment.prompt) + segment.logprobs,
            advantages=(0.0,) * len(segment.prompt)
            + tuple(advantage if sampled else 0.0 for sampled in segment.mask),
            versions=segment.versions,
            regions=segment.regions,
            experts=segment.experts,
        )
        for segment in trajectory.segments
    ]


def oldest_version(rows: Sequence[Row]) -> int:
    return min(chain.from_iterable(expand_spans(row.versions) for row in rows))
