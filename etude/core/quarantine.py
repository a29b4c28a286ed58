"""Quarantine of regions whose engines compute something different from the others. Pure: the
trainer's measurements are passed in.

The trainer recomputes every token, so it knows the distance of each region from itself (k3). The
weights learnt since a token was sampled move all regions alike; a region that is far from the
trainer while the others are near has another kernel, another precision or a fault. Its tokens are
useless, and it gets no more requests.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median, median_low

from etude.core.events import MismatchMeasured

STEPS, MIN_STEPS = 8, 3
"""The number of last steps that count, and of those in which a region must have been measured."""
MIN_TOKENS = 50
"""Tokens of a region in a step that make a measurement."""
MIN_K3 = 1e-3
"""The k3 below which a region is healthy, however near the others are: bf16 alone causes about
1e-4."""
SMALLEST, LARGEST = 1e-12, 1e12
"""Bounds on k3: in batch-invariant mode it is 0, and for an engine that computes only NaN it is not
finite."""


class RegionDrift:
    """The regions of a run by their distance from the trainer, and those in quarantine."""

    def __init__(self, factor: float) -> None:
        """`factor`: the ratio of a region's k3 to that of the others above which it is quarantined;
        0: no limit."""
        self._factor = factor
        self._steps: deque[MismatchMeasured] = deque(maxlen=STEPS)
        self.quarantined: dict[str, float] = {}
        """Region -> the ratio of its k3 to that of the others."""

    def add(self, measured: MismatchMeasured) -> str | None:
        """Add a measurement, and return the region that must get no more requests from now on, or
        None. One at a time, the farthest first, and never the last one."""
        self._steps.append(measured)
        k3 = {
            region: value for region, value in self._k3().items() if region not in self.quarantined
        }
        if not self._factor or len(k3) < 2:
            return None
        worst = max(k3, key=lambda region: k3[region])
        usual = median(value for region, value in k3.items() if region != worst)
        if k3[worst] < MIN_K3 or k3[worst] <= self._factor * usual:
            return None
        self.quarantined[worst] = k3[worst] / max(usual, SMALLEST)
        return worst

    def _k3(self) -> dict[str, float]:
        """The k3 of each region that was measured often enough: the lower median over its steps,
        since a single token can dominate the mean of one step."""
        found: dict[str, list[float]] = {}
        for measured in self._steps:
            for region, stats in measured.by_region.items():
                if stats.num_tokens >= MIN_TOKENS:
                    k3 = stats.k3 if math.isfinite(stats.k3) else LARGEST
                    found.setdefault(region, []).append(min(k3, LARGEST))
        return {region: median_low(k3) for region, k3 in found.items() if len(k3) >= MIN_STEPS}
