"""People's verdicts on sessions and on pairs of sessions, as a separate append-only log of the run:
`verdicts/N.jsonl`.

Sessions are not modified: verdicts are only read from here. Every dashboard may append; if two
append at once, one retries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from etude.core.errors import EtudeError
from etude.store.codec import Stamped
from etude.store.log import Log
from etude.store.runs import Run

TRIES = 5
MOST_TEXT = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A person's verdict on one session. A later one by the same person replaces it."""

    session: str
    verdict: Literal["cheat", "honest"]
    who: str
    note: str = ""
    reward: float | None = None
    """The reward that it should have earned, if it differs."""

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError("the reward of a verdict must be a finite number")
        _check_text(self.who, self.note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A person's choice between two sessions of a task, made without knowing whose they were. A
    later one by the same person replaces it."""

    left: str
    right: str
    verdict: Literal["left", "right", "tie"]
    who: str
    note: str = ""

    def __post_init__(self) -> None:
        _check_text(self.who, self.note)

    @property
    def chosen(self) -> str | None:
        return {"left": self.left, "right": self.right, "tie": None}[self.verdict]


def _check_text(who: str, note: str) -> None:
    if not who.strip() or max(len(who), len(note)) > MOST_TEXT:
        raise ValueError(
            f"a verdict needs a name, and name and note may have at most {MOST_TEXT} characters"
        )


def add_verdict(run: Run, verdict: Verdict | Preference) -> None:
    for left in reversed(range(TRIES)):
        try:
            return _log(run).append(verdict)
        except EtudeError:
            if not left:
                raise


def read_verdicts(run: Run) -> list[Stamped[Verdict]]:
    """Verdicts on single sessions, oldest first."""
    return [
        Stamped(each.t, each.record)
        for each in _log(run).read()[0]
        if isinstance(each.record, Verdict)
    ]


def read_preferences(run: Run) -> list[Stamped[Preference]]:
    """Verdicts on pairs, oldest first."""
    return [
        Stamped(each.t, each.record)
        for each in _log(run).read()[0]
        if isinstance(each.record, Preference)
    ]


def _log(run: Run) -> Log[Verdict | Preference]:
    return Log(run.objects, "verdicts", [Verdict, Preference], durable=True)
