"""The learning rate of a step, as a function of plain values. Steps count from 0."""

from __future__ import annotations

import math
from collections.abc import Callable

DECAY: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
"""The decay schedules: share of the peak rate when a share `done` of the steps after the warm-up is
done."""


def learning_rate(step: int, *, lr: float, warmup: int, total: int, decay: str) -> float:
    """The learning rate of a step: linear warm-up over `warmup` steps, never 0, then `decay` until
    step `total`."""
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    return lr * DECAY[decay](min(1.0, (step - warmup) / max(1, total - warmup)))
