"""A session in Harbor's Agent Trajectory Interchange Format (ATIF). Pure."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from etude import __version__
from etude.core.types import Json, Trajectory, plain_text
from etude.dash.session import read_arguments, read_call
from etude.store.rollouts import RolloutRow

SCHEMA = "ATIF-v1.7"
SOURCES = {"assistant": "agent", "user": "user"}
"""Role -> source; every other role is the system."""


def trajectory(t: Trajectory, row: RolloutRow) -> dict[str, Any]:
    """A session as one document. It must have messages: the format has no empty trajectory."""
    return {
        "schema_version": SCHEMA,
        "session_id": t.id,
        "trajectory_id": t.id,
        "agent": {
            "name": "etude",
            "version": __version__,
            "model_name": t.policy,
            "extra": {"environment": t.source},
        },
        "steps": (steps := _steps(t.messages)),
        "final_metrics": {
            "total_prompt_tokens": t.cost.prompt_tokens,
            "total_completion_tokens": t.cost.sampled_tokens,
            "total_steps": len(steps),
            "extra": {"seconds": t.cost.seconds, "calls": t.cost.calls},
        },
        "extra": {
            "task": t.task,
            "group": t.group,
            "split": row.kind,
            "stage": row.stage,
            "step": row.step,
            "dropped": row.dropped,
            "versions": row.versions,
            "status": t.status,
            "error": t.error,
            "score": asdict(t.score) if t.score else None,
        },
    }


def _steps(messages: list[dict[str, Json]]) -> list[dict[str, Any]]:
    """The steps of a session. The answer of a tool belongs to the step that called it."""
    steps: list[dict[str, Any]] = []
    for message in messages:
        role = str(message.get("role"))
        if role == "tool":
            if not steps or steps[-1]["source"] != "agent":
                steps.append(_step(len(steps), "system", ""))
            _observe(steps[-1], message)
            continue
        step = _step(len(steps), SOURCES.get(role, "system"), plain_text(message.get("content")))
        if step["source"] == "agent":
            if reasoning := plain_text(message.get("reasoning_content")):
                step["reasoning_content"] = reasoning
            if calls := message.get("tool_calls"):
                step["tool_calls"] = [_call(call, place) for place, call in enumerate(calls)]
        steps.append(step)
    return steps


def _step(before: int, source: str, message: str) -> dict[str, Any]:
    return {"step_id": before + 1, "source": source, "message": message}


def _call(call: Json, place: int) -> dict[str, Any]:
    """A tool call. Arguments that cannot be parsed are kept verbatim in `extra`."""
    id, name, given = read_call(call)
    arguments = read_arguments(given)
    found = {
        "tool_call_id": id or f"call-{place}",
        "function_name": name,
        "arguments": arguments or {},
    }
    if arguments is None:
        written = given if isinstance(given, str) else json.dumps(given)
        found["extra"] = {"arguments": written}
    return found


def _observe(step: dict[str, Any], message: dict[str, Json]) -> None:
    """Add the answer of a tool to a step, with the id of its call if the step contains that."""
    result = {"content": plain_text(message.get("content"))}
    called = str(message.get("tool_call_id"))
    if called in {call["tool_call_id"] for call in step.get("tool_calls", ())}:
        result["source_call_id"] = called
    step.setdefault("observation", {"results": []})["results"].append(result)
