"""From the attempts at a task to one advantage for each. Adding a way is adding an entry to `CREDIT`.

    reward less effort      what an attempt was worth, and what it cost (`core.effort`; nothing by default)
    within a group          attempts are each other's baseline
    across a batch          one scale for the advantages of all its groups

An attempt whose reward is None broke in infrastructure: it gets no advantage and changes no statistic of the others.
What a group teaches follows from the group alone, so that recovery and audit can work it out again from disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from etude.core.checks import LARGEST, row_fault
from etude.core.effort import Effort
from etude.core.types import Group, Row, Trajectory, unspan

Within = Callable[[Sequence[float]], list[float]]
"""The rewards of a group -> an advantage for each attempt; 0 is nothing to learn."""
Across = Callable[[Sequence[float]], float]
"""All advantages of a batch -> the positive factor that they are multiplied by."""

ROUNDING = 1e-9
"""Rewards that differ by a smaller share of themselves are the same."""


def centered(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group mean. No division by the deviation: that would blow up the small differences within
    groups that are nearly always, or nearly never, solved."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Reward minus the mean of the others: an unbiased baseline, and `centered` up to the factor n / (n - 1)."""
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    total = sum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def std_normalised(rewards: Sequence[float]) -> list[float]:
    """`centered`, in units of the group's own deviation, as in the GRPO paper: every group pulls equally hard, also
    the one in which a single attempt differs."""
    advantages = centered(rewards)
    deviation = root_mean_square(advantages)
    return [advantage / deviation for advantage in advantages] if deviation else [0.0] * len(rewards)


def praise(rewards: Sequence[float]) -> list[float]:
    """`centered`, but an attempt below the mean is passed over. What went well says what to do; what went badly only
    says what not to do, and a small policy that is pushed away from what it said drifts to where nobody has looked."""
    return [max(0.0, advantage) for advantage in centered(rewards)]


def equally(rewards: Sequence[float]) -> list[float]:
    """For `distill`, where a teacher says what each token was worth: every attempt is learnt from, whatever came of
    it."""
    return [1.0] * len(rewards)


def as_they_are(advantages: Sequence[float]) -> float:
    return 1.0


def to_unit_deviation(advantages: Sequence[float]) -> float:
    """The size of a step then does not depend on the scale of the rewards, while groups keep their differences."""
    return 1.0 / (root_mean_square(advantages) or 1.0)


def root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def differ(rewards: Sequence[float]) -> bool:
    """By more than rounding, which a division by the deviation would make as large as any other difference."""
    return bool(rewards) and max(rewards) - min(rewards) > ROUNDING * max(map(abs, rewards))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of each attempt of a group, by its id."""

    advantages: dict[str, float]
    """Those that teach something."""
    failed: tuple[str, ...] = ()
    """No score, or not a word from the policy."""
    malformed: dict[str, str] = field(default_factory=dict)
    """Those that cannot be trained on, and why."""
    no_signal: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    within: Within = centered
    across: Across = as_they_are
    effort: Effort | None = None
    always: bool = False
    """Also where all attempts were worth the same."""
    max_tokens: int | None = None
    """Of a row; None: any number."""
    max_lag: int | None = None
    """How much newer than its admission a token of a group can be; None: no matter."""

    def judge(self, group: Group) -> Verdict:
        said = [t for t in group.trajectories if t.reward is not None and t.num_sampled]
        heard = {t.id for t in said}
        malformed = {t.id: why for t in said if (why := self._fault(t, group.admitted))}
        attempts = [t for t in said if t.id not in malformed]
        worth = [self._worth(t) for t in attempts]
        credited = self.within(worth) if self.always or differ(worth) else [0.0] * len(worth)
        if not all(map(math.isfinite, credited)):
            malformed |= {t.id: f"the advantages of its group are not finite: {credited}" for t in attempts}
            attempts, credited = [], []
        pairs = list(zip(attempts, credited, strict=True))
        return Verdict(
            advantages={attempt.id: advantage for attempt, advantage in pairs if advantage != 0.0},
            failed=tuple(t.id for t in group.trajectories if t.id not in heard),
            malformed=malformed,
            no_signal=tuple(attempt.id for attempt, advantage in pairs if advantage == 0.0),
        )

    def _worth(self, trajectory: Trajectory) -> float:
        assert trajectory.reward is not None
        return trajectory.reward - (self.effort.price(trajectory) if self.effort else 0.0)

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


CREDIT: dict[str, Credit] = {
    "centered": Credit(),
    "leave_one_out": Credit(within=leave_one_out),
    "std_normalised": Credit(within=std_normalised),
    "batch_normalised": Credit(across=to_unit_deviation),
    "praise": Credit(within=praise),
}


def to_rows(trajectory: Trajectory, advantage: float) -> list[Row]:
    """One row a segment; the one advantage of the trajectory goes to every sampled token of all of them."""
    return [
        Row(
            sample=trajectory.id,
            tokens=segment.prompt + segment.tokens,
            mask=(False,) * len(segment.prompt) + segment.mask,
            logprobs=(0.0,) * len(segment.prompt) + segment.logprobs,
            advantages=(0.0,) * len(segment.prompt) + tuple(advantage if sampled else 0.0 for sampled in segment.mask),
            versions=segment.versions,
            regions=segment.regions,
            experts=segment.experts,
        )
        for segment in trajectory.segments
    ]


def oldest_version(rows: Sequence[Row]) -> int:
    return min(chain.from_iterable(unspan(row.versions) for row in rows))
