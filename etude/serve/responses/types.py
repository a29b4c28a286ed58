"""Types of the Responses dialect. Fields that are not named here are ignored, and so are tools that
OpenAI's own servers would run, since its clients send more of both with every release.
docs/serve.md lists the fields that are named but not honoured."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from etude.serve.openai.types import Count, Fraction, Temperature

Item = dict[str, Any]
"""An item of a conversation: a message, a call or its result, or reasoning. Items are decoded as
plain objects, because clients send back what they received, with fields of their own."""


class TextPart(msgspec.Struct):
    text: str
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"] = "text"


class InputItemMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    type: Literal["message"] = "message"


class FunctionCallInput(msgspec.Struct):
    call_id: str
    name: str
    arguments: str


class CustomCallInput(msgspec.Struct):
    call_id: str
    name: str
    input: str


class CallOutputInput(msgspec.Struct):
    call_id: str
    output: str | list[dict[str, Any]]


class ReasoningInput(msgspec.Struct):
    content: list[TextPart] | None = None
    summary: list[TextPart] | None = None


class ReferenceInput(msgspec.Struct):
    id: str


class FunctionChoice(msgspec.Struct):
    """One tool by name. Kinds of tools that are not known here leave the choice to the model."""

    type: str
    name: str | None = None


class TextFormatSpec(msgspec.Struct, tag_field="type", tag="text"):
    pass


class JsonObjectSpec(msgspec.Struct, tag_field="type", tag="json_object"):
    pass


class JsonSchemaSpec(msgspec.Struct, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]
    name: str | None = None


class TextConfig(msgspec.Struct):
    format: TextFormatSpec | JsonObjectSpec | JsonSchemaSpec | None = None


class ReasoningConfig(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class InputTokensRequest(msgspec.Struct, kw_only=True):
    input: str | list[Item] = ""
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """As in chat completions."""


class ResponsesRequest(InputTokensRequest, kw_only=True):
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    """Returned with the response."""
    background: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] | None = None
    """Only false is allowed: there are no background responses."""


Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[Any] = []


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class CustomCallItem(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    status: Status
    call_id: str
    name: str
    input: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem


class InputDetails(msgspec.Struct):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    """Not counted."""


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class Incomplete(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(msgspec.Struct):
    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: ReasoningConfig
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    object: Literal["response"] = "response"


class Deleted(msgspec.Struct):
    id: str
    deleted: Literal[True] = True
    object: Literal["response"] = "response"


class ItemList(msgspec.Struct):
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class StreamEvent(msgspec.Struct, kw_only=True):
    """An event of a stream. Its further fields depend on its type, as in OpenAI's API."""

    type: str
    sequence_number: int
