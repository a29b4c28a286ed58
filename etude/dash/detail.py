"""One session in the form that the page shows: turns, calls, score, and its tokens with their
log-probs and weight versions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from etude.core.errors import EtudeError
from etude.core.sampling import expand_spans
from etude.core.types import Feedback, Json, Segment, Trajectory, plain_text
from etude.dash.session import read_arguments, read_call
from etude.store.runs import Run

Piece = Callable[[int], str]
"""Text of one token."""


def conversation(t: Trajectory, feedback: Sequence[Feedback] = ()) -> dict[str, Any]:
    return {
        "id": t.id,
        "task": t.task,
        "group": t.group,
        "status": t.status,
        "reward": t.reward,
        "error": t.error,
        "traceback": t.traceback,
        "source": t.source,
        "policy": t.policy,
        "cost": asdict(t.cost),
        "parts": [asdict(part) for part in t.score.parts] if t.score else [],
        "flags": list(t.score.flags) if t.score else [],
        "credit": [asdict(credit) for credit in t.score.credit] if t.score else [],
        "turns": [_turn(message) for message in t.messages],
        "diff": t.diff,
        "feedback": [asdict(each) for each in feedback],
    }


def _turn(message: dict[str, Json]) -> dict[str, Any]:
    return {
        "role": str(message.get("role", "?")),
        "text": plain_text(message.get("content")),
        "reasoning": plain_text(message.get("reasoning_content")),
        "calls": [_call(call) for call in message.get("tool_calls") or ()],
        "call_id": str(message.get("tool_call_id") or ""),
    }


def _call(call: Json) -> dict[str, Any]:
    """A call with its arguments by name, or verbatim under an empty name if they cannot be
    parsed."""
    id, name, given = read_call(call)
    arguments = read_arguments(given)
    if arguments is None:
        arguments = {"": given if isinstance(given, str) else json.dumps(given)}
    return {
        "id": id,
        "name": name,
        "arguments": {
            str(key): value if isinstance(value, str) else json.dumps(value)
            for key, value in arguments.items()
        },
    }


def segments(t: Trajectory) -> list[dict[str, Any]]:
    """A summary of each segment of a session."""
    return [
        {
            "kind": segment.kind,
            "parent": segment.parent,
            "prompt": len(segment.prompt),
            "tokens": len(segment.tokens),
            "sampled": sum(segment.mask),
            "versions": [[span.version, span.count] for span in segment.versions],
            "regions": [[span.region, span.count] for span in segment.regions],
        }
        for segment in t.segments
    ]


def tokens(
    segment: Segment,
    piece: Piece,
    recomputed: Sequence[float] | None,
    *,
    offset: int,
    limit: int,
) -> dict[str, Any]:
    """A range of the tokens of a segment, prompt included. `recomputed` are the trainer's log-probs
    of its sampled tokens. The text of each distinct token is sent once."""
    ids = (*segment.prompt, *segment.tokens)[offset : offset + limit]
    mask = ((False,) * len(segment.prompt) + segment.mask)[offset : offset + limit]
    logprobs = ((0.0,) * len(segment.prompt) + segment.logprobs)[offset : offset + limit]
    before = sum(segment.mask[: max(0, offset - len(segment.prompt))])
    count = sum(mask)
    versions = list(expand_spans(segment.versions))[before : before + count]
    different = {id: place for place, id in enumerate(dict.fromkeys(ids))}
    new = None if recomputed is None else recomputed[before : before + count]
    return {
        "offset": offset,
        "total": len(segment.prompt) + len(segment.tokens),
        "pieces": [piece(id) for id in different],
        "tokens": [different[id] for id in ids],
        "mask": [[int(value), sum(1 for _ in run)] for value, run in groupby(mask)],
        "logprobs": [round(value, 4) for value, ours in zip(logprobs, mask, strict=True) if ours],
        "trainer": None if new is None else [round(value, 4) for value in new],
        "versions": [[version, sum(1 for _ in run)] for version, run in groupby(versions)],
    }


def trainer_logprobs(run: Run, step: int, sample: str, segment: Segment) -> list[float] | None:
    """The trainer's log-probs of the sampled tokens of a segment; None if they are not stored."""
    try:
        rows = run.batch(step).rows
        found = run.recomputed(step)
    except EtudeError:
        return None
    whole = (*segment.prompt, *segment.tokens)
    for row, recomputed in zip(rows, found, strict=False):
        if row.sample == sample and row.tokens == whole[: len(row.tokens)]:
            return list(recomputed.logprobs)
    return None
