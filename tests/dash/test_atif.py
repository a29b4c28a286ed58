"""Sessions in ATIF, field by field as Harbor 0.25 publishes it (`harbor.models.trajectories`):
required fields, optional fields, and the rules between them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from etude.core.types import Trajectory
from etude.dash.atif import trajectory as in_atif
from etude.dash.detail import conversation
from etude.dash.exports import export
from etude.dash.recorded import RecordedRun
from etude.dash.session import read_session
from etude.store.rollouts import group_rows
from etude.store.runs import Run
from tests.dash.recorded_store import ALL_HOSTILE, group, trajectory, write_run

# name -> (required, type)
Fields = dict[str, tuple[bool, type | tuple[type, ...]]]
TRAJECTORY: Fields = {
    "schema_version": (True, str), "session_id": (False, str), "trajectory_id": (False, str),
    "agent": (True, dict), "steps": (True, list), "notes": (False, str),
    "final_metrics": (False, dict), "continued_trajectory_ref": (False, str),
    "extra": (False, dict), "subagent_trajectories": (False, list),
}  # fmt: skip
AGENT: Fields = {
    "name": (True, str), "version": (True, str), "model_name": (False, str),
    "tool_definitions": (False, list), "extra": (False, dict),
}  # fmt: skip
STEP: Fields = {
    "step_id": (True, int), "timestamp": (False, str), "source": (True, str),
    "model_name": (False, str), "reasoning_effort": (False, (str, float)), "message": (True, str),
    "reasoning_content": (False, str), "tool_calls": (False, list), "observation": (False, dict),
    "metrics": (False, dict), "is_copied_context": (False, bool), "llm_call_count": (False, int),
    "extra": (False, dict),
}  # fmt: skip
CALL: Fields = {
    "tool_call_id": (True, str), "function_name": (True, str), "arguments": (True, dict),
    "extra": (False, dict),
}  # fmt: skip
OBSERVATION: Fields = {"results": (True, list)}
RESULT: Fields = {
    "source_call_id": (False, str), "content": (False, str),
    "subagent_trajectory_ref": (False, list), "extra": (False, dict),
}  # fmt: skip
FINAL: Fields = {
    "total_prompt_tokens": (False, int), "total_completion_tokens": (False, int),
    "total_cached_tokens": (False, int), "total_cost_usd": (False, float),
    "total_steps": (False, int), "extra": (False, dict),
}  # fmt: skip
AGENT_ONLY = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}


def check(value: dict[str, Any], wanted: Fields) -> None:
    assert value.keys() <= wanted.keys()
    for name, (required, kind) in wanted.items():
        assert name in value or not required, name
        assert name not in value or isinstance(value[name], kind), (name, value[name])


def check_trajectory(found: dict[str, Any]) -> None:
    check(found, TRAJECTORY)
    check(found["agent"], AGENT)
    check(found["final_metrics"], FINAL)
    assert found["schema_version"] == "ATIF-v1.7"
    assert [step["step_id"] for step in found["steps"]] == [*range(1, 1 + len(found["steps"]))]
    assert found["steps"] and found["final_metrics"]["total_steps"] == len(found["steps"])
    for step in found["steps"]:
        check(step, STEP)
        assert step["source"] in ("system", "user", "agent")
        assert step["source"] == "agent" or not AGENT_ONLY & step.keys()
        for call in step.get("tool_calls", ()):
            check(call, CALL)
        called = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        if "observation" in step:
            check(step["observation"], OBSERVATION)
        for result in step.get("observation", {"results": ()})["results"]:
            check(result, RESULT)
            assert result.get("source_call_id") in {*called, None}


def atif(t: Trajectory) -> dict[str, Any]:
    (row,) = group_rows(group(1, t))
    found: dict[str, Any] = json.loads(json.dumps(in_atif(t, row)))
    check_trajectory(found)
    return found


def test_every_session_of_a_run(tmp_path: Path) -> None:
    run = Run.open(f"file:{tmp_path}/x")
    write_run(run)
    recorded = RecordedRun("x", run)
    recorded.refresh()
    rows = [row for row in recorded.table.rows if row.object]
    found = [json.loads(line) for line in export(recorded, rows, "atif.jsonl")]
    assert [each["session_id"] for each in found] == [row.id for row in rows]
    for each in found:
        check_trajectory(each)
    first, second = (each for each in found if each["extra"]["group"] == "g000001")
    assert (first["extra"]["score"]["reward"], first["extra"]["step"]) == (1.0, 2)
    assert [step["source"] for step in second["steps"]] == ["user", "agent"]
    assert second["steps"][1] == {
        "step_id": 2,
        "source": "agent",
        "message": ALL_HOSTILE,
        "tool_calls": [
            {
                "tool_call_id": "c1",
                "function_name": f"edit{ALL_HOSTILE}",
                "arguments": {"x": ALL_HOSTILE},
            }
        ],
        "observation": {"results": [{"content": f"error: {ALL_HOSTILE}", "source_call_id": "c1"}]},
    }


def call(arguments: object, **id: str) -> dict[str, Any]:
    return {"function": {"name": "run", "arguments": arguments}, **id}


@pytest.mark.parametrize(
    ("messages", "sources"),
    [
        ([{"role": "tool", "content": "who asked?"}], ["system"]),
        ([{"role": "developer", "content": "be brief"}, {"role": "user"}], ["system", "user"]),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "b"}]}], ["user"]),
        (
            [
                {"role": "assistant", "reasoning_content": "", "tool_calls": [call("{"), call(1)]},
                {"role": "tool", "content": "a", "tool_call_id": "call-1"},
                {"role": "tool", "content": "b", "tool_call_id": "of nobody"},
                {"role": "assistant", "content": "done", "tool_calls": [call([1], id="x")]},
            ],
            ["agent", "agent"],
        ),
        ([{"content": "?"}, {"role": "assistant", "tool_calls": ["x"]}], ["system", "agent"]),
    ],
)  # fmt: skip
def test_whatever_an_agent_left(messages: list[dict[str, Any]], sources: list[str]) -> None:
    found = atif(replace(trajectory("g000001.0", None), messages=messages))
    assert [step["source"] for step in found["steps"]] == sources


def test_arguments_that_are_no_object_are_kept_aside() -> None:
    said = {"role": "assistant", "tool_calls": [call("{oh", id="c1")]}
    step = atif(replace(trajectory("g000001.0", 1.0), messages=[said]))["steps"][0]
    assert step["tool_calls"][0]["arguments"] == {}
    assert step["tool_calls"][0]["extra"] == {"arguments": "{oh"}


@pytest.mark.parametrize(
    "written",
    [
        "[" * 100_000,
        '{"x": ' + "[" * 100_000,
        '{"x": NaN}',
        '{"x": -Infinity}',
        '{"x": 1e999}',
        '{"x": "\\ud800"}',
        '{"x": ' + "9" * 10_000 + "}",
    ],
    ids=["deep", "deep within", "NaN", "Infinity", "too large", "half a pair", "digits"],
)
def test_what_a_model_wrote_breaks_neither_export_nor_page(written: str) -> None:
    said = {"role": "assistant", "tool_calls": [call(written, id="c1")]}
    t = replace(trajectory("g000001.0", 1.0), messages=[said])
    line = json.dumps(atif(t), ensure_ascii=False, allow_nan=False).encode()
    assert json.loads(line)["steps"][0]["tool_calls"][0]["extra"] == {"arguments": written}
    page = json.loads(msgspec.json.encode(conversation(t)))
    assert page["turns"][0]["calls"][0]["arguments"] == {"": written}
    assert read_session(t, None)[0].who == "call"


def test_no_depth_is_readable_and_cannot_be_written() -> None:
    for depth in range(700, 1000):
        said = {
            "role": "assistant",
            "tool_calls": [call('{"x": ' + "[" * depth + "]" * depth + "}")],
        }
        t = replace(trajectory("g000001.0", 1.0), messages=[said])
        json.dumps(atif(t))
        msgspec.json.encode(conversation(t))
