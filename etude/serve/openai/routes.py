"""The routes of OpenAI's dialect.

A body becomes sampling requests, one per choice. The answerer samples, and a builder turns the
samples into chat or text responses, whole or streamed. `types.py` has the fields that go beyond
OpenAI.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, aclosing

from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from etude.core.sampling import Request, Sample, Token
from etude.serve.access import identity_of
from etude.serve.answerer import Answerer, OpenAnswerer, ServedModel, refusals
from etude.serve.headers import read_scheduling
from etude.serve.http import (
    EventStream,
    SendEvent,
    cancel_on_disconnect,
    gather,
    respond,
)
from etude.serve.openai import types as wire
from etude.serve.openai.requests import (
    callable_tools,
    chat_requests,
    completion_requests,
    read_body,
    read_chat,
    template_options,
)
from etude.serve.openai.responses import ChatResponseBuilder, ResponseBuilder, TextResponseBuilder


class OpenAi:
    """OpenAI's API, over an answerer for each request."""

    def __init__(self, model: ServedModel, open_answerer: OpenAnswerer) -> None:
        self._model = model
        self._open = open_answerer

    def routes(self) -> list[Route]:
        return [
            *self.session_routes(),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.get_model),
        ]

    def session_routes(self) -> list[Route]:
        """The routes that continue a conversation."""
        return [Route("/v1/chat/completions", self.chat, methods=["POST"])]

    async def chat(self, http: HttpRequest) -> Response:
        scheduling, answerer = read_scheduling(http), self._open(http)
        asked = await read_chat(http, self._model.max_context)
        name = self._model.called(asked.model)
        prompt = await answerer.prompt(asked.messages, asked.tools or (), template_options(asked))
        builder = ChatResponseBuilder(
            tokenizer=self._model.tokenizer, model=name, prompt=prompt,
            with_ids=bool(asked.return_token_ids), with_logprobs=bool(asked.logprobs),
            tools=callable_tools(asked),
        )  # fmt: skip
        requests = await chat_requests(self._model, asked, prompt, scheduling)
        return await self._answer(http, answerer, asked, builder, requests)

    async def completions(self, http: HttpRequest) -> Response:
        scheduling, answerer = read_scheduling(http), self._open(http)
        asked = await read_body(http, wire.CompletionRequest)
        builder = TextResponseBuilder(
            tokenizer=self._model.tokenizer, model=self._model.called(asked.model),
            with_ids=bool(asked.return_token_ids), with_logprobs=asked.logprobs is not None,
        )  # fmt: skip
        requests = await completion_requests(self._model, asked, scheduling)
        return await self._answer(http, answerer, asked, builder, requests)

    async def models(self, http: HttpRequest) -> Response:
        names = (self._model.label, *self._model.adapters)
        return respond(wire.Models([self._card(name) for name in names]))

    async def get_model(self, http: HttpRequest) -> Response:
        name = http.path_params["model"]
        self._model.check_name(name)
        return respond(self._card(name))

    async def _answer(
        self, http: HttpRequest, answerer: Answerer, asked: wire.Sampling,
        builder: ResponseBuilder, requests: Sequence[Request],
    ) -> Response:  # fmt: skip
        slots = self._model.concurrency.acquire(len(requests), identity_of(http).client)
        if asked.stream:
            with refusals():
                streams = await answerer.stream(requests, builder.message, builder.id)
            return EventStream(
                lambda send: self._stream(send, slots, asked, builder, requests, streams)
            )
        with slots, refusals():
            samples = await cancel_on_disconnect(
                http, answerer.sample(requests, builder.message, builder.id)
            )
        usage = self._usage(requests, samples)
        choices = [
            builder.choice(n, request, sample)
            for n, (request, sample) in enumerate(zip(requests, samples, strict=True))
        ]
        return respond(builder.completion(choices, usage))

    async def _stream(
        self, send_event: SendEvent, slots: AbstractContextManager[None],
        asked: wire.Sampling, builder: ResponseBuilder,
        requests: Sequence[Request], streams: Sequence[AsyncIterator[Token | Sample]],
    ) -> None:  # fmt: skip
        """Stream all choices at once, each chunk as soon as it is there."""
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

        with slots:
            with refusals():
                samples = await gather([one(index) for index in range(len(requests))])
            usage = self._usage(requests, samples)
            if with_usage:
                await send_event(builder.chunk([], usage, first=False))

    def _usage(self, requests: Sequence[Request], samples: Sequence[Sample]) -> wire.Usage:
        """Token counts of a response. Choices of one prompt count it once."""
        prompts = {id(request.prompt): request.prompt for request in requests}
        read = sum(len(prompt) for prompt in prompts.values())
        sampled = sum(len(sample.tokens) for sample in samples)
        self._model.metrics.count_tokens(read, sampled)
        usage = wire.Usage(read, sampled, read + sampled)
        if any(request.speculates for request in requests):
            usage.completion_tokens_details = wire.CompletionDetails(
                sum(sample.accepted_draft_tokens for sample in samples),
                sum(sample.rejected_draft_tokens for sample in samples),
            )
        return usage

    def _card(self, name: str) -> wire.Model:
        return wire.Model(
            id=name,
            created=self._model.metrics.started,
            max_model_len=self._model.max_context,
        )
