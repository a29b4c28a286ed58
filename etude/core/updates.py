"""Records of real-time RL: the contents of updates, and the users forgotten since. Pure data."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from etude.core.ledger import Dropped

_SAMPLE = re.compile(r"[0-9a-f]{32}\.\d{13}-[0-9a-f]{32}")
_SIMULATED = re.compile(r"s(\d{6,})-\d{4,}")


def is_of_user(sample: str) -> bool:
    """True if a sample is a session of a user, judging by its id: user and session, as
    pseudonyms."""
    return _SAMPLE.fullmatch(sample) is not None


def simulated_group(step: int, slot: int) -> str:
    """The id of a group of rollouts that is mixed into a batch of users' sessions."""
    return f"s{step:06d}-{slot:04d}"


def step_of_simulated(group: str) -> int | None:
    """The step that such a group is for; None for any other group."""
    found = _SIMULATED.fullmatch(group)
    return int(found[1]) if found else None


def steps_back(version: int, base: int, bases: Mapping[int, int]) -> int | None:
    """The number of steps from a version to `base`, a version made from it; None if it was not.
    `bases`: the version that each version was made from, if it is not the previous one."""
    count = 0
    while base > version:
        base, count = bases.get(base, base - 1), count + 1
    return count if base == version else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedAnswer:
    """The record of an answer that was trained on, without any content."""

    sample: str
    context: str
    worth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFigures:
    """The outcome of a session in numbers, without any content."""

    user: str
    organisation: str
    session: str
    started: float
    versions: tuple[int, ...]
    metrics: dict[str, float]
    """Values by name (`realtime.cycle.METRICS`)."""
    events: tuple[str, ...]
    """The ids of the events about its answers."""

    @property
    def id(self) -> str:
        """The id of its sample."""
        return f"{self.user}.{self.session}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    step: int
    base: int
    """The version that it starts from."""
    time: float
    answers: tuple[CreditedAnswer, ...]
    dropped: tuple[Dropped, ...] = ()
    """Sessions that were ready for the batch but are not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """The deletion of a user."""

    user: str
    time: float
    steps: tuple[int, ...]
    """The steps whose batch contained data of the user. The versions that have seen it are these
    and all versions made from them (`versions_that_saw`)."""


def versions_that_saw(steps: Collection[int], bases: Mapping[int, int]) -> tuple[int, ...]:
    """The versions that these steps made, and all versions made from them. `bases`: the version
    that each version was made from."""
    seen = set(steps)
    for version in sorted(bases):  # a base is older than the versions made from it
        if bases[version] in seen:
            seen.add(version)
    return tuple(sorted(seen))
