"""Sudden jumps of the reward: high rewards at a task, or a family of tasks, that the policy hardly
ever solved before.

Learning is gradual, while a hole in a grader is exploited all at once: a jump is worth a look. It
is not proof, since a skill can click, so it is flagged, and set aside only if the run asks for it.

A group is compared with groups that were admitted more than `max_lag` versions before it, as in
`core.curriculum`: the result does not depend on which session was faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from etude.core.advantage import CHEAT
from etude.core.curriculum import AskedTask, settled_before
from etude.core.types import Group, Part

REWARD_JUMP = "reward_jump"
LEAST = 0.5
"""Least difference of the reward before and after a jump."""
DEVIATIONS = 4.0
STEADY = 0.18
"""Lower bound on the deviation of means: that of eight attempts by chance alone."""
MEMORY = 64
"""Newest groups that a group is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A jump: `now` stands apart from the rewards of the groups before."""

    before: float
    now: float
    num_before: int

    def __str__(self) -> str:
        return f"{self.now:.2f} on average, up from {self.before:.2f} in {self.num_before} groups"


def find_jump(means: Sequence[float], *, recent: int, at_least: int) -> Jump | None:
    """The jump between the last `recent` of a series of mean rewards and the earlier ones, which
    must be `at_least` many; None if there is none. A jump is at least half a point of reward, and
    four standard deviations of such a mean."""
    before, now = means[:-recent], means[-recent:]
    if len(before) < at_least or len(now) < recent:
        return None
    deviation = max(pstdev(before), STEADY) / len(now) ** 0.5
    rise = fmean(now) - fmean(before)
    if rise < max(LEAST, DEVIATIONS * deviation):
        return None
    return Jump(before=fmean(before), now=fmean(now), num_before=len(before))


class RewardJumps:
    """Watches the series of rewards of each task and family. Pure."""

    def __init__(
        self, families: Mapping[str, str], *, max_lag: int, past: Iterable[AskedTask] = ()
    ) -> None:
        self._families = dict(families)
        self._max_lag = max_lag
        self._asked = list(past)
        self._version: int | None = None
        self._series: dict[tuple[str, str], list[float]] = {}

    def look(self, asked: AskedTask) -> str | None:
        """Describe the jump that a finished group shows; None if there is none."""
        self._read_until(asked.version)
        if not asked.rewards:
            return None
        now = fmean(asked.rewards)
        family = self._families[asked.task]
        of_task = self._series.get(("task", asked.task), [])[-MEMORY:]
        if jump := find_jump([*of_task, now], recent=1, at_least=3):
            return f"task {asked.task} earns {jump}"
        of_family = self._series.get(("family", family), [])[-MEMORY:]
        jump = find_jump(of_family, recent=4, at_least=12)
        if jump and now >= jump.before + LEAST:
            return f"family {family or '(all tasks)'} earns {jump}"
        return None

    def learn(self, asked: AskedTask) -> None:
        """Add the same group in its settled form: rewards that were set aside enter no series."""
        self._asked.append(asked)

    def _read_until(self, version: int) -> None:
        if version == self._version:
            return
        self._version = version
        series: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for asked in settled_before(self._asked, version - self._max_lag):
            if asked.rewards and asked.task in self._families:
                series["task", asked.task].append(fmean(asked.rewards))
                series["family", self._families[asked.task]].append(fmean(asked.rewards))
        self._series = dict(series)


def flag_jump(group: Group, why: str, *, quarantine: bool) -> Group:
    """The group with a flag and the evidence at each attempt that earned something."""
    name = CHEAT + REWARD_JUMP if quarantine else REWARD_JUMP
    return replace(
        group,
        trajectories=tuple(
            replace(
                t,
                score=replace(
                    t.score,
                    flags=(*t.score.flags, name),
                    parts=(*t.score.parts, Part(REWARD_JUMP, 1.0, why)),
                ),
            )
            if t.score is not None and t.score.reward > 0.0
            else t
            for t in group.trajectories
        ),
    )
