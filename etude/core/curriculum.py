"""The curriculum: the choice of the task for the next group, by what is known of its difficulty.

A group teaches something only if its attempts differ: the groups of tasks that the policy always
solves, or never does, are dropped for lack of signal. So a share of the groups (`fresh_frac`) goes
to tasks in turn, each once before any is repeated, starting with families whose groups tend to
differ. The other groups return to tasks whose last group differed. A task that is solved by now, or
cannot be solved yet, waits for its next turn.

Every version of the weights has its own order of tasks. It follows from the seed and from groups
that were admitted more than `max_lag` versions earlier, all of which the window guarantees to be
settled. So it does not depend on which session was faster, and a run that was stopped resumes in
the same order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random

from etude.core.seeds import derive

PROMISING = 0.5
"""A task is chosen before its turn if its group differs with at least this chance."""
LEARNT = 3.0
"""Factor on the odds of solving a task after its group was trained on, as measured on the demo: of
eight attempts, one success becomes three, and seven become eight."""
HALF_LIFE = 16
"""Versions after which an observation of a task counts half, because the policy has changed."""
FAMILY_MEMORY = 32
"""The number of newest groups of a family that determine its chance."""
PRIOR_GROUPS = 2.0
"""The mean over all families enters the chance of each family with the weight of this many
groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTask:
    """A finished group, reduced to what the curriculum needs."""

    task: str
    epoch: int
    """The number of times that the task had been chosen before."""
    version: int
    """The version that was live when the group was admitted."""
    rewards: tuple[float, ...]
    """The rewards of the attempts that count."""
    kept: bool
    """True if there was anything to learn from the group."""

    @property
    def chance(self) -> float:
        """The chance that the next group of the task differs. Each attempt is assumed to end closer
        to the best or to the worst reward of the group as often as the attempts did here, or closer
        to the best more often, if the policy has learnt from this group."""
        if not self.kept:
            hits = 0
        elif (best := max(self.rewards)) == (worst := min(self.rewards)):
            return 1.0  # a difference other than in the reward
        else:
            hits = sum(reward > (best + worst) / 2 for reward in self.rewards)
        size = len(self.rewards)
        rate = (hits + 0.5) / (size + 1)
        if self.kept:
            rate = LEARNT * rate / (1.0 + (LEARNT - 1.0) * rate)
        return 1.0 - rate**size - (1.0 - rate) ** size


class Curriculum:
    """Chooses tasks, and learns from their outcomes. Pure: the loop decides when."""

    def __init__(
        self,
        families: Mapping[str, str],
        *,
        seed: int,
        fresh_frac: float,
        max_lag: int,
        past: Iterable[AskedTask] = (),
    ) -> None:
        """`families`: task -> its family. `past`: the groups that finished before, if the run is
        resumed."""
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
        """The task of the next group, and the number of times that it was chosen before. `version`
        is the live one."""
        if version != self._version:
            self._version, self._order = version, self.order(version)
        choice = next(each for each in self._order if each not in self._chosen)
        self._chosen[choice] = version
        return choice

    def learn(self, asked: AskedTask) -> None:
        self._asked.append(asked)

    def order(self, version: int) -> Iterator[tuple[str, int]]:
        """An endless sequence of tasks in the order of this version, each with the number of times
        that it was chosen before. It may contain repetitions."""
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
        """All tasks, then all again, and so on, without those that had this turn already."""
        weights = {task: families[family] for task, family in self._families.items()}
        for epoch in count(min(asked[task] for task in self._families)):
            rng = Random(derive(self._seed, "order", epoch))
            for task in weighted_shuffle(weights, rng):
                if asked[task] <= epoch:
                    yield task, epoch

    def _again(self, version: int) -> dict[str, float]:
        """The tasks that may be chosen before their turn, with the chance that they differ. Tasks
        with a group in progress are excluded."""
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
        """The groups that are certainly settled."""
        return [
            asked
            for asked in settled_before(self._asked, version - self._max_lag)
            if len(asked.rewards) > 1 and asked.task in self._families
        ]

    def _family_chances(self, version: int) -> dict[str, float]:
        """The chance, by family, that a group of one of its tasks differs."""
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
    finished first."""
    settled = [asked for asked in groups if asked.version < version]
    return sorted(settled, key=lambda asked: (asked.version, asked.epoch, asked.task))


def weighted_shuffle(weights: Mapping[str, float], rng: Random) -> list[str]:
    """All keys in random order, each as if drawn from the remaining ones with a probability
    proportional to the square of its weight (Efraimidis and Spirakis)."""
    keys = {
        name: rng.random() ** (1.0 / max(weight, 1e-3) ** 2) for name, weight in weights.items()
    }
    return sorted(keys, key=lambda name: (-keys[name], name))
