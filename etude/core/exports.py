"""Recorded sessions with their feedback as training data. Pure.

    sft   a line for every segment of a session that users liked: its messages, in the format of the
          stage sft, and the exact tokens
    dpo   a line for every two answers to the same prompt if one was liked and the other was not
    rl    a trajectory for every session that received feedback, with the exact tokens

Each contains the pseudonym of its user and the time, so that users who are deleted later can be
removed from a copy. Sessions that are left out are counted by reason.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.core.feedback import FeedbackEvent, counted, score
from etude.core.recorded import RecordedSegment, RecordedSession, RecordedTurn
from etude.core.types import Cost, Part, Score, Trajectory

SOURCE = "production"
Feedback = Mapping[tuple[str, int], tuple[FeedbackEvent, ...]]
"""Feedback events by completion and choice."""
Line = dict[str, Any]


@dataclass(slots=True)
class Export:
    """The result of an export. `made`: lines or trajectories."""

    made: list[Any] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def session_score(session: RecordedSession, feedback: Feedback) -> float | None:
    """The mean score of the answers that received feedback; None if there are none."""
    scores = [
        value
        for turn in session.turns
        if (value := score(feedback.get(turn.answer, ()))) is not None
    ]
    return sum(scores) / len(scores) if scores else None


def sft_lines(
    sessions: Iterable[RecordedSession], feedback: Feedback, *, min_score: float
) -> Export:
    """Lines for sft. Messages of the assistant that were not sampled here, were redacted or were
    disliked have weight 0: they are read but not learnt."""
    export = Export()
    for session in sessions:
        value = session_score(session, feedback)
        if value is None or value < min_score:
            export.dropped["no_feedback" if value is None else "low_score"] += 1
            continue
        for segment in session.segments:
            learnt = [turn for turn in segment.turns if _is_learnt(turn, feedback)]
            if not learnt:
                export.dropped["nothing_to_learn"] += 1
            elif (messages := _weighted(segment, learnt)) is None:
                export.dropped["malformed_call"] += 1
            else:
                export.made.append(
                    {
                        "messages": messages,
                        "tools": list(segment.turns[0].tools),
                        **_origin(session),
                        "score": value,
                        **_tokens(segment, learnt),
                    }
                )
    return export


def _is_learnt(turn: RecordedTurn, feedback: Feedback) -> bool:
    value = score(feedback.get(turn.answer, ()))
    return not turn.answer_redacted and (value is None or value >= 0)


def _weighted(segment: RecordedSegment, learnt: list[RecordedTurn]) -> list[Line] | None:
    """The messages of a segment with their weights; None if a tool call is malformed."""
    places = {
        place for turn, place in zip(segment.turns, segment.answers, strict=True) if turn in learnt
    }
    messages = []
    for place, message in enumerate(segment.messages):
        unlearnt = message.get("role") == "assistant" and place not in places
        messages.append(message | ({"weight": 0} if unlearnt else {}))
    return messages if all(map(_calls_are_json, messages)) else None


def _calls_are_json(message: Line) -> bool:
    try:
        return all(
            isinstance(json.loads(call["function"]["arguments"]), dict)
            for call in message.get("tool_calls") or ()
            if isinstance(call["function"]["arguments"], str)
        )
    except ValueError:
        return False


def _tokens(segment: RecordedSegment, learnt: list[RecordedTurn]) -> Line:
    """All tokens of the segment, and a mask of those to learn."""
    tokens: list[int] = []
    mask: list[bool] = []
    for turn in segment.turns:
        tokens += [*turn.read, *turn.sampled]
        mask += [False] * len(turn.read) + [turn in learnt] * len(turn.sampled)
    return {"vocabulary": segment.turns[0].vocabulary, "tokens": tokens, "mask": mask}


def dpo_lines(sessions: Iterable[RecordedSession], feedback: Feedback) -> Export:
    """Lines for dpo. Among answers to the same prompt of one user, the best one is paired with each
    one of negative score."""
    export = Export()
    answers: dict[str, list[tuple[float, RecordedSession, RecordedTurn, list[Line]]]]
    answers = defaultdict(list)
    for session in sessions:
        for segment in session.segments:
            for turn, place in zip(segment.turns, segment.answers, strict=True):
                value = score(feedback.get(turn.answer, ()))
                if value is not None:
                    prompt = segment.messages[:place]
                    tools = segment.turns[0].tools
                    key = json.dumps([session.user, prompt, tools], sort_keys=True)
                    answers[key].append((value, session, turn, prompt))
    for _, found in sorted(answers.items()):
        found.sort(key=lambda one: (one[0], one[2].answer))
        value, session, best, prompt = found[-1]
        rejected = [(worth, turn) for worth, _, turn, _ in found if worth < 0]
        if value <= 0 or not rejected:
            export.dropped["no_pair"] += 1
            continue
        for worth, turn in rejected:
            said = (best.messages[-1], turn.messages[-1])
            if best.answer_redacted or turn.answer_redacted:
                export.dropped["redacted_answer"] += 1
            elif said[0] == said[1]:
                export.dropped["same_answer"] += 1
            elif not all(map(_calls_are_json, (*prompt, *said))):
                export.dropped["malformed_call"] += 1
            else:
                export.made.append(
                    {
                        "prompt": prompt,
                        "chosen": [said[0]],
                        "rejected": [said[1]],
                        "tools": list(_tools(session, best)),
                        **_origin(session),
                        "completions": [best.completion, turn.completion],
                        "scores": [value, worth],
                    }
                )
    return export


def _tools(session: RecordedSession, turn: RecordedTurn) -> tuple[Line, ...]:
    return session.segments[turn.segment].turns[0].tools


def trajectories(
    sessions: Iterable[RecordedSession], feedback: Feedback, *, unheard: bool = False
) -> Export:
    """Trajectories for rl. Only tokens that can be recomputed count as sampled. The parts of the
    score name the segment and the turn that they are about: `thumbs_up@0.2`. `unheard`: include
    sessions without feedback; their reward is 0."""
    export = Export()
    for session in sessions:
        value = session_score(session, feedback)
        exact = [segment.exact() for segment in session.segments]
        if value is None and not unheard:
            export.dropped["no_feedback"] += 1
        elif None in exact:
            export.dropped["redacted"] += 1
        else:
            export.made.append(
                Trajectory(
                    id=f"{session.user}.{session.session}",
                    task=session.session,
                    group=f"{session.user}.{session.session}",
                    segments=tuple(segment for segment in exact if segment is not None),
                    score=Score(value or 0.0, tuple(_parts(session, feedback))),
                    status="done",
                    messages=session.segments[-1].messages,
                    source=SOURCE,
                    policy=session.policy,
                    cost=_cost(session),
                )
            )
    return export


def _parts(session: RecordedSession, feedback: Feedback) -> list[Part]:
    parts = [Part("propensity", session.propensity)]
    for number, segment in enumerate(session.segments):
        for place, turn in enumerate(segment.turns):
            parts += [
                Part(f"{event.kind}@{number}.{place}", event.strength, event.text)
                for event in counted(feedback.get(turn.answer, ()))
            ]
    return parts


def _cost(session: RecordedSession) -> Cost:
    return Cost(
        prompt_tokens=sum(turn.start + len(turn.read) for turn in session.turns),
        sampled_tokens=sum(len(turn.sampled) for turn in session.turns),
        seconds=max(turn.time for turn in session.turns) - session.started,
        calls=len(session.turns),
    )


def _origin(session: RecordedSession) -> Line:
    return {
        "user": session.user,
        "session": session.session,
        "recorded": session.started,
        "policy": session.policy,
        "propensity": session.propensity,
        "source": SOURCE,
    }
