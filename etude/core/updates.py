"""Records of real-time RL: what an update was made of, and who was forgotten since. Pure data."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from etude.core.ledger import Dropped

_SAMPLE = re.compile(r"[0-9a-f]{32}\.\d{13}-[0-9a-f]{32}")
_SIMULATED = re.compile(r"s(\d{6,})-\d{4,}")


def is_of_user(sample: str) -> bool:
    """Whether a sample is a session of a user, by its id: user and session, by pseudonyms."""
    return _SAMPLE.fullmatch(sample) is not None


def simulated_group(step: int, slot: int) -> str:
    """The id of a group of rollouts that a batch of users' sessions is mixed with."""
    return f"s{step:06d}-{slot:04d}"


def step_of_simulated(group: str) -> int | None:
    """The step that such a group is for; None of any other group."""
    found = _SIMULATED.fullmatch(group)
    return int(found[1]) if found else None


def steps_back(version: int, base: int, bases: Mapping[int, int]) -> int | None:
    """How many steps lie between a version and one that was made from it, `base`; None if it was
    not. `bases`: what each version was made from, if that is not the one before."""
    count = 0
    while base > version:
        base, count = bases.get(base, base - 1), count + 1
    return count if base == version else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedAnswer:
    """What is remembered of an answer that was trained on: nothing that anybody said."""

    sample: str
    context: str
    worth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFigures:
    """What became of a session, in numbers: nothing that anybody said."""

    user: str
    organisation: str
    session: str
    started: float
    versions: tuple[int, ...]
    metrics: dict[str, float]
    """By name (`realtime.cycle.METRICS`)."""
    events: tuple[str, ...]
    """The ids of those that are about one of its answers."""

    @property
    def id(self) -> str:
        """That of its sample."""
        return f"{self.user}.{self.session}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    step: int
    base: int
    """The version that it begins with."""
    time: float
    answers: tuple[CreditedAnswer, ...]
    dropped: tuple[Dropped, ...] = ()
    """Sessions that were ready for the batch and are not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """A user was deleted."""

    user: str
    time: float
    steps: tuple[int, ...]
    """Those whose batch held what the user said. The versions that have seen it are these and all
    that are made from them (`versions_that_saw`)."""


def versions_that_saw(steps: Collection[int], bases: Mapping[int, int]) -> tuple[int, ...]:
    """The versions that these steps made, and all that were made from one of them. `bases`: what
    each version was made from."""
    seen = set(steps)
    for version in sorted(bases):  # a base is older than what is made from it
        if bases[version] in seen:
            seen.add(version)
    return tuple(sorted(seen))
