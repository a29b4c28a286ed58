"""Lending: the capacity of the workers in front of users that RL may use now. Pure: clocks and
measurements are passed in.

    same model       RL takes the slots that users leave idle, by priority; the users' time to first
                     token limits their number on each worker (`SlotPolicy`)
    another model    a worker is drained, loads the weights of RL whole, and comes back
                     (`LoanPolicy`)

Both respect the hours of the schedule. In case of doubt the decision favours the users.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

DAY_S = 86_400.0
LATE_SHARE = 0.01
"""Share of the users' requests next to RL that may get their first token later than promised."""
REMEMBERED = 200
"""Requests that this share is computed over."""
STEPS_BACK = 8
"""Decisions without a late request after which RL has all slots again."""


def lendable_s(hours: Sequence[str], now: float) -> float:
    """The time for which lending is allowed from now on; 0 if it is not allowed. `now`: seconds
    since 1970."""
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
    """The number of slots of one worker that RL may use, of those that users leave idle. Halved
    when users wait too long next to RL, and then raised again step by step."""

    def __init__(self, *, slots: int, max_ttft_s: float, hours: Sequence[str] = ()) -> None:
        self._slots = slots
        self._max_ttft_s = max_ttft_s
        self._hours = hours
        self._allowed = slots
        self._late: deque[bool] = deque(maxlen=REMEMBERED)
        self._is_new = False

    def first_token(self, seconds: float, *, since_rl_s: float) -> None:
        """Record the wait of a user for the first token. `since_rl_s`: the time between the last
        slot of RL and the user's request; 0 if RL had a slot then. A wait without RL cannot be
        fixed by taking slots from RL. But users who arrived next to RL hold their places for
        longer, and others may have to wait for them."""
        if since_rl_s <= self._max_ttft_s:
            late = seconds > self._max_ttft_s
            self._late.append(late)
            self._is_new |= late

    def is_open(self, now: float) -> bool:
        return lendable_s(self._hours, now) > 0

    def decide(self, now: float) -> int:
        """Return the number of slots for RL. Call this about once a second."""
        if self._is_new and sum(self._late) > LATE_SHARE * len(self._late):
            self._allowed //= 2
            self._late.clear()
        elif not self._is_new:
            step = math.ceil(self._slots / STEPS_BACK)
            self._allowed = min(self._slots, self._allowed + step)
        self._is_new = False
        return self._allowed if self.is_open(now) else 0


class FirstTokens:
    """The waits for first tokens of the users of the last minute."""

    def __init__(self) -> None:
        self._waits: deque[tuple[float, float]] = deque(maxlen=10_000)

    def add(self, now: float, asked: float) -> None:
        self._waits.append((now, now - asked))

    def p99(self, now: float) -> float | None:
        """The 99th percentile; None if there was no request."""
        recent = sorted(wait for at, wait in self._waits if now - at < 60.0)
        return recent[math.ceil(0.99 * len(recent)) - 1] if recent else None


@dataclass(frozen=True, slots=True)
class UsersLoad:
    """The load of users on the workers that serve them now."""

    workers: int
    active: int
    """Requests in progress."""
    ttft_p99_s: float | None = None
    """The 99th percentile over the last minute; None if there was no request."""


class LoanPolicy:
    """Decides whether one worker serves the users or is lent to RL."""

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
        """Record the duration of a return, without the time in which it could not be observed: a
        gateway that was away for hours would otherwise end all lending."""
        self._return_s = max(self._return_s, seconds)

    def lends(self, now: float, users: UsersLoad) -> bool:
        """True if a worker that serves users should be lent now."""
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
        """True if a lent worker should come back now. `users`: None if their load is not known."""
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
