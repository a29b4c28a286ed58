"""Conversion of items to chat requests. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any, TypeVar

import msgspec

from etude.model.tokenizer import Message
from etude.serve.http import ApiError
from etude.serve.openai import types as wire
from etude.serve.responses import types as responses
from etude.store.decoding import convert

T = TypeVar("T")
Lookup = Callable[[str], Mapping[str, Any] | None]
"""Finds an item that was kept, by its id."""

SYSTEM_ROLES = ("system", "developer")
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""A custom tool takes one text. Models see it as a function with one parameter."""


def chat_request(
    asked: responses.InputTokensRequest, messages: Sequence[Message]
) -> wire.ChatRequest:
    """`messages`: the conversation, without the instructions."""
    chat = wire.ChatRequest(messages=_with_instructions(asked.instructions, messages))
    chat.model = asked.model
    chat.tools = [shown for tool in asked.tools or () if (shown := _function(tool)) is not None]
    chat.parallel_tool_calls = asked.parallel_tool_calls
    names = [tool["function"]["name"] for tool in chat.tools]  # whatever they are: not yet checked
    if isinstance(asked.tool_choice, responses.FunctionChoice):
        name = asked.tool_choice.name
        if name is not None and name in names:
            chat.tool_choice = wire.NamedTool(wire.FunctionName(name))
    elif asked.tool_choice != "required" or names:
        chat.tool_choice = asked.tool_choice
    chat.response_format = _format(asked.text)
    chat.reasoning_effort = asked.reasoning.effort if asked.reasoning else None
    chat.chat_template_kwargs = asked.chat_template_kwargs
    if isinstance(asked, responses.ResponsesRequest):
        chat.max_tokens = asked.max_output_tokens
        chat.temperature = asked.temperature
        chat.top_p = asked.top_p
        chat.stream = asked.stream
    return chat


def custom_tools(asked: responses.InputTokensRequest) -> set[str]:
    """The names of tools that take a text instead of an object."""
    return {str(tool.get("name")) for tool in asked.tools or () if tool.get("type") == "custom"}


def chat_messages(items: Sequence[responses.Item], lookup: Lookup) -> list[Message]:
    """The items as messages; neighbouring items of the assistant become one message."""
    said = [_message(_looked_up(item, n, lookup), n) for n, item in enumerate(items)]
    messages: list[Message] = []
    for answered, group in groupby(said, lambda message: message["role"] == "assistant"):
        neighbours = list(group)
        messages += [_joined(neighbours)] if answered else neighbours
    return messages


def listed(said: str | Sequence[responses.Item]) -> list[responses.Item]:
    return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)


def _message(item: responses.Item, number: int) -> Message:
    match item.get("type", "message"):
        case "message":
            said = _read(item, responses.InputItemMessage, number)
            return {"role": said.role, "content": _text(said.content)}
        case "function_call":
            call = _read(item, responses.FunctionCallInput, number)
            return _called(call.call_id, call.name, call.arguments)
        case "custom_tool_call":
            custom = _read(item, responses.CustomCallInput, number)
            arguments = json.dumps({"input": custom.input}, ensure_ascii=False)
            return _called(custom.call_id, custom.name, arguments)
        case "function_call_output" | "custom_tool_call_output":
            result = _read(item, responses.CallOutputInput, number)
            content = _text(result.output)
            return {"role": "tool", "tool_call_id": result.call_id, "content": content}
        case "reasoning":
            thought = _read(item, responses.ReasoningInput, number)
            text = "".join(part.text for part in thought.content or thought.summary or ())
            return {"role": "assistant", "content": None, "reasoning_content": text}
        case kind:
            message = f"input[{number}]: items of type {str(kind)[:100]!r} are not supported"
            raise ApiError(message, param="input")


def _called(id: str, name: str, arguments: str) -> Message:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _joined(answers: Sequence[Message]) -> Message:
    """Join messages in one go, since there may be a hundred thousand."""
    joined = dict(answers[0])
    for key in ("reasoning_content", "content"):
        if text := "".join(answer.get(key) or "" for answer in answers):
            joined[key] = text
    if calls := [call for answer in answers for call in answer.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


def _looked_up(item: responses.Item, number: int, lookup: Lookup) -> responses.Item:
    """The item, or the one that it refers to."""
    if item.get("type") != "item_reference":
        return item
    id = _read(item, responses.ReferenceInput, number).id
    found = lookup(id)
    if found is None:
        raise ApiError(f"input[{number}]: item {id[:200]!r} is not stored here", param="input")
    return dict(found)


def _read(item: responses.Item, kind: type[T], number: int) -> T:
    try:
        return convert(item, kind)
    except (msgspec.ValidationError, RecursionError) as e:
        raise ApiError(f"input[{number}]: {e}", param="input") from e


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.get("refusal") if part.get("type") == "refusal" else part.get("text")
        if not isinstance(text, str):
            kind = str(part.get("type"))[:100]
            message = f"input: this model reads text only; a part of type {kind!r} is not supported"
            raise ApiError(message, param="input")
        texts.append(text)
    return "".join(texts)


def _with_instructions(instructions: str | None, messages: Sequence[Message]) -> list[Message]:
    """The messages with the instructions and all leading system messages joined into one, since
    templates expect only one."""
    leading = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))
    texts = [instructions] if instructions else []
    texts += [message["content"] for message in leading]
    rest = messages[len(leading) :]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest] if texts else list(rest)


def _function(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tool as a function; None for a tool that OpenAI's servers would run."""
    kind, name, description = tool.get("type"), tool.get("name"), tool.get("description")
    if kind not in ("function", "custom"):
        return None
    function: dict[str, Any] = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    if kind == "custom":
        function["parameters"] = CUSTOM_PARAMETERS
    elif tool.get("parameters") is not None:
        function["parameters"] = tool["parameters"]
    return {"type": "function", "function": function}


def _format(
    text: responses.TextConfig | None,
) -> wire.TextFormat | wire.JsonObjectFormat | wire.JsonSchemaFormat | None:
    match text.format if text else None:
        case responses.JsonObjectSpec():
            return wire.JsonObjectFormat()
        case responses.JsonSchemaSpec(schema=schema):
            return wire.JsonSchemaFormat(wire.JsonSchema(schema))
    return None
