"""Records of real-time RL: what an update was made of, and who was forgotten since. Pure data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedAnswer:
    """What is remembered of an answer that was trained on: nothing that anybody said."""

    sample: str
    context: str
    worth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    step: int
    base: int
    """The version that it begins with."""
    time: float
    answers: tuple[CreditedAnswer, ...]


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
