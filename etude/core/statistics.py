"""Statistics of evaluations: intervals, pass@k, and comparisons of two versions.

Tasks are the independent samples. Several attempts at one task are not as many additional tasks:
they narrow an interval only as far as they agree less with each other than with the rest.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Z95 = 1.959964
"""Standard errors on each side of a 95 % interval."""


def wilson(solved: float, total: float, z: float = Z95) -> tuple[float, float]:
    """A 95 % interval for a share. Unlike the textbook interval it is valid near 0 and 1, and for
    few trials."""
    share, spread = solved / total, z * z / total
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def clustered_wilson(solved: Sequence[int], attempts: int) -> tuple[float, float]:
    """Wilson's interval for `attempts` at each task; `solved` counts the successes of each.

    The effective number of trials is the one at which independent trials would vary as much as
    these tasks do: between the number of tasks (all attempts at a task end alike) and the number of
    attempts.
    """
    tasks = len(solved)
    total = len(solved) * attempts
    share = sum(solved) / total
    spread = sum((count / attempts - share) ** 2 for count in solved) / max(1, tasks - 1) / tasks
    alike = share * (1 - share) / spread if spread else total
    tries = min(max(alike, tasks), total)
    return wilson(share * tries, tries)


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """An unbiased estimate of the chance that at least one of k attempts solves a task, from more
    attempts than k (Chen et al., 2021)."""
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} attempts at a task, not {attempts}")
    return 1 - math.comb(attempts - solved, k) / math.comb(attempts, k)


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Two versions on the same tasks: the difference of their solve rates, and its uncertainty."""

    num_tasks: int
    before: float
    after: float
    low: float
    high: float
    """95 % interval of the difference `after - before`, over tasks."""
    p_value: float
    """Chance of a difference at least this large, in either direction, if the two versions were
    equal."""
    gained: int
    lost: int
    """Tasks that were solved more often, and less often."""

    @property
    def difference(self) -> float:
        return self.after - self.before


def compare_paired(
    before: Mapping[str, int], after: Mapping[str, int], attempts: int
) -> PairedComparison:
    """Compare the numbers of successes at each task, in `attempts` attempts by either version. Both
    must have tried the same tasks."""
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
    """The p-value of the exact two-sided sign-flip test: among all ways to swap the two versions
    task by task, the share with at least as large a difference. With one attempt per task it is
    McNemar's exact test."""
    ways = {0: 1}
    for size, count in Counter(map(abs, filter(None, gains))).items():
        # Count tasks of one size: their sum, by the number of them that favour the second version.
        sums = {size * (2 * up - count): math.comb(count, up) for up in range(count + 1)}
        flipped: dict[int, int] = defaultdict(int)
        for total, number in ways.items():
            for change, more in sums.items():
                flipped[total + change] += number * more
        ways = flipped
    seen = abs(sum(gains))
    extreme = sum(number for total, number in ways.items() if abs(total) >= seen)
    return extreme / sum(ways.values())
