"""The curriculum: which task the next group is given, by what is known of its difficulty.

A group teaches something only if its attempts differ: tasks that the policy always solves, or never
does, are dropped for lack of signal. So a share of the groups (`fresh_frac`) goes to tasks in turn,
each once before any twice, families first whose groups tend to differ; the others go back to tasks
whose last group differed. What is solved by now, or cannot be solved yet, waits for its next turn.

Every version of the weights has an order of its own. It follows from the seed and from groups that
were admitted more than `max_lag` versions before: the window sees to it that all of these are
settled. So it does not depend on which session was quicker, and a run that was stopped takes it up
where it was.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random

from etude.core.seeds import derive

PROMISING = 0.5
"""A task is asked again before its turn if its group differs with at least this chance."""
LEARNT = 3.0
"""What the odds of solving a task are multiplied by once its group was trained on, as on the demo:
of eight attempts, one becomes three, and seven become all."""
HALF_LIFE = 16
"""Versions after which what was seen of a task counts half: the policy has changed."""
FAMILY_MEMORY = 32
"""Groups of a family that its chance follows from, the newest."""
PRIOR_GROUPS = 2.0
"""What is known of all families counts as so many groups of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTask:
    """A group that came to an end, as far as the curriculum cares."""

    task: str
    epoch: int
    """How often the task had been asked before."""
    version: int
    """Live when the group was admitted."""
    rewards: tuple[float, ...]
    """Of the attempts that count."""
    kept: bool
    """Whether there was anything to learn from it."""

    @property
    def chance(self) -> float:
        """That the next group of the task differs: each attempt is taken to come out nearer to the
        best or to the worst of the group as often as they did here, or more often, if the policy
        has learnt from this one."""
        if not self.kept:
            hits = 0
        elif (best := max(self.rewards)) == (worst := min(self.rewards)):
            return 1.0  # something else than the reward made the difference
        else:
            hits = sum(reward > (best + worst) / 2 for reward in self.rewards)
        size = len(self.rewards)
        rate = (hits + 0.5) / (size + 1)
        if self.kept:
            rate = LEARNT * rate / (1.0 + (LEARNT - 1.0) * rate)
        return 1.0 - rate**size - (1.0 - rate) ** size


class Curriculum:
    """Chooses tasks, and learns what came of them. Pure: the loop says when."""

    def __init__(
        self,
        families: Mapping[str, str],
        *,
        seed: int,
        fresh_frac: float,
        max_lag: int,
        past: Iterable[AskedTask] = (),
    ) -> None:
        """`families`: task -> the family that it is of. `past`: the groups that came to an end
        before, if the run is resumed."""
        self._families = dict(families)
        self._seed = seed
        self._fresh_frac = fresh_frac
        self._max_lag = max_lag
        self._asked: list[AskedTask] = list(past)
        self._chosen: dict[tuple[str, int], int] = {
            (asked.task, asked.epoch): asked.version for asked in self._asked
        }
        self._version: int | None = None
        self._order: Iterator[tuple[str, int]] = iter(())

    def choose(self, version: int) -> tuple[str, int]:
        """The task of the next group, and how often it was asked before. `version` is live."""
        if version != self._version:
            self._version, self._order = version, self.order(version)
        choice = next(each for each in self._order if each not in self._chosen)
        self._chosen[choice] = version
        return choice

    def learn(self, asked: AskedTask) -> None:
        self._asked.append(asked)

    def order(self, version: int) -> Iterator[tuple[str, int]]:
        """Tasks in the order of this version, without end, each with the number of times that it
        was asked before. The same may come twice."""
        asked = Counter(task for (task, _), chosen in self._chosen.items() if chosen < version)
        families = self._family_chances(version)
        rng = Random(derive(self._seed, "again", version))
        again = [(task, asked[task]) for task in weighted_shuffle(self._again(version), rng)]
        in_turn = self._in_turn(asked, families)
        for choice in again:
            while rng.random() < self._fresh_frac:
                yield next(in_turn)
            yield choice
        yield from in_turn

    def _in_turn(
        self, asked: Counter[str], families: Mapping[str, float]
    ) -> Iterator[tuple[str, int]]:
        """All tasks, then all again, and so on, without those that had the turn before."""
        weights = {task: families[family] for task, family in self._families.items()}
        for epoch in count(min(asked[task] for task in self._families)):
            rng = Random(derive(self._seed, "order", epoch))
            for task in weighted_shuffle(weights, rng):
                if asked[task] <= epoch:
                    yield task, epoch

    def _again(self, version: int) -> dict[str, float]:
        """The tasks that may be asked before their turn, with the chance that they differ. What is
        asked at this moment is not among them."""
        if self._fresh_frac == 1.0:
            return {}
        families = self._family_chances(version)
        under_way = {
            task
            for (task, _), chosen in self._chosen.items()
            if version - self._max_lag <= chosen < version
        }
        last = {asked.task: asked for asked in self._known(version)}
        chances: dict[str, float] = {}
        for task, asked in last.items():
            if asked.kept and task not in under_way:
                weight = 0.5 ** ((version - asked.version) / HALF_LIFE)
                family = families[self._families[task]]
                chances[task] = weight * asked.chance + (1.0 - weight) * family
        return {task: chance for task, chance in chances.items() if chance >= PROMISING}

    def _known(self, version: int) -> list[AskedTask]:
        """The groups that are settled for certain."""
        return [
            asked
            for asked in settled_before(self._asked, version - self._max_lag)
            if len(asked.rewards) > 1 and asked.task in self._families
        ]

    def _family_chances(self, version: int) -> dict[str, float]:
        """Of each family, the chance that a group of a task of it differs."""
        if self._fresh_frac == 1.0:
            return dict.fromkeys(self._families.values(), 1.0)
        differed: dict[str, deque[bool]] = {
            family: deque(maxlen=FAMILY_MEMORY) for family in self._families.values()
        }
        for asked in self._known(version):
            differed[self._families[asked.task]].append(asked.kept)
        recent = [each for groups in differed.values() for each in groups]
        overall = (sum(recent) + 1.0) / (len(recent) + 2.0)
        return {
            family: (sum(groups) + PRIOR_GROUPS * overall) / (len(groups) + PRIOR_GROUPS)
            for family, groups in differed.items()
        }


def settled_before(groups: Iterable[AskedTask], version: int) -> list[AskedTask]:
    """The groups that were admitted before this version, in an order that does not depend on which
    was done first."""
    settled = [asked for asked in groups if asked.version < version]
    return sorted(settled, key=lambda asked: (asked.version, asked.epoch, asked.task))


def weighted_shuffle(weights: Mapping[str, float], rng: Random) -> list[str]:
    """All keys, each as if drawn from those that are left by the square of its weight (Efraimidis
    and Spirakis)."""
    keys = {
        name: rng.random() ** (1.0 / max(weight, 1e-3) ** 2) for name, weight in weights.items()
    }
    return sorted(keys, key=lambda name: (-keys[name], name))
