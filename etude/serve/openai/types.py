"""Types of OpenAI's dialect: OpenAI's field names, vLLM's where OpenAI has none, and two of our
own.

Requests reject every field that they do not name. Fields that cannot change an answer (`user`,
`metadata`, ..) are named but not read. Fields that could, and that cannot be honoured
(`logit_bias`, `echo`, ..), are named with only the value that has no effect. `schema.py` derives
the schema from these types, so it always matches the code.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from etude.core.sampling import MAX_PENALTY, VersionSpan

MAX_TOP = 20
"""Limit on the alternatives that are returned per token."""
MAX_STOPS = 4
MAX_STOP_IDS = 1024
MAX_CHOICES = 128

Count = Annotated[int, Meta(ge=1, le=2**31)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]
TokenId = Annotated[int, Meta(ge=0, le=2**31)]
Zero = Annotated[float, Meta(ge=0, le=0)]


UNSUPPORTED = {
    "frequency_penalty": ", or send 0",
    "presence_penalty": ", or send 0",
    "logit_bias": ", or send {}",
    "echo": ", and put the prompt before the answer yourself",
    "best_of": ", or send 1",
    "suffix": "",
    "modalities": ', or send ["text"]',
    "audio": "",
    "functions": ", and use tools",
    "function_call": ", and use tool_choice",
}
"""OpenAI's fields that would change an answer and cannot be honoured, with a hint on what to send
instead."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Not read: streams are never padded to hide lengths."""


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's name for a grammar that the answer must follow. Ours is in the notation of
    llguidance."""

    grammar: str


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """A text that the answer is likely to resemble, such as the file that it is to edit."""

    content: str | list[TextPart | TokenId]
    """A text, whole or in parts; or token ids."""
    type: Literal["content"] = "content"


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both kinds of requests."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    """0 and -1: no limit."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=1 / MAX_PENALTY, le=MAX_PENALTY)] | None = None
    seed: Seed | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Adds `token_ids` and `prompt_token_ids`: exactly what was read and sampled."""
    prediction: Prediction | None = None
    """Makes the answer faster where it is right. The answer is the same in any case."""
    drafts: list[list[TokenId]] | None = None
    """More texts, as token ids, that the answer may repeat parts of, such as earlier answers to the
    same question."""
    # Harmless, not read.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # Not supported: only the value that has no effect.
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=0)] | None = None


class Function(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: Function
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """The required shape of a message. Fields that are not named here are passed on to the chat
    template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None


class Parameters(msgspec.Struct):
    """A JSON schema of an object. Fields that are not named here are passed on unchanged."""

    properties: dict[str, dict[str, Any]] = {}


class ToolFunction(msgspec.Struct):
    # Python's `$` also matches before a final newline. Anthropic allows names twice as long as
    # OpenAI's.
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,128}$(?!\n)")]
    description: str | None = None
    parameters: Parameters | UnsetType = UNSET
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: ToolFunction
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    function: FunctionName
    type: Literal["function"] = "function"


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class JsonObjectFormat(
    msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True
):
    pass


class JsonSchemaFormat(
    msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True
):
    json_schema: JsonSchema


class ChatRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's name for options of the chat template, in addition to messages and tools."""
    reasoning_effort: str | None = None
    """Passed to the chat template, which may ignore it."""
    # Harmless: not read.
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None


class CompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    """A text, token ids, or a list of either."""
    parse_special: bool | None = None
    """Encode control tokens that are spelled out in a text as those tokens. By default they stay
    text, so that a prompt may contain other people's words without filtering."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    """Number of alternatives per token; 0 gives the sampled tokens only."""
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    """Only these end the answer; without the field, the model's own end-of-turn tokens do."""
    structured_outputs: StructuredOutputs | None = None
    routed_experts_from: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    """For a sparse model: adds `routed_experts`, from this position of the prompt on."""
    echo: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None
    suffix: None = None


class CompletionDetails(msgspec.Struct):
    """Counts of draft tokens that were accepted and rejected, from the prediction or from other
    sources."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    """Set if there was a prediction, or drafts."""


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    """Null for a token that is only a part of a character."""


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class ChoiceExtensions(msgspec.Struct, kw_only=True):
    """Fields of every choice beyond OpenAI's; in a stream, in the chunk that ends the choice."""

    token_ids: list[int] | UnsetType = UNSET
    weight_version: list[VersionSpan] | UnsetType = UNSET
    """Weight versions of the sampled tokens, in order: `[{"version": 7, "count": 21}, ..]`."""
    routed_experts: bytes | UnsetType = UNSET
    """Set on request, in base64: [tokens read, sparse layers, experts per token], with one byte per
    id, or two (int16) for more than 256 experts. The last sampled token was not read."""


class AssistantMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    """DeepSeek's name for the field; OpenAI returns no reasoning."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(ChoiceExtensions, kw_only=True):
    index: int
    message: AssistantMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None = None


class TextChoice(ChoiceExtensions, kw_only=True):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: TextLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class ToolCallDelta(ToolCall, kw_only=True):
    index: int


class Delta(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ChoiceExtensions, kw_only=True):
    index: int
    delta: Delta
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    logprobs: ChatLogprobs | None = None


class TextChunkChoice(ChoiceExtensions, kw_only=True):
    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: TextLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class Envelope(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str


class ChatCompletion(Envelope, kw_only=True):
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Envelope, kw_only=True):
    choices: list[TextChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"


class ChatChunk(Envelope, kw_only=True):
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextChunk(Envelope, kw_only=True):
    choices: list[TextChunkChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | None | UnsetType = UNSET


class Model(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "etude"


class Models(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"
