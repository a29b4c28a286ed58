"""The OpenAI-compatible API over a `Policy`: chat completions with tools, completions with text or
token ids.

An HTTP request becomes sampling requests, one for each choice that it wants; the policy answers
them with samples; a builder shows those as chat or as text, whole or as they come. What goes beyond
OpenAI is in `protocol.py`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from etude.core.protocols import Policy
from etude.core.sampling import Request, Sample, SamplingParams, Token, expand_spans
from etude.core.seeds import derive
from etude.model.tokenizer import ChatTokenizer, Message
from etude.serve import protocol as wire
from etude.serve.grammar import ANY_OBJECT, GrammarBuilder
from etude.serve.headers import Scheduling, read_scheduling
from etude.serve.http import (
    ApiError,
    EventStream,
    SendEvent,
    Unavailable,
    cancel_on_disconnect,
    gather,
    read,
    respond,
    respond_negotiated,
)
from etude.serve.metrics import Metrics
from etude.serve.openapi import document
from etude.serve.response_builders import ChatResponseBuilder, ResponseBuilder, TextResponseBuilder

COMPLETION_TOKENS = 16
"""OpenAI's default for completions. A chat answer may fill the context."""
SEEDS = 2**63
AT_ONCE_CHARS = 20_000
"""More than this is rendered and encoded on another thread, so that the port answers meanwhile. For
less, the way there and back takes longer than the work."""
GUESSED_CONTEXTS = 4
"""Prediction and drafts together have at most this many times the tokens of a context."""

T = TypeVar("T")


class ConcurrencyLimit:
    """A limit on the number of answers under way at once."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.in_use = 0

    def check(self, count: int, param: str = "n") -> None:
        """Of one request: more than all that there are will never be free."""
        limit = wire.MAX_ANSWERS if self.limit is None else self.limit
        if count > limit:
            message = f"{param}: this server gives at most {limit} answers at once, not {count}"
            raise ApiError(message, param=param)

    @contextmanager
    def acquire(self, count: int) -> Iterator[None]:
        self.check(count)
        if self.limit is not None and self.in_use + count > self.limit:
            message = (
                f"{self.in_use} answers are under way, and {self.limit} are the most: try again "
                f"soon"
            )
            raise Unavailable(message, status=429, code="too_many_requests")
        self.in_use += count
        try:
            yield
        finally:
            self.in_use -= count


class Api:
    """The HTTP handlers of the API. A gateway or a worker adds routes of its own to `routes()`."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: ChatTokenizer,
        grammars: GrammarBuilder,
        *,
        max_context: int,
        model: str | None = None,
        max_answers: int | None = None,
    ) -> None:
        """Without a `model` name, requests may use any."""
        self.policy = policy
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.concurrency = ConcurrencyLimit(max_answers)
        self.metrics = Metrics()
        self._grammars = grammars
        self._model = model

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.get_model),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
            Route("/openapi.json", self.openapi),
        ]

    async def chat(self, http: HttpRequest) -> Response:
        scheduling = read_scheduling(http.headers)
        asked = await read_chat(http, self.max_context)
        with template_errors():
            size = sum(len(message.get("content") or "") for message in asked.messages)
            text = await in_thread_if_long(
                size, lambda: self.tokenizer.render(asked.messages, asked.tools or (), answer=True)
            )
            (prompt,) = await self.encode([text], "messages")
        builder, requests = await self.chat_request(asked, prompt, scheduling)
        return await self._answer(http, asked, builder, requests)

    async def encode(self, texts: Sequence[str], param: str, contexts: int = 1) -> list[list[int]]:
        """Texts that cannot fit are refused before they are encoded, which may take long."""
        most = contexts * self.max_context
        if any(self.tokenizer.exceeds(text, most) for text in texts):
            message = f"{param}: the text is too long for {most} tokens, whatever they are"
            raise ApiError(message, code="context_length_exceeded", param=param)
        size = sum(map(len, texts))
        long = size > AT_ONCE_CHARS
        return await in_thread_if_long(
            size, lambda: [self.tokenizer.encode(text, long=long) for text in texts]
        )

    async def chat_request(
        self, asked: wire.ChatRequest, prompt: Sequence[int], scheduling: Scheduling
    ) -> tuple[ChatResponseBuilder, list[Request]]:
        may_call = asked.tools and asked.tool_choice != "none"
        builder = ChatResponseBuilder(
            tokenizer=self.tokenizer, model=self._model_name(asked), prompt=prompt,
            with_ids=bool(asked.return_token_ids), with_logprobs=bool(asked.logprobs),
            tools=asked.tools if may_call else None,
        )  # fmt: skip
        limit = asked.max_completion_tokens or asked.max_tokens or self.max_context
        requests = await self._requests(
            asked, [prompt], limit, scheduling, stop_token_ids=self.tokenizer.stop_token_ids,
            grammar=self._grammar(asked), top_logprobs=asked.top_logprobs or 0,
        )  # fmt: skip
        return builder, requests

    def _grammar(self, asked: wire.ChatRequest) -> str | None:
        schema: Mapping[str, Any] | None = None
        if isinstance(asked.response_format, wire.JsonObjectFormat):
            schema = ANY_OBJECT
        elif isinstance(asked.response_format, wire.JsonSchemaFormat):
            schema = asked.response_format.json_schema.schema
        parallel, tools = asked.parallel_tool_calls is not False, asked.tools or []
        match asked.tool_choice:
            case wire.NamedTool(function=function):
                chosen = [tool for tool in tools if tool["function"]["name"] == function.name]
                return self._grammars.calls(chosen, parallel=False)
            case "required":
                return self._grammars.calls(tools, parallel=parallel)
            case None | "auto" if tools:
                if schema is not None:
                    return self._grammars.calls(tools, parallel=parallel, otherwise=schema)
                return None if parallel else self._grammars.one_call_at_most(tools)
        return None if schema is None else self._grammars.text(schema)

    async def completions(self, http: HttpRequest) -> Response:
        scheduling = read_scheduling(http.headers)
        asked = await read(http, wire.CompletionRequest)
        if asked.echo:
            raise ApiError(
                "echo: the prompt is not repeated; leave it out, and put your prompt first",
                param="echo",
            )
        self.check_version(asked.min_weight_version)
        builder = TextResponseBuilder(
            tokenizer=self.tokenizer, model=self._model_name(asked),
            with_ids=bool(asked.return_token_ids), with_logprobs=asked.logprobs is not None,
            with_text=asked.detokenize is not False,
        )  # fmt: skip
        stops = (
            self.tokenizer.stop_token_ids
            if asked.stop_token_ids is None
            else tuple(asked.stop_token_ids)
        )
        grammar = asked.structured_outputs.grammar if asked.structured_outputs else None
        if grammar is not None:
            stops = (*stops, self.tokenizer.eos_token_id)
        requests = await self._requests(
            asked, await self._prompts(asked), asked.max_tokens or COMPLETION_TOKENS, scheduling,
            grammar=grammar, stop_token_ids=stops, top_logprobs=asked.logprobs or 0,
        )  # fmt: skip
        requests = [
            replace(request, experts_from=asked.routed_experts_from) for request in requests
        ]
        return await self._answer(http, asked, builder, requests)

    async def _prompts(self, asked: wire.CompletionRequest) -> Sequence[Sequence[int]]:
        prompt = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return [prompt]  # type: ignore[list-item]
        self.concurrency.check(len(prompt) * (asked.n or 1), "prompt" if len(prompt) > 1 else "n")
        if kinds == {str}:
            return await self.encode(prompt, "prompt")  # type: ignore[arg-type]
        if kinds == {list}:
            return prompt  # type: ignore[return-value]
        raise ApiError(
            "prompt: a text, token ids, a list of texts, or a list of lists of token ids",
            param="prompt",
        )

    async def _requests(
        self, asked: wire.Sampling, prompts: Sequence[Sequence[int]], limit: int,
        scheduling: Scheduling, *,
        stop_token_ids: tuple[int, ...], grammar: str | None, top_logprobs: int,
    ) -> list[Request]:  # fmt: skip
        if asked.stream_options is not None and not asked.stream:
            raise ApiError("stream_options: only with stream", param="stream_options")
        for prompt in prompts:
            if len(prompt) >= self.max_context:
                message = (
                    f"the prompt has {len(prompt)} tokens, which leaves no room in a context of "
                    f"{self.max_context}"
                )
                raise ApiError(message, code="context_length_exceeded")
        prediction = (
            None
            if asked.prediction is None
            else await self._prediction_tokens(asked.prediction.content)
        )
        drafts = tuple(map(tuple, asked.drafts or ()))
        most, guessed = GUESSED_CONTEXTS * self.max_context, len(prediction or ())
        if guessed + sum(1 + len(draft) for draft in drafts) > most:
            param = "prediction" if guessed > most else "drafts"
            raise ApiError(
                f"{param}: prediction and drafts are more than {most} tokens together", param=param
            )
        seed = secrets.randbits(63) if asked.seed is None else asked.seed % SEEDS
        params, deadline_s = sampling_params(asked, grammar), scheduling.deadline_s()
        stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
        return [
            Request(
                prompt=prompt,
                max_tokens=min(limit, self.max_context - len(prompt)),
                params=params,
                stop_token_ids=stop_token_ids,
                stop=stop,
                top_logprobs=top_logprobs,
                seed=seed if number == 0 else derive(seed, number),
                prediction=prediction,
                drafts=drafts,
                priority=scheduling.priority,
                deadline_s=deadline_s,
            )
            for prompt in map(tuple, prompts)
            for number in range(asked.n or 1)
        ]

    async def _prediction_tokens(self, content: str | list[Any]) -> tuple[int, ...]:
        if not isinstance(content, str):
            kinds = set(map(type, content))
            if kinds <= {int}:
                return tuple(content)
            if int in kinds:
                raise ApiError(
                    "prediction: content is text or token ids, not both", param="prediction"
                )
            content = "".join(part.text for part in content)
        return tuple((await self.encode([content], "prediction", GUESSED_CONTEXTS))[0])

    async def _answer(
        self,
        http: HttpRequest,
        asked: wire.Sampling,
        builder: ResponseBuilder,
        requests: Sequence[Request],
    ) -> Response:
        if asked.stream:
            return EventStream(
                lambda send_event: self._stream(send_event, asked, builder, requests)
            )
        with self.concurrency.acquire(len(requests)):
            samples = await cancel_on_disconnect(
                http, gather([self.sample(self.policy, request) for request in requests])
            )
        return respond_negotiated(http, self.completion(builder, requests, samples))

    async def sample(self, policy: Policy, request: Request) -> Sample:
        try:
            return await policy.sample(request)
        except ValueError as e:
            raise ApiError(str(e)) from e

    def completion(
        self, builder: ResponseBuilder, requests: Sequence[Request], samples: Sequence[Sample]
    ) -> msgspec.Struct:
        usage = self._usage(requests, samples)
        choices = [
            builder.choice(n, request, sample)
            for n, (request, sample) in enumerate(zip(requests, samples, strict=True))
        ]
        return builder.completion(choices, usage)

    async def _stream(
        self,
        send_event: SendEvent,
        asked: wire.Sampling,
        builder: ResponseBuilder,
        requests: Sequence[Request],
    ) -> None:
        with self.concurrency.acquire(len(requests)):
            await self.stream_choices(
                send_event,
                asked,
                builder,
                requests,
                [self.policy.stream(request) for request in requests],
            )

    async def stream_choices(
        self, send_event: SendEvent, asked: wire.Sampling, builder: ResponseBuilder,
        requests: Sequence[Request], streams: Sequence[AsyncIterator[Token | Sample]],
    ) -> None:  # fmt: skip
        """The choices side by side, each piece as it comes."""
        with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        first = True

        async def one(index: int) -> Sample:
            nonlocal first
            follower = builder.stream(index, requests[index])
            async with aclosing(streams[index]) as events:  # type: ignore[type-var]
                async for event in events:
                    if (choice := follower.push(event)) is not None:
                        chunk = builder.chunk([choice], None if with_usage else UNSET, first=first)
                        first = False
                        await send_event(chunk)
            assert isinstance(event, Sample)
            return event

        try:
            samples = await gather([one(index) for index in range(len(requests))])
        except ValueError as e:
            raise ApiError(str(e)) from e
        usage = self._usage(requests, samples)
        if with_usage:
            await send_event(builder.chunk([], usage, first=False))

    def _usage(self, requests: Sequence[Request], samples: Sequence[Sample]) -> wire.Usage:
        """Choices of one prompt count it once."""
        read = sum(
            len(prompt)
            for prompt in {id(request.prompt): request.prompt for request in requests}.values()
        )
        sampled = sum(len(sample.tokens) for sample in samples)
        self.metrics.count_tokens(read, sampled)
        usage = wire.Usage(read, sampled, read + sampled)
        if any(request.speculates for request in requests):
            accepted, rejected = (
                sum(sample.accepted_draft_tokens for sample in samples),
                sum(sample.rejected_draft_tokens for sample in samples),
            )
            usage.completion_tokens_details = wire.CompletionDetails(accepted, rejected)
        return usage

    def _model_name(self, asked: wire.Sampling) -> str:
        if self._model is None or asked.model is None:
            return asked.model or self.model
        self._check_model(asked.model)
        return asked.model

    def _check_model(self, model: str) -> None:
        if model != self.model:
            message = f"there is no model {model[:200]!r} here, only {self.model!r}"
            raise ApiError(message, status=404, code="model_not_found", param="model")

    @property
    def model(self) -> str:
        return self._model or "etude"

    def check_version(self, least: int) -> None:
        """Whoever has weights refuses here what they are too old for."""

    async def models(self, http: HttpRequest) -> Response:
        return respond(wire.Models([self._card()]))

    async def get_model(self, http: HttpRequest) -> Response:
        self._check_model(http.path_params["model"])
        return respond(self._card())

    def _card(self) -> wire.Model:
        return wire.Model(
            id=self.model, created=self.metrics.started, max_model_len=self.max_context
        )

    async def health(self, http: HttpRequest) -> Response:
        return respond(wire.Health())

    async def show_metrics(self, http: HttpRequest) -> Response:
        return Response(self.metrics.text(self.gauges()), media_type="text/plain; version=0.0.4")

    def gauges(self) -> dict[str, float]:
        """What there is to see now, by name."""
        return {"answers_under_way": self.concurrency.in_use}

    async def openapi(self, http: HttpRequest) -> Response:
        return respond(document())


def sampling_params(asked: wire.Sampling, grammar: str | None) -> SamplingParams:
    """The parameters that a request gives, by their names; what it leaves out is the default."""
    given = {
        field.name: value
        for field in fields(SamplingParams)
        if (value := getattr(asked, field.name, None)) is not None
    }
    given["top_k"] = max(given.get("top_k", 0), 0)
    return SamplingParams(**given, grammar=grammar)


async def as_stream(sample: Sample) -> AsyncIterator[Token | Sample]:
    """A sample that is whole already, as a stream."""
    top = sample.top_logprobs or ((),) * len(sample.tokens)
    for token, logprob, version, others in zip(
        sample.tokens, sample.logprobs, expand_spans(sample.versions), top, strict=True
    ):
        yield Token(token, logprob, version, others)
    yield sample


async def in_thread_if_long(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= AT_ONCE_CHARS else await asyncio.to_thread(work)


@contextmanager
def template_errors() -> Iterator[None]:
    """Messages that the chat template cannot show are the client's mistake."""
    try:
        yield
    except (TypeError, ValueError, RecursionError) as e:
        raise ApiError(
            f"messages: the chat template cannot show them: {e}", param="messages"
        ) from e


async def read_chat(http: HttpRequest, max_context: int) -> wire.ChatRequest:
    asked = await read(http, wire.ChatRequest)
    for place, values, shape in (
        ("messages", asked.messages, wire.ChatMessage),
        ("tools", asked.tools or [], wire.Tool),
    ):
        for number, value in enumerate(values):
            try:
                msgspec.convert(value, shape)
            except (msgspec.ValidationError, RecursionError) as e:
                raise ApiError(f"{place}[{number}]: {e}", param=place) from e
    num_shown = sum(1 + len(message.get("tool_calls") or ()) for message in asked.messages)
    for place, count in (("messages", num_shown), ("tools", len(asked.tools or ()))):
        if count > max_context:  # each of them, and each call, is shown with a token at least
            message = f"{place}: {count} do not fit into a context of {max_context} tokens"
            raise ApiError(message, code="context_length_exceeded", param=place)
    names = [tool["function"]["name"] for tool in asked.tools or []]
    if len(set(names)) != len(names):
        raise ApiError(f"tools: two have the same name: {names}", param="tools")
    if (
        isinstance(asked.tool_choice, wire.NamedTool)
        and asked.tool_choice.function.name not in names
    ):
        raise ApiError(
            f"tool_choice: {asked.tool_choice.function.name!r} is none of the tools",
            param="tool_choice",
        )
    if asked.tool_choice == "required" and not names:
        raise ApiError("tool_choice: required, but there are no tools", param="tool_choice")
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError("top_logprobs: only with logprobs", param="top_logprobs")
    asked.messages = [_plain(message) for message in asked.messages]
    return asked


def _plain(message: Message) -> Message:
    """Content may come in parts; chat templates expect text."""
    if not isinstance(content := message.get("content"), list):
        return message
    if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in content):
        raise ApiError(
            'messages: this model reads text only, in parts of {"type": "text", "text": ..}',
            param="messages",
        )
    return message | {"content": "".join(part["text"] for part in content)}
