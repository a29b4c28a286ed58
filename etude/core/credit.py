"""From the rewards of a group to one advantage for each attempt. Adding a way is adding a function to `CREDIT`.

An attempt whose reward is None broke in infrastructure: it gets no advantage and changes no statistic of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from etude.core.types import Group, Row, Trajectory, unspan

Credit = Callable[[Sequence[float]], list[float]]


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


def praise(rewards: Sequence[float]) -> list[float]:
    """`centered`, but an attempt below the mean is passed over. What went well says what to do; what went badly only
    says what not to do, and a small policy that is pushed away from what it said drifts to where nobody has looked."""
    return [max(0.0, advantage) for advantage in centered(rewards)]


def equally(rewards: Sequence[float]) -> list[float]:
    """For `distill`, where a teacher says what each token was worth: every attempt is learnt from, whatever came of
    it."""
    return [1.0] * len(rewards)


CREDIT: dict[str, Credit] = {"centered": centered, "leave_one_out": leave_one_out, "praise": praise}


def usable(trajectory: Trajectory) -> bool:
    """It has a score, and something that the policy said."""
    return trajectory.reward is not None and trajectory.num_sampled > 0


def advantages(group: Group, credit: Credit) -> dict[str, float]:
    """Trajectory id -> advantage, for the attempts that teach something; none do where all rewards are equal."""
    attempts = [t for t in group.trajectories if usable(t)]
    rewards = [t.reward for t in attempts if t.reward is not None]
    if len(set(rewards)) < 2 and credit is not equally:
        return {}
    credited = zip(attempts, credit(rewards), strict=True)
    return {attempt.id: advantage for attempt, advantage in credited if advantage != 0.0}


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
            experts=segment.experts,
        )
        for segment in trajectory.segments
    ]


def oldest_version(rows: Sequence[Row]) -> int:
    return min(chain.from_iterable(unspan(row.versions) for row in rows))
