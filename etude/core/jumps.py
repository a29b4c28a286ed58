"""Sudden jumps of the reward: what a policy earns at a task, or a family of tasks, that it hardly
ever solved before.

Learning is gradual, and a hole in a grader is found at once: a jump is worth a look. It is no
proof, since a skill can click, so it is flagged, and set aside only if the run says so.

A group is held against groups that were admitted more than `max_lag` versions before it, as in
`core.curriculum`: what is found does not depend on which session was quicker.
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
"""Of reward, between what was earned before and what is earned now."""
DEVIATIONS = 4.0
STEADY = 0.18
"""Means that vary less count as varying so much: as those of eight attempts do by chance."""
MEMORY = 64
"""Groups that the present is held against, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """`now` stands apart from what the groups before it earned."""

    before: float
    now: float
    num_before: int

    def __str__(self) -> str:
        return f"{self.now:.2f} on average, after {self.before:.2f} in {self.num_before} groups"


def find_jump(means: Sequence[float], *, recent: int, at_least: int) -> Jump | None:
    """Whether the last `recent` of a series of mean rewards stand apart from those before, of which
    there must be `at_least` so many: by half a point of reward, and by four of the deviations that
    a mean of so many has."""
    before, now = means[:-recent], means[-recent:]
    if len(before) < at_least or len(now) < recent:
        return None
    deviation = max(pstdev(before), STEADY) / len(now) ** 0.5
    rise = fmean(now) - fmean(before)
    if rise < max(LEAST, DEVIATIONS * deviation):
        return None
    return Jump(before=fmean(before), now=fmean(now), num_before=len(before))


class RewardJumps:
    """Looks at the series of rewards of each task and family. Pure."""

    def __init__(
        self, families: Mapping[str, str], *, max_lag: int, past: Iterable[AskedTask] = ()
    ) -> None:
        self._families = dict(families)
        self._max_lag = max_lag
        self._asked = list(past)
        self._version: int | None = None
        self._series: dict[tuple[str, str], list[float]] = {}

    def look(self, asked: AskedTask) -> str | None:
        """What is odd about a group that came to its end, if anything is."""
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
        """The same group as it was settled: what was set aside is in no series."""
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
    """The group with a flag, and the evidence, at each attempt that earned something."""
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
