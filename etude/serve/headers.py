"""Headers with details of a request beyond its body: its priority, its deadline, and the kind of
the segment that it opens."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, get_args

from starlette.requests import Request as HttpRequest

from etude.core.sampling import Priority
from etude.core.types import SegmentKind
from etude.serve.access import identity_of
from etude.serve.http import ApiError, DeadlineExceeded
from etude.serve.policies import MAY_CHOOSE_PRIORITY

PRIORITY = "X-Etude-Priority"
DEADLINE_S = "X-Etude-Deadline-S"
SEGMENT = "X-Etude-Segment"

SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
MAX_DEADLINE_S = 1e9

T = TypeVar("T", bound=str)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Priority and deadline of a request. The deadline counts from the moment when the headers were
    read."""

    priority: Priority
    expires: float | None
    """On the monotonic clock."""

    def deadline_s(self) -> float | None:
        """The time that is left. Raises DeadlineExceeded if there is none."""
        if self.expires is None:
            return None
        left = self.expires - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded()
        return left


def read_scheduling(http: HttpRequest) -> Scheduling:
    """Read priority and deadline. The priority is read only from clients who may choose one."""
    priority: Priority = "standard"
    if identity_of(http).scope in MAY_CHOOSE_PRIORITY:
        priority = _one_of(http.headers, PRIORITY, get_args(Priority), priority)
    text = http.headers.get(DEADLINE_S)
    if text is None:
        return Scheduling(priority, None)
    seconds = float(text) if SECONDS.fullmatch(text) else 0.0
    if not 0 < seconds <= MAX_DEADLINE_S:
        raise ApiError(
            f"{DEADLINE_S} must be a number of seconds above 0 and at most {MAX_DEADLINE_S:g}, "
            f"not {text[:200]!r}",
            param=DEADLINE_S,
        )
    return Scheduling(priority, time.monotonic() + seconds)


def read_segment_kind(headers: Mapping[str, str]) -> SegmentKind:
    """The kind that a harness gives the segment which its request opens, if it opens one."""
    return _one_of(headers, SEGMENT, get_args(SegmentKind), "turns")


def _one_of(headers: Mapping[str, str], name: str, values: tuple[T, ...], default: T) -> T:
    given = headers.get(name, default)
    if given not in values:
        raise ApiError(
            f"{name} must be one of {', '.join(values)}, not {given[:200]!r}", param=name
        )
    return given
