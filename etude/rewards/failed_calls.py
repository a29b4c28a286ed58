"""Credit for tool calls: a turn whose call failed has said something that was never going to work,
whatever became of the attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from etude.core.types import Credit, Json, Segment, Task, plain_text, turn_places

FAILED = "error:"
"""How the answer to a call begins that failed."""


def failed_calls(
    task: Task, messages: Sequence[Mapping[str, Json]], segments: Sequence[Segment], penalty: float
) -> tuple[Credit, ...]:
    """-`penalty` for each turn of which a call failed, and 0 for those whose calls did not. None at
    all where turns and messages cannot be matched: where a program said less than it was told, or
    asked in several conversations at once."""
    places = turn_places(segments)
    said = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    said = said[sum(message.get("role") == "assistant" for message in task.opening) :]
    if len(said) != len(places):
        return ()
    return tuple(
        Credit(-penalty if _failed(messages[place + 1 :]) else 0.0, segment, turn)
        for place, (segment, turn) in zip(said, places, strict=True)
        if messages[place].get("tool_calls")
    )


def _failed(behind: Sequence[Mapping[str, Json]]) -> bool:
    """Whether one of the answers does that come first."""
    answers = takewhile(lambda message: message.get("role") == "tool", behind)
    return any(plain_text(answer.get("content")).startswith(FAILED) for answer in answers)
