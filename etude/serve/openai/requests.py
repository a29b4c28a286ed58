"""Conversion of OpenAI's request bodies to sampling requests, one per choice."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from etude.core.sampling import Request, SamplingParams
from etude.core.seeds import derive
from etude.model.tokenizer import Message, Tool
from etude.serve.answerer import ServedModel
from etude.serve.grammar import ANY_OBJECT, GrammarBuilder
from etude.serve.headers import Scheduling
from etude.serve.http import ApiError, read
from etude.serve.openai import types as wire
from etude.store.decoding import convert

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""
SEEDS = 2**63
PARAMETERS = tuple(field.name for field in fields(SamplingParams))
T = TypeVar("T")
GUESSED_CONTEXTS = 4
"""Limit on prediction and drafts together, as a multiple of the model's context."""


async def chat_requests(
    model: ServedModel, asked: wire.ChatRequest, prompt: Sequence[int], scheduling: Scheduling
) -> list[Request]:
    limit = asked.max_completion_tokens or asked.max_tokens or model.default_max_tokens
    grammar = _chat_grammar(model.grammars, asked)
    if grammar is not None and model.tokenizer.begins_reasoning(prompt):
        grammar = model.grammars.after_reasoning(grammar)
    return await _requests(
        model, asked, [prompt], limit, scheduling, stop_token_ids=model.tokenizer.stop_token_ids,
        grammar=grammar, top_logprobs=asked.top_logprobs or 0,
    )  # fmt: skip


async def completion_requests(
    model: ServedModel, asked: wire.CompletionRequest, scheduling: Scheduling
) -> list[Request]:
    if asked.echo:
        raise _unsupported("echo")
    stops = model.tokenizer.stop_token_ids
    if asked.stop_token_ids is not None:
        stops = tuple(asked.stop_token_ids)
    grammar = asked.structured_outputs.grammar if asked.structured_outputs else None
    if grammar is not None:
        stops = (*stops, model.tokenizer.eos_token_id)
    return await _requests(
        model, asked, await _prompts(model, asked), asked.max_tokens or COMPLETION_TOKENS,
        scheduling, stop_token_ids=stops, grammar=grammar, top_logprobs=asked.logprobs or 0,
        experts_from=asked.routed_experts_from,
    )  # fmt: skip


def sampling_params(asked: wire.Sampling, grammar: str | None) -> SamplingParams:
    """The parameters that a request sets, by name; the others keep their defaults."""
    given = {
        name: value for name in PARAMETERS if (value := getattr(asked, name, None)) is not None
    }
    given["top_k"] = max(given.get("top_k", 0), 0)
    return SamplingParams(**given, grammar=grammar)


async def _requests(
    model: ServedModel, asked: wire.Sampling, prompts: Sequence[Sequence[int]], limit: int,
    scheduling: Scheduling, *, stop_token_ids: tuple[int, ...], grammar: str | None,
    top_logprobs: int, experts_from: int | None = None,
) -> list[Request]:  # fmt: skip
    if asked.stream_options is not None and not asked.stream:
        raise ApiError("stream_options: allowed only with stream", param="stream_options")
    for prompt in prompts:
        if len(prompt) >= model.max_context:
            message = (
                f"the prompt has {len(prompt)} tokens, which leaves no room for an answer in a "
                f"context of {model.max_context}"
            )
            raise ApiError(message, code="context_length_exceeded")
    prediction, drafts = await _guesses(model, asked)
    seed = secrets.randbits(63) if asked.seed is None else asked.seed % SEEDS
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    params, deadline_s = sampling_params(asked, grammar), scheduling.deadline_s()
    return [
        Request(
            prompt=prompt,
            max_tokens=min(limit, model.max_context - len(prompt)),
            params=params,
            adapter=model.adapter(asked.model),
            stop_token_ids=stop_token_ids,
            stop=stop,
            top_logprobs=top_logprobs,
            experts_from=experts_from,
            seed=seed if number == 0 else derive(seed, number),
            prediction=prediction,
            drafts=drafts,
            priority=scheduling.priority,
            deadline_s=deadline_s,
        )
        for prompt in map(tuple, prompts)
        for number in range(asked.n or 1)
    ]


async def _guesses(
    model: ServedModel, asked: wire.Sampling
) -> tuple[tuple[int, ...] | None, tuple[tuple[int, ...], ...]]:
    """The token ids of prediction and drafts."""
    prediction = None
    if asked.prediction is not None:
        prediction = await _prediction_tokens(model, asked.prediction.content)
    drafts = tuple(map(tuple, asked.drafts or ()))
    most = GUESSED_CONTEXTS * model.max_context
    guessed = len(prediction or ())
    if guessed + sum(1 + len(draft) for draft in drafts) > most:
        param = "prediction" if guessed > most else "drafts"
        raise ApiError(f"{param}: prediction and drafts together exceed {most} tokens", param=param)
    return prediction, drafts


async def _prediction_tokens(model: ServedModel, content: str | list[Any]) -> tuple[int, ...]:
    if not isinstance(content, str):
        kinds = set(map(type, content))
        if kinds <= {int}:
            return tuple(content)
        if int in kinds:
            raise ApiError(
                "prediction: content must be text or token ids, not both", param="prediction"
            )
        content = "".join(part.text for part in content)
    return tuple((await model.encode([content], "prediction", GUESSED_CONTEXTS))[0])


async def _prompts(model: ServedModel, asked: wire.CompletionRequest) -> Sequence[Sequence[int]]:
    prompt = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    model.concurrency.check(len(prompt) * (asked.n or 1), "prompt" if len(prompt) > 1 else "n")
    if kinds == {str}:
        plain = not asked.parse_special
        return await model.encode(prompt, "prompt", plain=plain)  # type: ignore[arg-type]
    if kinds == {list}:
        return prompt  # type: ignore[return-value]
    raise ApiError(
        "prompt: must be a string, token ids, a list of strings, or a list of lists of token ids",
        param="prompt",
    )


def _chat_grammar(grammars: GrammarBuilder, asked: wire.ChatRequest) -> str | None:
    schema: Mapping[str, Any] | None = None
    if isinstance(asked.response_format, wire.JsonObjectFormat):
        schema = ANY_OBJECT
    elif isinstance(asked.response_format, wire.JsonSchemaFormat):
        schema = asked.response_format.json_schema.schema
    parallel = asked.parallel_tool_calls is not False
    tools = asked.tools or []
    if tools and not grammars.enforces_calls:
        if asked.tool_choice not in (None, "auto", "none"):
            message = "tool_choice: tool calls cannot be enforced for this model's family; use auto"
            raise ApiError(message, param="tool_choice")
        if schema is not None and asked.tool_choice != "none":
            message = "response_format: cannot be combined with tools for this model's family"
            raise ApiError(message, param="response_format")
        parallel = True
    match asked.tool_choice:
        case wire.NamedTool(function=function):
            chosen = [tool for tool in tools if tool["function"]["name"] == function.name]
            return grammars.calls(chosen, parallel=False)
        case "required":
            return grammars.calls(tools, parallel=parallel)
        case None | "auto" if tools:
            if schema is not None:
                return grammars.calls(tools, parallel=parallel, otherwise=schema)
            return None if parallel else grammars.one_call_at_most(tools)
    return None if schema is None else grammars.text(schema)


async def read_body(http: HttpRequest, type: type[T]) -> T:
    """Read a body. Raises a clear error for a field of OpenAI's that this server does not
    support."""
    try:
        return await read(http, type)
    except ApiError as e:
        if e.param in wire.UNSUPPORTED:
            raise _unsupported(e.param) from e
        raise


def _unsupported(param: str) -> ApiError:
    message = f"{param} is not supported by this server: remove it{wire.UNSUPPORTED[param]}"
    return ApiError(message, code="unsupported_parameter", param=param)


def template_options(asked: wire.ChatRequest) -> dict[str, Any]:
    """Options for the chat template, in addition to messages and tools; most templates ignore
    them."""
    effort = {} if asked.reasoning_effort is None else {"reasoning_effort": asked.reasoning_effort}
    return effort | (asked.chat_template_kwargs or {})


def callable_tools(asked: wire.ChatRequest) -> list[Tool] | None:
    """The tools that the model may call; None if text that looks like a call is to stay text."""
    return asked.tools if asked.tools and asked.tool_choice != "none" else None


async def read_chat(http: HttpRequest, max_context: int) -> wire.ChatRequest:
    return checked_chat(await read_body(http, wire.ChatRequest), max_context)


def checked_chat(asked: wire.ChatRequest, max_context: int) -> wire.ChatRequest:
    """The request with all message contents as text. Raises for an invalid chat."""
    for place, values, shape in (
        ("messages", asked.messages, wire.ChatMessage),
        ("tools", asked.tools or [], wire.Tool),
    ):
        for number, value in enumerate(values):
            try:
                convert(value, shape)
            except (msgspec.ValidationError, RecursionError) as e:
                raise ApiError(f"{place}[{number}]: {e}", param=place) from e
    num_shown = sum(1 + len(message.get("tool_calls") or ()) for message in asked.messages)
    for place, count in (("messages", num_shown), ("tools", len(asked.tools or ()))):
        if count > max_context:  # each of them, and each call, takes at least one token
            message = f"{place}: {count} do not fit into a context of {max_context} tokens"
            raise ApiError(message, code="context_length_exceeded", param=place)
    names = [tool["function"]["name"] for tool in asked.tools or []]
    if len(set(names)) != len(names):
        raise ApiError(f"tools: names must be unique: {names}", param="tools")
    if (
        isinstance(asked.tool_choice, wire.NamedTool)
        and asked.tool_choice.function.name not in names
    ):
        raise ApiError(
            f"tool_choice: no tool is named {asked.tool_choice.function.name!r}",
            param="tool_choice",
        )
    if asked.tool_choice == "required" and not names:
        raise ApiError("tool_choice: required, but no tools are given", param="tool_choice")
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError("top_logprobs: allowed only with logprobs", param="top_logprobs")
    asked.messages = [_plain(message) for message in asked.messages]
    return asked


def _plain(message: Message) -> Message:
    """The message with its content as text, which chat templates expect; clients may send it in
    parts."""
    if not isinstance(content := message.get("content"), list):
        return message
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = str(part.get("type"))[:100]
            raise ApiError(
                f"messages: this model reads text only; a part of type {kind!r} is not "
                f'supported, only {{"type": "text", "text": ..}}',
                param="messages",
            )
    return message | {"content": "".join(part["text"] for part in content)}
