"""Feedback of users on answers, and its join with the tokens that it is about. Pure.

An event names the answer by its completion id, the one that the client was given. Events may arrive
twice, late, in any order, and before the answer itself is stored; the join does not depend on any
of that. An event counts only for an answer to the same user: naming somebody else's answer has no
effect.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

STRENGTHS: dict[str, float] = {
    "thumbs_up": 1.0,
    "thumbs_down": -1.0,
    "accepted": 0.5,
    "rejected": -0.5,
    "regenerated": -0.5,
    "kept_10s": 0.25,
    "kept_5min": 0.5,
    "kept_commit": 0.75,
    "kept_7d": 1.0,
    "edited": -0.25,
    "undone": -1.0,
    "follow_up": 0.0,
    "dissatisfied": -0.75,
    "stopped": -0.5,
    "model_switched": -0.75,
    "tip": 1.0,
}
"""The strength of each kind of event that does not state its own. A follow-up has no meaning until
it is read."""
REPLACES = {
    "thumbs_up": "thumb",
    "thumbs_down": "thumb",
    "accepted": "decision",
    "rejected": "decision",
    "regenerated": "decision",
    "kept_10s": "kept",
    "kept_5min": "kept",
    "kept_commit": "kept",
    "kept_7d": "kept",
}
"""Kinds that answer the same question: only the newest of these counts. Any other kind replaces
only itself."""
CUSTOM = re.compile(r"custom:[a-z0-9_]{1,40}")
_COMPLETION = re.compile(r"(?:chatcmpl-|resp_|msg_)?([0-9a-f]{24})")


def completion_key(id: str) -> str:
    """The key of a completion, from the id that a client was given in any dialect. ValueError for
    anything else."""
    found = _COMPLETION.fullmatch(id)
    if found is None:
        raise ValueError(f"{id[:100]!r} is not an answer's id, such as chatcmpl-..")
    return found[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackEvent:
    """One action of a user about an answer."""

    event: str
    """The id of the event: the same id twice is one event."""
    user: str
    organisation: str = ""
    """The organisation that the user belongs to, if known."""
    completion: str
    choice: int = 0
    """The index of the choice, for an answer with several."""
    kind: str
    strength: float
    """Signed strength, from -1 to 1."""
    time: float
    """The time at which it happened."""
    received: float
    text: str = ""

    def check(self) -> None:
        """Raise ValueError for invalid values."""
        if self.kind not in STRENGTHS and not CUSTOM.fullmatch(self.kind):
            raise ValueError(
                f"kind {self.kind[:100]!r}: write one of {', '.join(STRENGTHS)}, or custom:NAME"
            )
        if not -1.0 <= self.strength <= 1.0:
            raise ValueError("strength must be a number from -1 to 1")
        if not (math.isfinite(self.time) and math.isfinite(self.received)):
            raise ValueError("time must be in seconds since 1970")

    @property
    def question(self) -> str:
        return REPLACES.get(self.kind, self.kind)

    @property
    def order(self) -> tuple[float, str]:
        return self.time, self.event


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The result of joining all events with the answers."""

    by_answer: Mapping[tuple[str, int], tuple[FeedbackEvent, ...]]
    """Events by completion and choice, oldest first."""
    pending: tuple[FeedbackEvent, ...]
    """Events whose answer may still arrive."""
    dropped: Mapping[str, tuple[FeedbackEvent, ...]]
    """Events by reason: `unknown_completion`, `other_user`."""


def join(
    owners: Mapping[tuple[str, int], str],
    events: Iterable[FeedbackEvent],
    *,
    now: float,
    horizon_s: float,
) -> Joined:
    """Assign the events to their answers. `owners`: the user of each answer that is stored."""
    once: dict[str, FeedbackEvent] = {}
    for event in events:
        other = once.get(event.event)
        if other is None or (event.received, repr(event)) < (other.received, repr(other)):
            once[event.event] = event
    by_answer: dict[tuple[str, int], list[FeedbackEvent]] = defaultdict(list)
    pending: list[FeedbackEvent] = []
    dropped: dict[str, list[FeedbackEvent]] = defaultdict(list)
    for event in sorted(once.values(), key=lambda event: event.order):
        owner = owners.get((event.completion, event.choice))
        if owner == event.user:
            by_answer[event.completion, event.choice].append(event)
        elif owner is not None:
            dropped["other_user"].append(event)
        elif now - event.received <= horizon_s:
            pending.append(event)
        else:
            dropped["unknown_completion"].append(event)
    return Joined(
        by_answer={key: tuple(found) for key, found in by_answer.items()},
        pending=tuple(pending),
        dropped={reason: tuple(found) for reason, found in dropped.items()},
    )


def counted(events: Iterable[FeedbackEvent]) -> list[FeedbackEvent]:
    """The events of one answer that count: the newest for each question, in the order of time."""
    newest: dict[str, FeedbackEvent] = {}
    for event in sorted(events, key=lambda event: event.order):
        newest[event.question] = event
    return sorted(newest.values(), key=lambda event: event.order)


def score(events: Iterable[FeedbackEvent]) -> float | None:
    """The worth of an answer to its user, from -1 to 1; None without feedback."""
    strengths = [event.strength for event in counted(events)]
    return max(-1.0, min(1.0, math.fsum(strengths))) if strengths else None


@dataclass(slots=True)
class RateLimit:
    """A rate limit on the events of each user: a burst first, then a number per minute. Of more
    users than `max_users`, it forgets those who have been quiet for longest."""

    per_minute: float
    burst: int
    max_users: int = 100_000
    _left: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)
    """User -> the number of events still allowed, and the time that this number refers to."""

    def admit(self, user: str, now: float) -> float:
        """0 if one more event is allowed now; otherwise the seconds until it is."""
        left, then = self._left.pop(user, (float(self.burst), now))
        left = min(self.burst, left + max(0.0, now - then) * self.per_minute / 60)
        wait = 0.0 if left >= 1 else (1 - left) * 60 / self.per_minute
        self._left[user] = (left if wait else left - 1, max(now, then))
        while len(self._left) > self.max_users:
            self._left.popitem(last=False)
        return wait
