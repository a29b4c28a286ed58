"""A session as a person reads it: its messages by speaker, long outputs shortened in the middle,
and its score."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from etude.core.types import Json, Score, Status, Trajectory, plain_text

LONG = 40
"""Most lines of a text that are shown; the middle of a longer text is left out."""
LONG_LINE = 400
"""Most characters of a line that are shown."""
SPARE_LEVELS = 20
"""Levels of nesting reserved for the JSON in which arguments are embedded."""
STATUS: dict[Status, str] = {
    "done": "finished",
    "truncated": "truncated",
    "timeout": "timed out",
    "failed": "failed",
}
"""Status -> words for it."""
CUT_SHORT: dict[Status, str] = {"truncated": "out of turns or context", "timeout": "out of time"}
"""Status -> reason why a session was cut short; it is graded on the state that it left."""


@dataclass(frozen=True, slots=True)
class Block:
    """One text with its speaker: `system`, `user`, `model`, `call`, `tool`, `score`, `error`, or
    `raw` (the bare text of recorded tokens)."""

    who: str
    text: str


def read_session(t: Trajectory, decode: Callable[[Sequence[int]], str] | None) -> list[Block]:
    """The blocks of a session. `decode` turns recorded tokens into text, for sessions whose agent
    left no messages."""
    return [*said(t.messages), *(_recorded(t, decode) if not t.messages else ()), *_outcome(t)]


def said(messages: Sequence[dict[str, Json]]) -> Iterator[Block]:
    for message in messages:
        role, content = str(message.get("role", "?")), message.get("content")
        who = {"assistant": "model"}.get(role, role)
        calls = [_call(call) for call in message.get("tool_calls") or ()]
        text = plain_text(content)
        if text or not calls:
            yield Block(who, shorten(text or "(says nothing)"))
        yield from (Block("call", shorten(call)) for call in calls)


def _recorded(t: Trajectory, decode: Callable[[Sequence[int]], str] | None) -> Iterator[Block]:
    for number, segment in enumerate(t.segments if decode else ()):
        assert decode is not None
        where = f" {number}" if len(t.segments) > 1 else ""
        yield Block(f"raw{where}", shorten(decode((*segment.prompt, *segment.tokens))))


def _outcome(t: Trajectory) -> Iterator[Block]:
    if t.status in CUT_SHORT:
        yield Block(STATUS[t.status], f"{CUT_SHORT[t.status]}; graded on what was done by then")
    if t.score is not None:
        yield Block("score", score_text(t.score))
    if t.error is not None:
        yield Block("error", "\n".join(filter(None, (t.error, t.traceback))))


def score_text(score: Score) -> str:
    lines = [f"reward {score.reward:g}"]
    for part in score.parts:
        evidence = shorten(part.evidence).replace("\n", "\n    ")
        lines.append(f"{part.name} {part.value:g}" + (f": {evidence}" if evidence else ""))
    lines += [f"flag: {flag}" for flag in score.flags]
    for credit in score.credit:
        turn = "" if credit.turn is None else f", turn {credit.turn}"
        lines.append(f"credit {credit.value:g} for segment {credit.segment}{turn}")
    return "\n".join(lines)


def shorten(text: str) -> str:
    """Keep only the first and the last lines of a long text, and the beginnings of long lines."""
    lines = [
        line if len(line) <= LONG_LINE else f"{line[:LONG_LINE]} ... ({len(line)} characters)"
        for line in text.rstrip().split("\n")
    ]
    if len(lines) > LONG:
        half = LONG // 2
        cut = len(lines) - 2 * half
        lines = [*lines[:half], f"... ({cut} lines left out) ...", *lines[-half:]]
    return "\n".join(lines)


def read_call(call: Json) -> tuple[str, str, Json]:
    """The id, the name and the arguments of a tool call, as far as it has them: other people's
    agents may write anything."""
    told = call if isinstance(call, dict) else {}
    function = told.get("function")
    function = function if isinstance(function, dict) else {}
    return str(told.get("id") or ""), str(function.get("name", "?")), function.get("arguments", "")


def read_arguments(given: Json) -> dict[str, Json] | None:
    """The arguments of a tool call by name. None if they are not an object or cannot be written as
    JSON again: a model may write NaN, half of a surrogate pair, or a hundred thousand brackets."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
        within = reduce(lambda inner, _: [inner], range(SPARE_LEVELS), found)
        json.dumps(within, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _call(call: Json) -> str:
    """A call in Python's notation, if its arguments can be parsed."""
    _, name, given = read_call(call)
    arguments = read_arguments(given)
    if arguments is None:
        return f"{name}({given})"
    short = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    if len(short) <= 100 and "\\n" not in short:
        return f"{name}({short})"
    # long texts, such as a file, are easier to read verbatim than as one line with escapes
    parts = "\n".join(f"  {key} = {plain_text(value)}" for key, value in arguments.items())
    return f"{name}(\n{parts}\n)"
