"""One answer to a chat: the code shared by the dialects that give one answer per request. They
translate their request body into OpenAI's chat request, and the events of the answer into their
own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from etude.core.sampling import Request, Sample, Token
from etude.model.detokenizer import first_of
from etude.model.output_parser import Event, message_of
from etude.model.tokenizer import ChatTokenizer, Tool
from etude.serve.access import identity_of
from etude.serve.answer_events import AnswerReader
from etude.serve.answerer import Answerer, ServedModel, new_completion_id, refusals
from etude.serve.headers import Scheduling
from etude.serve.http import ApiError, EventStream, SendEvent, cancel_on_disconnect
from etude.serve.openai import types as wire
from etude.serve.openai.requests import (
    callable_tools,
    chat_requests,
    checked_chat,
    template_options,
)


class EventWriter(Protocol):
    """Translates an answer into the events of a dialect's stream."""

    def push(self, event: Token | Sample, said: Sequence[Event]) -> Sequence[object]:
        """Events for the next token, or for the sample at the end, and for the parsed events that
        it completes."""

    def failed(self, error: ApiError) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    model: ServedModel
    answerer: Answerer
    request: Request
    tools: Sequence[Tool] | None
    id: str = field(default_factory=new_completion_id)
    """The answer's id, without the prefix that a client sees."""

    async def sample(self, http: HttpRequest) -> tuple[Sample, list[Event]]:
        """The whole answer."""
        reader = AnswerReader(self.model.tokenizer, self.request, self.tools)
        with self.model.concurrency.acquire(1, identity_of(http).client), refusals():
            (sample,) = await cancel_on_disconnect(
                http,
                self.answerer.sample(
                    [self.request],
                    lambda request, sample: message_of(reader.whole(sample)),
                    self.id,
                ),
            )
        self._count(sample)
        return sample, reader.whole(sample)

    async def stream(self, http: HttpRequest, writer: EventWriter) -> Response:
        reader = AnswerReader(self.model.tokenizer, self.request, self.tools)
        with refusals():
            (tokens,) = await self.answerer.stream(
                [self.request], lambda request, sample: message_of(reader.whole(sample)), self.id
            )

        async def work(send_event: SendEvent) -> None:
            with self.model.concurrency.acquire(1, identity_of(http).client), refusals():
                async with aclosing(tokens):  # type: ignore[type-var]
                    async for event in tokens:
                        events = writer.push(event, reader.push(event))
                        if isinstance(event, Sample):
                            await self.model.conversations.journal.commit()
                        for told in events:
                            await send_event(told)
            assert isinstance(event, Sample)
            self._count(event)

        return EventStream(work, named=True, failed=writer.failed)

    def _count(self, sample: Sample) -> None:
        self.model.metrics.count_tokens(len(self.request.prompt), len(sample.tokens))


async def open_turn(
    model: ServedModel, answerer: Answerer, asked: wire.ChatRequest, scheduling: Scheduling
) -> Turn:
    asked = checked_chat(asked, model.max_context)
    prompt = await answerer.prompt(asked.messages, asked.tools or (), template_options(asked))
    (request,) = await chat_requests(model, asked, prompt, scheduling)
    return Turn(model=model, answerer=answerer, request=request, tools=callable_tools(asked))


def stop_text(tokenizer: ChatTokenizer, request: Request, sample: Sample) -> str | None:
    """The stop string that ended an answer, if one did."""
    if sample.finish_reason != "stop" or sample.tokens[-1] in request.stop_token_ids:
        return None
    text = tokenizer.decode(sample.tokens)
    at = first_of(request.stop, text)
    return next((stop for stop in request.stop if text.startswith(stop, at)), None)
