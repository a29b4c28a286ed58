"""The OpenAI-compatible API over a `Policy`: chat completions with tools, completions with text or token ids.

A request becomes asks, one for each choice that it wants; the policy answers them with samples; a form shows those as
chat or as text, whole or as they come. What goes beyond OpenAI is in `protocol.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etude.core.seams import Ask, Policy, Token
from etude.core.seeds import derive
from etude.core.types import Sample, unspan
from etude.model.tokenizer import ChatTokenizer, Message
from etude.serve import protocol as wire
from etude.serve.forms import ChatForm, Form, TextForm
from etude.serve.grammar import ANY_OBJECT, Grammars
from etude.serve.http import ApiError, Events, Say, Unavailable, read, respond, respond_as_asked, together, unless_gone
from etude.serve.metrics import Metrics
from etude.serve.openapi import document

COMPLETION_TOKENS = 16
"""OpenAI's default for completions. A chat answer may fill the context."""
SEEDS = 2**63

T = TypeVar("T")


class Slots:
    """How many answers may be under way at once."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.taken = limit, 0

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        if self.limit is not None:
            if count > self.limit:
                raise ApiError(f"n: this server gives at most {self.limit} answers at once, not {count}", param="n")
            if self.taken + count > self.limit:
                message = f"{self.taken} answers are under way, and {self.limit} are the most: try again soon"
                raise Unavailable(message, status=429, code="too_many_requests")
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count


class Api:
    """The handlers. A gateway or a worker adds routes of its own to `routes()`."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: ChatTokenizer,
        grammars: Grammars,
        *,
        max_context: int,
        model: str | None = None,
        max_answers: int | None = None,
    ) -> None:
        """Without a `model` name, requests may use any."""
        self.policy, self.tokenizer, self.max_context = policy, tokenizer, max_context
        self.slots, self.metrics = Slots(max_answers), Metrics()
        self._grammars, self._model = grammars, model

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.one_model),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
            Route("/openapi.json", self.openapi),
        ]

    async def chat(self, request: Request) -> Response:
        asked = await read_chat(request)
        prompt = self.encode_chat(
            lambda: self.tokenizer.encode(self.tokenizer.render(asked.messages, asked.tools or (), answer=True))
        )
        form, asks = self.chat_question(asked, prompt)
        return await self._answer(request, asked, form, asks)

    def encode_chat(self, encode: Callable[[], T]) -> T:
        """Messages that the chat template cannot show are the client's mistake."""
        try:
            return encode()
        except (TypeError, ValueError, RecursionError) as e:
            raise ApiError(f"messages: the chat template cannot show them: {e}", param="messages") from e

    def chat_question(self, asked: wire.ChatRequest, prompt: Sequence[int]) -> tuple[ChatForm, list[Ask]]:
        may_call = asked.tools and asked.tool_choice != "none"
        form = ChatForm(
            tokenizer=self.tokenizer, model=self._named(asked), prompt=prompt, with_ids=bool(asked.return_token_ids),
            with_logprobs=bool(asked.logprobs), tools=asked.tools if may_call else None,
        )  # fmt: skip
        limit = asked.max_completion_tokens or asked.max_tokens or self.max_context
        asks = self._asks(
            asked, [prompt], limit, stop=self.tokenizer.stops, grammar=self._grammar(asked),
            top_logprobs=asked.top_logprobs or 0,
        )  # fmt: skip
        return form, asks

    def _grammar(self, asked: wire.ChatRequest) -> str | None:
        schema: Mapping[str, Any] | None = None
        if isinstance(asked.response_format, wire.AsJson):
            schema = ANY_OBJECT
        elif isinstance(asked.response_format, wire.AsSchema):
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

    async def completions(self, request: Request) -> Response:
        asked = await read(request, wire.CompletionRequest)
        if asked.echo:
            raise ApiError("echo: the prompt is not repeated; leave it out, and put your prompt first", param="echo")
        self.check_version(asked.min_weight_version)
        form = TextForm(
            tokenizer=self.tokenizer, model=self._named(asked), with_ids=bool(asked.return_token_ids),
            with_logprobs=asked.logprobs is not None, with_text=asked.detokenize is not False,
        )  # fmt: skip
        stop = self.tokenizer.stops if asked.stop_token_ids is None else tuple(asked.stop_token_ids)
        grammar = asked.structured_outputs.grammar if asked.structured_outputs else None
        asks = self._asks(
            asked, self._prompts(asked.prompt), asked.max_tokens or COMPLETION_TOKENS, grammar=grammar,
            stop=stop if grammar is None else (*stop, self.tokenizer.eos), top_logprobs=asked.logprobs or 0,
        )  # fmt: skip
        asks = [replace(ask, experts_from=asked.routed_experts_from) for ask in asks]
        return await self._answer(request, asked, form, asks)

    def _prompts(self, prompt: str | list[Any]) -> list[Sequence[int]]:
        if isinstance(prompt, str):
            return [self.tokenizer.encode(prompt)]
        match set(map(type, prompt)):
            case kinds if kinds == {int}:
                return [prompt]
            case kinds if kinds == {str}:
                return [self.tokenizer.encode(part) for part in prompt]
            case kinds if kinds == {list}:
                return prompt
        raise ApiError("prompt: a text, token ids, a list of texts, or a list of lists of token ids", param="prompt")

    def _asks(
        self, asked: wire.Sampling, prompts: Sequence[Sequence[int]], limit: int, *, stop: tuple[int, ...],
        grammar: str | None, top_logprobs: int,
    ) -> list[Ask]:  # fmt: skip
        if asked.stream_options is not None and not asked.stream:
            raise ApiError("stream_options: only with stream", param="stream_options")
        for prompt in prompts:
            if len(prompt) >= self.max_context:
                message = (
                    f"the prompt has {len(prompt)} tokens, which leaves no room in a context of {self.max_context}"
                )
                raise ApiError(message, code="context_length_exceeded")
        prediction = None if asked.prediction is None else self._predicted(asked.prediction.content)
        drafts = tuple(map(tuple, asked.drafts or ()))
        seed = secrets.randbits(63) if asked.seed is None else asked.seed % SEEDS
        stops = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
        return [
            Ask(
                prompt=prompt, max_tokens=min(limit, self.max_context - len(prompt)), stop=stop,
                temperature=1.0 if asked.temperature is None else asked.temperature, stop_texts=stops,
                top_p=1.0 if asked.top_p is None else asked.top_p, top_k=max(asked.top_k or 0, 0), grammar=grammar,
                top_logprobs=top_logprobs, seed=seed if number == 0 else derive(seed, number), prediction=prediction,
                drafts=drafts,
            )
            for prompt in map(tuple, prompts)
            for number in range(asked.n or 1)
        ]  # fmt: skip

    def _predicted(self, content: str | list[Any]) -> tuple[int, ...]:
        if isinstance(content, str):
            return tuple(self.tokenizer.encode(content))
        if all(isinstance(part, int) for part in content):
            return tuple(content)
        if any(isinstance(part, int) for part in content):
            raise ApiError("prediction: content is text or token ids, not both", param="prediction")
        return tuple(self.tokenizer.encode("".join(part.text for part in content)))

    async def _answer(self, request: Request, asked: wire.Sampling, form: Form, asks: Sequence[Ask]) -> Response:
        if asked.stream:
            return Events(lambda say: self._stream(say, asked, form, asks))
        with self.slots.take(len(asks)):
            samples = await unless_gone(request, together([self.sample(self.policy, ask) for ask in asks]))
        return respond_as_asked(request, self.whole(form, asks, samples))

    async def sample(self, policy: Policy, ask: Ask) -> Sample:
        try:
            return await policy.sample(ask)
        except ValueError as e:
            raise ApiError(str(e)) from e

    def whole(self, form: Form, asks: Sequence[Ask], samples: Sequence[Sample]) -> msgspec.Struct:
        usage = self._usage(asks, samples)
        choices = [form.choice(n, ask, sample) for n, (ask, sample) in enumerate(zip(asks, samples, strict=True))]
        return form.whole(choices, usage)

    async def _stream(self, say: Say, asked: wire.Sampling, form: Form, asks: Sequence[Ask]) -> None:
        with self.slots.take(len(asks)):
            await self.say_all(say, asked, form, asks, [self.policy.stream(ask) for ask in asks])

    async def say_all(
        self, say: Say, asked: wire.Sampling, form: Form, asks: Sequence[Ask],
        streams: Sequence[AsyncIterator[Token | Sample]],
    ) -> None:  # fmt: skip
        """The choices side by side, each piece as it comes."""
        with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        first = True

        async def one(index: int) -> Sample:
            nonlocal first
            follower = form.follow(index, asks[index])
            async with aclosing(streams[index]) as events:  # type: ignore[type-var]
                async for event in events:
                    if (choice := follower.push(event)) is not None:
                        piece = form.piece([choice], None if with_usage else UNSET, first=first)
                        first = False
                        await say(piece)
            assert isinstance(event, Sample)
            return event

        try:
            samples = await together([one(index) for index in range(len(asks))])
        except ValueError as e:
            raise ApiError(str(e)) from e
        usage = self._usage(asks, samples)
        if with_usage:
            await say(form.piece([], usage, first=False))

    def _usage(self, asks: Sequence[Ask], samples: Sequence[Sample]) -> wire.Usage:
        """Choices of one prompt count it once."""
        read = sum(len(prompt) for prompt in {id(ask.prompt): ask.prompt for ask in asks}.values())
        sampled = sum(len(sample.tokens) for sample in samples)
        self.metrics.count_tokens(read, sampled)
        usage = wire.Usage(read, sampled, read + sampled)
        if any(ask.speculates for ask in asks):
            accepted, rejected = sum(sample.accepted for sample in samples), sum(sample.rejected for sample in samples)
            usage.completion_tokens_details = wire.CompletionDetails(accepted, rejected)
        return usage

    def _named(self, asked: wire.Sampling) -> str:
        if self._model is None or asked.model is None:
            return asked.model or self.model
        self._known(asked.model)
        return asked.model

    def _known(self, model: str) -> None:
        if model != self.model:
            message = f"there is no model {model[:200]!r} here, only {self.model!r}"
            raise ApiError(message, status=404, code="model_not_found", param="model")

    @property
    def model(self) -> str:
        return self._model or "etude"

    def check_version(self, least: int) -> None:
        """A worker refuses here what its weights are too old for."""

    async def models(self, request: Request) -> Response:
        return respond(wire.Models([self._card()]))

    async def one_model(self, request: Request) -> Response:
        self._known(request.path_params["model"])
        return respond(self._card())

    def _card(self) -> wire.Model:
        return wire.Model(id=self.model, created=self.metrics.started, max_model_len=self.max_context)

    async def health(self, request: Request) -> Response:
        return respond(wire.Health())

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(self.gauges()), media_type="text/plain; version=0.0.4")

    def gauges(self) -> dict[str, float]:
        """What there is to see now, by name."""
        return {"answers_under_way": self.slots.taken}

    async def openapi(self, request: Request) -> Response:
        return respond(document())


async def replay(sample: Sample) -> AsyncIterator[Token | Sample]:
    """A sample that is whole already, as a stream."""
    top = sample.top or ((),) * len(sample.tokens)
    for token, logprob, version, others in zip(
        sample.tokens, sample.logprobs, unspan(sample.versions), top, strict=True
    ):
        yield Token(token, logprob, version, others)
    yield sample


async def read_chat(request: Request) -> wire.ChatRequest:
    asked = await read(request, wire.ChatRequest)
    for place, values, shape in (
        ("messages", asked.messages, wire.ChatMessage),
        ("tools", asked.tools or [], wire.Tool),
    ):
        for number, value in enumerate(values):
            try:
                msgspec.convert(value, shape)
            except (msgspec.ValidationError, RecursionError) as e:
                raise ApiError(f"{place}[{number}]: {e}", param=place) from e
    names = [tool["function"]["name"] for tool in asked.tools or []]
    if len(set(names)) != len(names):
        raise ApiError(f"tools: two have the same name: {names}", param="tools")
    if isinstance(asked.tool_choice, wire.NamedTool) and asked.tool_choice.function.name not in names:
        raise ApiError(f"tool_choice: {asked.tool_choice.function.name!r} is none of the tools", param="tool_choice")
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
            'messages: this model reads text only, in parts of {"type": "text", "text": ..}', param="messages"
        )
    return message | {"content": "".join(part["text"] for part in content)}
