"""Requests of other dialects, converted to the request for the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from etude.serve.anthropic import requests as messages_dialect
from etude.serve.anthropic.types import MessagesRequest
from etude.serve.openai import types as wire
from etude.serve.responses import requests as responses_dialect
from etude.serve.responses.types import ResponsesRequest

EDIT = wire.NamedTool(wire.FunctionName("edit"))


def of_messages(**more: Any) -> wire.ChatRequest:
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "read"}],
        "tools": [{"name": "edit", "input_schema": {"type": "object"}}],
    }
    return messages_dialect.chat_request(msgspec.convert(body | more, MessagesRequest))


def of_responses(**more: Any) -> wire.ChatRequest:
    tools = [{"type": "function", "name": "edit", "parameters": {"type": "object"}}]
    body = {"model": "m", "input": "read", "tools": tools}
    asked = msgspec.convert(body | more, ResponsesRequest)
    return responses_dialect.chat_request(asked, [{"role": "user", "content": "read"}])


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "edit"}, EDIT),
    ],
)
def test_which_tool_a_message_is_to_call(said: Any, means: Any) -> None:
    chat = of_messages(tool_choice=said)
    assert (chat.tool_choice, chat.parallel_tool_calls) == (means, None)
    alone = of_messages(tool_choice=said | {"disable_parallel_tool_use": True})
    assert (alone.tool_choice, alone.parallel_tool_calls) == (means, False)


@pytest.mark.parametrize("of", [of_messages, of_responses])
def test_a_tool_is_shown_with_its_parameters(of: Callable[..., wire.ChatRequest]) -> None:
    schema = {"type": "object", "properties": {"line": {"type": "integer"}}}
    written = "input_schema" if of is of_messages else "parameters"
    tool = {"type": "function"} if of is of_responses else {}
    told = {"name": "edit", "description": "Edits.", written: schema}
    assert of(tools=[tool | told]).tools == [
        {
            "type": "function",
            "function": {"name": "edit", "description": "Edits.", "parameters": schema},
        }
    ]


def test_how_much_a_message_is_to_be_thought_about() -> None:
    assert of_messages().reasoning_effort is None
    assert of_messages(output_config={"effort": "low"}).reasoning_effort == "low"


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "edit"}, EDIT),
        ({"type": "function", "name": "no-such"}, None),
    ],
)
def test_which_tool_a_response_is_to_call(said: Any, means: Any) -> None:
    chat = of_responses(tool_choice=said, parallel_tool_calls=False)
    assert (chat.tool_choice, chat.parallel_tool_calls) == (means, False)


def test_without_tools_none_is_required() -> None:
    assert of_responses(tool_choice="required", tools=[]).tool_choice is None


def test_an_answer_may_have_to_follow_a_schema() -> None:
    schema = {"type": "object", "required": ["a"]}
    said = {"format": {"type": "json_schema", "schema": schema}}
    chat = of_messages(output_config=said)
    assert chat.response_format == wire.JsonSchemaFormat(wire.JsonSchema(schema))
    assert chat.reasoning_effort is None
    assert of_messages(output_config={"effort": "low"}).response_format is None


def test_many_parts_are_one_message() -> None:
    """As many parts as a body may have. Joining them one by one, copying each time, would keep a
    server busy for minutes."""
    calls = [
        {"type": "function_call", "call_id": f"{n}", "name": "edit", "arguments": "{}"}
        for n in range(50_000)
    ]
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "why"}]}
    said = [{"role": "assistant", "content": text} for text in ("so", " be it")]
    (message,) = responses_dialect.chat_messages([thought, *said, *calls], lambda id: None)
    assert (message["reasoning_content"], message["content"]) == ("why", "so be it")
    assert [call["id"] for call in message["tool_calls"]] == [call["call_id"] for call in calls]
    many = [{"role": role, "content": "x"} for role in ("system", "developer") * 50_000]
    asked = ResponsesRequest(input="", instructions="say")
    read = {"role": "user", "content": "read"}
    chat = responses_dialect.chat_request(asked, [*many, read, many[0]])
    system = {"role": "system", "content": "\n\n".join(["say", *"x" * 100_000])}
    assert chat.messages == [system, read, many[0]]
    result = {"type": "tool_result", "tool_use_id": "a", "content": "ok"}
    text = {"type": "text", "text": "x"}
    blocks = [text, result, result, *[text] * 200_000]
    chat = of_messages(messages=[{"role": "user", "content": blocks}])
    assert [message["role"] for message in chat.messages] == ["user", "tool", "tool", "user"]
    assert chat.messages[-1]["content"] == "\n".join("x" * 200_000)
