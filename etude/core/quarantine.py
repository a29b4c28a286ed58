"""Quarantine: which region's engines compute something else than the others'. Pure: the trainer's
measurements are handed in.

The trainer computes every token again, so it knows how far each region is from it (k3). What was
learnt since a token was sampled moves all of them alike; a region that is far from the trainer
while the others are near has another kernel, another precision or a fault. Its tokens are of no
use, and it is sent no more requests.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median, median_low

from etude.core.events import MismatchMeasured

STEPS, MIN_STEPS = 8, 3
"""The last steps that count, and in how many of those a region must have been measured."""
MIN_TOKENS = 50
"""Of a region in a step, for that to be a measurement."""
MIN_K3 = 1e-3
"""Below it a region is well, however near the others are: bf16 alone makes some 1e-4."""
SMALLEST, LARGEST = 1e-12, 1e12
"""In batch-invariant mode k3 is 0; of an engine that computes nothing but NaN it is none."""


class RegionDrift:
    """The regions of a run by their distance from the trainer, and those in quarantine."""

    def __init__(self, factor: float) -> None:
        """`factor`: how many times the k3 of the others a region's may be; 0: any."""
        self._factor = factor
        self._steps: deque[MismatchMeasured] = deque(maxlen=STEPS)
        self.quarantined: dict[str, float] = {}
        """Region -> how many times the others' its k3 was."""

    def add(self, measured: MismatchMeasured) -> str | None:
        """The region that is to be sent no more requests from now on, if there is one. One at a
        time, the farthest first, and never the last."""
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
        """Of each region that was measured often enough: the lower median of its steps, since a
        single token can make the mean of one."""
        found: dict[str, list[float]] = {}
        for measured in self._steps:
            for region, stats in measured.by_region.items():
                if stats.num_tokens >= MIN_TOKENS:
                    k3 = stats.k3 if math.isfinite(stats.k3) else LARGEST
                    found.setdefault(region, []).append(min(k3, LARGEST))
        return {region: median_low(k3) for region, k3 in found.items() if len(k3) >= MIN_STEPS}
