"""Lending: how much of the workers in front of users RL may have now. Pure: clocks and measurements
are handed in.

    same model       RL takes the slots that users leave idle, by priority; how many it may have at
                     most on a worker is decided by the users' time to first token (`SlotPolicy`)
    another model    a worker is drained, loads the weights of RL whole, and comes back
                     (`LoanPolicy`)

Both keep to the hours of the schedule. Whatever is unclear is decided for the users.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

DAY_S = 86_400.0
LATE_SHARE = 0.01
"""Of the users' requests beside RL, so many may get their first token later than promised."""
REMEMBERED = 200
"""Requests that the share is taken of."""
STEPS_BACK = 8
"""After so many decisions without a late request RL has all slots again."""


def lendable_s(hours: Sequence[str], now: float) -> float:
    """How long lending is allowed from now on; 0 if it is not. `now`: since 1970."""
    if not hours:
        return math.inf
    at, left = now % DAY_S, 0.0
    for begin, end in (map(_seconds, span.split("-")) for span in hours):
        length = (end - begin) % DAY_S or DAY_S
        since = (at - begin) % DAY_S
        left = max(left, length - since)
    return left


def _seconds(time: str) -> float:
    hour, minute = time.split(":")
    return 3600.0 * int(hour) + 60.0 * int(minute)


class SlotPolicy:
    """How many slots of one worker RL may have, of those that users leave. Halved when users wait
    too long beside it, and given back step by step."""

    def __init__(self, *, slots: int, max_ttft_s: float, hours: Sequence[str] = ()) -> None:
        self._slots = slots
        self._max_ttft_s = max_ttft_s
        self._hours = hours
        self._allowed = slots
        self._late: deque[bool] = deque(maxlen=REMEMBERED)
        self._is_new = False

    def first_token(self, seconds: float, *, since_rl_s: float) -> None:
        """A user has waited so long. `since_rl_s`: how long before they came RL last had a slot; 0
        if it had one then. What they wait for without RL is not for RL to mend, but those who came
        beside it hold their places for longer, and others may wait behind them."""
        if since_rl_s <= self._max_ttft_s:
            late = seconds > self._max_ttft_s
            self._late.append(late)
            self._is_new |= late

    def is_open(self, now: float) -> bool:
        return lendable_s(self._hours, now) > 0

    def decide(self, now: float) -> int:
        """To be asked about once a second."""
        if self._is_new and sum(self._late) > LATE_SHARE * len(self._late):
            self._allowed //= 2
            self._late.clear()
        elif not self._is_new:
            step = math.ceil(self._slots / STEPS_BACK)
            self._allowed = min(self._slots, self._allowed + step)
        self._is_new = False
        return self._allowed if self.is_open(now) else 0


class FirstTokens:
    """How long the users of the last minute waited for their first tokens."""

    def __init__(self) -> None:
        self._waits: deque[tuple[float, float]] = deque(maxlen=10_000)

    def add(self, now: float, asked: float) -> None:
        self._waits.append((now, now - asked))

    def p99(self, now: float) -> float | None:
        """None if there was no request."""
        recent = sorted(wait for at, wait in self._waits if now - at < 60.0)
        return recent[math.ceil(0.99 * len(recent)) - 1] if recent else None


@dataclass(frozen=True, slots=True)
class UsersLoad:
    """What users ask of the workers that serve them now."""

    workers: int
    active: int
    """Requests under way."""
    ttft_p99_s: float | None = None
    """Of the last minute; None if there was no request."""


class LoanPolicy:
    """Whether one worker is with the users or lent to RL."""

    def __init__(
        self,
        *,
        slots: int,
        keep: int,
        max_load: float,
        max_ttft_s: float,
        calm_s: float,
        return_s: float,
        hours: Sequence[str] = (),
    ) -> None:
        self._slots = slots
        self._keep = keep
        self._max_load = max_load
        self._max_ttft_s = max_ttft_s
        self._calm_s = calm_s
        self._return_s = return_s
        self._hours = hours
        self._calm_since: float | None = None

    def returned(self, seconds: float) -> None:
        """A return has taken so long, without the time in which nobody could tell: a gateway that
        was away for hours would end all lending."""
        self._return_s = max(self._return_s, seconds)

    def lends(self, now: float, users: UsersLoad) -> bool:
        """For a worker that serves users: whether it is to go now."""
        others = users.workers - 1
        calm = (
            lendable_s(self._hours, now) > 2 * self._return_s + self._calm_s
            and others >= self._keep
            and users.active <= self._max_load / 2 * self._slots * others
            and not self._is_slow(users)
        )
        if not calm:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        return self._calm_since is not None and now - self._calm_since >= self._calm_s

    def recalls(self, now: float, users: UsersLoad | None) -> bool:
        """For a worker that is lent: whether it is to come back now. `users`: None if nobody knows
        how they fare."""
        self._calm_since = None
        return (
            users is None
            or lendable_s(self._hours, now) <= self._return_s
            or users.workers < self._keep
            or users.active > self._max_load * self._slots * users.workers
            or self._is_slow(users)
        )

    def _is_slow(self, users: UsersLoad) -> bool:
        return users.ttft_p99_s is not None and users.ttft_p99_s > self._max_ttft_s
