"""From users' feedback on answers to the worth of each answer. Pure.

An answer is worth the sum of the strengths of its events, clipped to -1 to 1; of kinds that answer
the same question only the newest event counts (`core.feedback`). The worth of an answer without
feedback is unknown, which is not the same as 0.

A session is settled when its horizon is over, which is longer for a longer session. Events that
arrive later have no effect. The worth of a settled session therefore does not depend on when or how
often it is computed, nor on the order in which its events came.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from etude.core.exports import Feedback
from etude.core.feedback import STRENGTHS, FeedbackEvent, counted
from etude.core.recorded import RecordedSession, RecordedTurn
from etude.core.types import Json, plain_text
from etude.realtime.conduct import Conduct, judged

DISSATISFIED = "dissatisfied"
FOLLOW_UP = "follow_up"
KEPT = frozenset({"kept_10s", "kept_5min", "kept_commit", "kept_7d", "accepted"})
LOST = frozenset({"rejected", "regenerated", "undone"})
_COMPLAINT = re.compile(
    r"\b(wrong|incorrect|broken|revert|undo|useless|not what i|that'?s not|"
    r"didn'?t (ask|work|help)|do(es)?n'?t (work|help|compile)|"
    r"still (fails?|broken|wrong|not)|why did you|stop (doing|it))\b",
    re.IGNORECASE,
)
_SUPPRESSION = re.compile(r"#\s*(noqa|type:\s*ignore|pylint:\s*disable)|eslint-disable|@ts-ignore")
_CALL_MARKER = "<tool_call>"
"""Marks a call that could not be parsed, if it is in the text of an answer."""


def is_complaint(text: str) -> bool:
    """True if a follow-up complains about the answer before it, by a list of plain English phrases.
    A product with a classifier of its own sends `dissatisfied` instead."""
    return _COMPLAINT.search(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalTable:
    """The strength of each kind of event, and the time to wait for events."""

    strengths: Mapping[str, float] = field(default_factory=dict)
    """Strengths by kind, in place of the event's own; 0 ignores a kind."""
    horizon_s: float = 3600.0
    horizon_per_turn_s: float = 60.0
    """Extension of the horizon for every answer of a session after its first."""

    def strength(self, event: FeedbackEvent) -> float:
        kind = event.kind
        if kind == FOLLOW_UP and event.strength == 0 and is_complaint(event.text):
            return self.strengths.get(DISSATISFIED, STRENGTHS[DISSATISFIED])
        return self.strengths.get(kind, event.strength)

    def settles_at(self, session: RecordedSession) -> float:
        turns = session.turns
        wait_s = self.horizon_s + self.horizon_per_turn_s * (len(turns) - 1)
        return max(turn.time for turn in turns) + wait_s

    def worth(self, events: Iterable[FeedbackEvent]) -> float | None:
        """The worth of one answer; None if it has no event that counts."""
        strengths = [
            self.strength(event)
            for event in counted(events)
            if self.strengths.get(event.kind) != 0.0
        ]
        return max(-1.0, min(1.0, math.fsum(strengths))) if strengths else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOutcome:
    """The fate of one answer, as far as it is known."""

    turn: RecordedTurn
    worth: float | None
    """None if nothing is known."""
    kept: bool | None
    """None if there is no such event."""
    dissatisfied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOutcome:
    """A recorded session with the worth of its answers to its user."""

    session: RecordedSession
    answers: tuple[AnswerOutcome, ...]
    settles_at: float
    events: tuple[str, ...]
    """Ids of the events about its answers."""
    late: int
    """Number of these events that arrived after it was settled."""

    @property
    def id(self) -> str:
        """The id of its trajectory (`core.exports`)."""
        return f"{self.session.user}.{self.session.session}"

    @property
    def user(self) -> str:
        return self.session.user

    @property
    def organisation(self) -> str:
        return self.session.organisation

    @property
    def is_censored(self) -> bool:
        """True if the worth of none of its answers is known."""
        return all(answer.worth is None for answer in self.answers)

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(span.version for turn in self.session.turns for span in turn.versions)

    @property
    def context(self) -> str:
        """The kind of request, derived from its prompt: the tools offered to the model and the
        beginning of the system prompt."""
        first = self.session.turns[0]
        tools = sorted(str(tool.get("function", {}).get("name", "")) for tool in first.tools)
        system = "".join(
            plain_text(message.get("content"))[:200]
            for message in first.messages
            if message.get("role") == "system"
        )
        return f"{','.join(tools)}|{system}"


def session_outcome(
    session: RecordedSession, feedback: Feedback, table: SignalTable
) -> SessionOutcome:
    settles_at = table.settles_at(session)
    late = 0
    answers = []
    events: list[str] = []
    for turn in session.turns:
        said = feedback.get(turn.answer, ())
        in_time = [event for event in said if event.received <= settles_at]
        late += len(said) - len(in_time)
        events += [event.event for event in said]
        answers.append(_answer_outcome(turn, in_time, table))
    return SessionOutcome(
        session=session,
        answers=tuple(answers),
        settles_at=settles_at,
        events=tuple(events),
        late=late,
    )


def _answer_outcome(
    turn: RecordedTurn, events: list[FeedbackEvent], table: SignalTable
) -> AnswerOutcome:
    newest = counted(events)
    kinds = {event.kind for event in newest}
    kept = False if kinds & LOST else True if kinds & KEPT else None
    complains = any(e.kind == FOLLOW_UP and is_complaint(e.text) for e in newest)
    return AnswerOutcome(
        turn=turn,
        worth=judged(table.worth(events), conduct_of(turn)),
        kept=kept,
        dissatisfied=DISSATISFIED in kinds or complains,
    )


def conduct_of(turn: RecordedTurn) -> Conduct:
    """The model's conduct as far as the answer itself shows it. The product reports the rest by
    events."""
    answer = turn.messages[-1]
    calls = [call.get("function", {}).get("arguments") for call in answer.get("tool_calls") or ()]
    unread = plain_text(answer.get("content")).count(_CALL_MARKER)
    return Conduct(
        broken_tool_calls=unread + sum(not _is_object(call) for call in calls),
        suppressed_lints=sum(len(_SUPPRESSION.findall(str(call))) for call in calls),
    )


def _is_object(arguments: Json) -> bool:
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return False
    return isinstance(read, dict)
