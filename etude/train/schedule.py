"""The learning rate of a step, as a function of plain values. Steps count from 0."""

from __future__ import annotations

import math
from collections.abc import Callable

DECAY: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
"""Share of the rate that is left when `done` of the way after the warm-up is gone."""


def learning_rate(step: int, *, lr: float, warmup: int, total: int, decay: str) -> float:
    """Rises in a line over the first `warmup` steps, none of them 0, then falls as `decay` says
    until step `total`."""
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    return lr * DECAY[decay](min(1.0, (step - warmup) / max(1, total - warmup)))
