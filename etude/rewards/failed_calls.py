"""Credit for tool calls: a turn with a failed call contains something that was never going to work,
regardless of how the attempt ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from etude.core.types import Credit, Json, Segment, Task, plain_text, turn_places

FAILED = "error:"
"""Prefix of the answer to a call that failed."""


def failed_calls(
    task: Task, messages: Sequence[Mapping[str, Json]], segments: Sequence[Segment], penalty: float
) -> tuple[Credit, ...]:
    """-`penalty` for each turn with a failed call, and 0 for each turn with calls that all
    succeeded. Empty if turns and messages cannot be matched: if a program reported fewer answers
    than it received, or held several conversations at once."""
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
    """True if one of the answers at the beginning of these messages reports a failure."""
    answers = takewhile(lambda message: message.get("role") == "tool", behind)
    return any(plain_text(answer.get("content")).startswith(FAILED) for answer in answers)
