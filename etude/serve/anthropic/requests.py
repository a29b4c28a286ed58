"""Conversion of Anthropic's request bodies to chat requests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from etude.model.tokenizer import Message
from etude.serve.anthropic import types as anthropic
from etude.serve.http import ApiError
from etude.serve.openai import types as wire


def chat_request(asked: anthropic.TokenCountRequest) -> wire.ChatRequest:
    messages = [message for said in asked.messages for message in _messages(said)]
    if asked.system:
        messages.insert(0, {"role": "system", "content": _text(asked.system)})
    chat = wire.ChatRequest(messages=messages, model=asked.model)
    chat.tools = [_tool(tool) for tool in asked.tools or () if tool.input_schema is not None]
    _choose(chat, asked.tool_choice)
    _configure(chat, asked)
    if isinstance(asked, anthropic.MessagesRequest):
        chat.max_tokens = asked.max_tokens
        chat.stop = asked.stop_sequences
        chat.stream = asked.stream
        chat.temperature = asked.temperature
        chat.top_p = asked.top_p
        chat.top_k = asked.top_k
    return chat


def _messages(said: anthropic.InputMessage) -> list[Message]:
    """One message of Anthropic's as one or several chat messages: tool results become messages of
    their own."""
    if isinstance(said.content, str):
        return [{"role": said.role, "content": said.content}]
    if said.role == "assistant":
        return [_answer(said.content)]
    messages: list[Message] = []
    for _, neighbours in groupby(said.content, _is_result):
        blocks = list(neighbours)
        if results := [block for block in blocks if isinstance(block, anthropic.ToolResultBlock)]:
            messages += map(_result, results)
        else:
            messages.append({"role": said.role, "content": _text(blocks)})
    return messages


def _is_result(block: anthropic.Block) -> bool:
    return isinstance(block, anthropic.ToolResultBlock)


def _result(block: anthropic.ToolResultBlock) -> Message:
    content = _text(block.content or "")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _answer(blocks: Iterable[anthropic.Block]) -> Message:
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case anthropic.ThinkingBlock(thinking=thinking):
                reasoning += thinking
            case anthropic.RedactedThinkingBlock():
                pass
            case anthropic.ToolUseBlock(id=id, name=name, input=input):
                function = {"name": name, "arguments": json.dumps(input, ensure_ascii=False)}
                calls.append({"id": id, "type": "function", "function": function})
            case _:
                content += _text([block])
    message: Message = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def _text(said: str | Sequence[anthropic.Block]) -> str:
    if isinstance(said, str):
        return said
    for block in said:
        if not isinstance(block, anthropic.TextBlock):
            kind = block.__struct_config__.tag
            raise ApiError(
                f"messages: this model reads text only; a block of type {kind!r} is not supported",
                param="messages",
            )
    return "\n".join(block.text for block in said if isinstance(block, anthropic.TextBlock))


def _tool(tool: anthropic.ToolDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choose(chat: wire.ChatRequest, choice: anthropic.ToolChoice | None) -> None:
    if choice is None:
        return
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    match choice.type:
        case "any":
            chat.tool_choice = "required"
        case "tool":
            chat.tool_choice = wire.NamedTool(wire.FunctionName(choice.name or ""))
        case "auto" | "none":
            chat.tool_choice = choice.type


def _configure(chat: wire.ChatRequest, asked: anthropic.TokenCountRequest) -> None:
    if asked.thinking is not None:
        chat.chat_template_kwargs = {"enable_thinking": asked.thinking.type != "disabled"}
    if asked.output_config is None:
        return
    chat.reasoning_effort = asked.output_config.effort
    if (form := asked.output_config.format) is not None:
        chat.response_format = wire.JsonSchemaFormat(wire.JsonSchema(form.schema))
