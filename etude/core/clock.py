"""Time as an argument. Code whose decisions depend on time takes a clock, so that a test can set
it."""

from __future__ import annotations

import math
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""


class SystemClock:
    def now(self) -> float:
        return time.monotonic()


class AwakeClock:
    """A clock that stands still while its process does: a process that was stopped, or whose
    machine slept, must not blame others for the time that passed. It must be read at least once in
    `blink_s`; a longer gap between two reads counts as such a pause. A small part of the pause
    still counts, so that even an extremely slow process makes progress."""

    def __init__(self, clock: Clock, blink_s: float = 2.0) -> None:
        self._clock = clock
        self._blink_s = blink_s
        self._seen = clock.now()
        self._lost_s = 0.0
        self._woke = -math.inf

    def now(self) -> float:
        seen = self._clock.now()
        if seen - self._seen > self._blink_s:
            self._lost_s += seen - self._seen - self._blink_s / 4
            self._woke = seen - self._lost_s
        self._seen = seen
        return seen - self._lost_s

    def slept_since(self, then: float) -> bool:
        """True if there was a pause after that time of this clock."""
        return self.now() > then and self._woke > then


class ManualClock:
    """The shipped fake: it stands still until it is moved."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def move(self, seconds: float) -> None:
        self._now += seconds
