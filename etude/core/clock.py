"""Time as an argument. What decides by time takes a clock, so a test can say what time it is."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""


class SystemClock:
    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """The shipped fake: it stands until it is moved."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def move(self, seconds: float) -> None:
        self._now += seconds
