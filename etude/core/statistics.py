"""What an evaluation may claim: intervals, pass@k, and whether one version beats another.

Tasks are the unit of chance. Several attempts at one task are not so many tasks more, so they
narrow an interval only as far as they agree less with each other than with the rest.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Z95 = 1.959964
"""Standard errors on each side of a 95 % interval."""


def wilson(solved: float, total: float, z: float = Z95) -> tuple[float, float]:
    """A 95 % interval for a share; unlike the textbook one it holds near 0 and 1, and for few
    tries."""
    share, spread = solved / total, z * z / total
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def clustered_wilson(solved: Sequence[int], attempts: int) -> tuple[float, float]:
    """Wilson's interval for `attempts` at each task, of which `solved` succeeded.

    The number of tries that counts is the one at which independent tries would vary as much as
    these tasks do: between the number of tasks (all attempts at a task end alike) and the number
    of attempts.
    """
    tasks = len(solved)
    total = len(solved) * attempts
    share = sum(solved) / total
    spread = sum((count / attempts - share) ** 2 for count in solved) / max(1, tasks - 1) / tasks
    alike = share * (1 - share) / spread if spread else total
    tries = min(max(alike, tasks), total)
    return wilson(share * tries, tries)


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """The chance that at least one of k attempts solves a task, without bias, from more attempts
    than k (Chen et al., 2021)."""
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} attempts at a task, not {attempts}")
    return 1 - math.comb(attempts - solved, k) / math.comb(attempts, k)


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Two versions on the same tasks: how much more the second solves, and how sure that is."""

    num_tasks: int
    before: float
    after: float
    low: float
    high: float
    """95 % interval of the difference `after - before`, over tasks."""
    p_value: float
    """Chance of a difference at least this large, either way, if no task could tell the two
    apart."""
    gained: int
    lost: int
    """Tasks solved more often, and less often."""

    @property
    def difference(self) -> float:
        return self.after - self.before


def compare_paired(
    before: Mapping[str, int], after: Mapping[str, int], attempts: int
) -> PairedComparison:
    """Compare how often each task was solved in `attempts` attempts by either version. Both must
    have tried the same tasks."""
    if before.keys() != after.keys() or not before:
        raise ValueError("a paired comparison needs the same tasks on both sides, at least one")
    gains = [after[task] - before[task] for task in before]
    count = len(gains)
    mean = sum(gains) / count
    variance = sum((gain - mean) ** 2 for gain in gains) / max(1, count - 1)
    half = Z95 * math.sqrt(variance / count)
    return PairedComparison(
        num_tasks=count,
        before=sum(before.values()) / count / attempts,
        after=sum(after.values()) / count / attempts,
        low=max(-1.0, (mean - half) / attempts),
        high=min(1.0, (mean + half) / attempts),
        p_value=sign_flip_p(gains),
        gained=sum(gain > 0 for gain in gains),
        lost=sum(gain < 0 for gain in gains),
    )


def sign_flip_p(gains: Sequence[int]) -> float:
    """The exact two-sided sign-flip test: of all ways to swap the two versions task by task, the
    share that differs at least as much. With one attempt a task it is McNemar's exact test."""
    ways = {0: 1}
    for size, count in Counter(map(abs, filter(None, gains))).items():
        # So many tasks of one size: their sum by how many of them count for the second version.
        sums = {size * (2 * up - count): math.comb(count, up) for up in range(count + 1)}
        flipped: dict[int, int] = defaultdict(int)
        for total, number in ways.items():
            for change, more in sums.items():
                flipped[total + change] += number * more
        ways = flipped
    seen = abs(sum(gains))
    extreme = sum(number for total, number in ways.items() if abs(total) >= seen)
    return extreme / sum(ways.values())
