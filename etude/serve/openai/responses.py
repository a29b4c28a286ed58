"""Response builders: samples as OpenAI's chat messages or text completions, whole or streamed.
Pure.

A `ResponseBuilder` belongs to one request: it turns the samples into choices, and the choices into
the response. The chunks of a `StreamBuilder`, joined, equal the choice that the `ResponseBuilder`
makes of the whole sample.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from etude.core.sampling import Request, Sample, Token
from etude.model.detokenizer import REPLACEMENT_CHARACTER, PieceStream, first_of
from etude.model.output_parser import Content, Event, Reasoning, call_object, message_of
from etude.model.tokenizer import ChatTokenizer, Message, Tool
from etude.model.tool_calls import Call
from etude.serve.answer_events import AnswerReader
from etude.serve.answerer import new_completion_id
from etude.serve.openai import types as wire
from etude.store.decoding import convert

Usage = wire.Usage | None | UnsetType
"""In a stream: null until the last chunk if the client wants usage, unset otherwise."""
TokenLogprobs = tuple[int, float, tuple[tuple[int, float], ...]]
"""A token, its log-prob, and the likeliest tokens at its position."""


class StreamBuilder(Protocol):
    def push(self, event: Token | Sample) -> msgspec.Struct | None:
        """The next chunk of a choice; None if there is nothing to send yet."""


class ResponseBuilder(Protocol):
    @property
    def id(self) -> str:
        """The completion's id, without the prefix that a client sees."""

    def message(self, request: Request, sample: Sample) -> Message:
        """The answer as a message of a conversation."""

    def choice(self, index: int, request: Request, sample: Sample) -> msgspec.Struct: ...

    def stream(self, index: int, request: Request) -> StreamBuilder: ...

    def completion(self, choices: Sequence[Any], usage: wire.Usage) -> msgspec.Struct: ...

    def chunk(self, choices: Sequence[Any], usage: Usage, *, first: bool) -> msgspec.Struct: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResponseBuilder:
    """The parts that chat and text responses share."""

    tokenizer: ChatTokenizer
    model: str
    with_ids: bool
    with_logprobs: bool
    id: str = field(default_factory=new_completion_id)
    created: int = field(default_factory=lambda: int(time.time()))

    def extensions(self, tokens: Sequence[int], sample: Sample | None) -> dict[str, Any]:
        """Fields of a choice that OpenAI does not have; some of them need the whole sample."""
        extras: dict[str, Any] = {"token_ids": list(tokens)} if self.with_ids else {}
        if sample is not None:
            extras["weight_version"] = list(sample.versions)
            if sample.experts is not None:
                extras["routed_experts"] = sample.experts
        return extras

    def envelope(self, kind: str) -> dict[str, Any]:
        return {"id": f"{kind}-{self.id}", "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponseBuilder(_ResponseBuilder):
    prompt: Sequence[int]
    tools: Sequence[Tool] | None
    """None: text that looks like a call stays text."""
    readers: dict[int, AnswerReader] = field(default_factory=dict)
    """Readers of the answers, by the `id()` of the request: an answer that is recorded and then
    sent is parsed only once."""

    def message(self, request: Request, sample: Sample) -> Message:
        return message_of(self.reader(request).whole(sample))

    def reader(self, request: Request) -> AnswerReader:
        if (reader := self.readers.get(id(request))) is None:
            reader = AnswerReader(self.tokenizer, request, self.tools)
            self.readers[id(request)] = reader
        return reader

    def choice(self, index: int, request: Request, sample: Sample) -> wire.ChatChoice:
        message = convert(self.message(request, sample), wire.AssistantMessage)
        return wire.ChatChoice(
            index=index, message=message,
            finish_reason=self.finish_reason(sample, bool(message.tool_calls)),
            logprobs=self.logprobs(_token_logprobs(sample)),
            **self.extensions(sample.tokens, sample),
        )  # fmt: skip

    def finish_reason(
        self, sample: Sample, called: bool
    ) -> Literal["stop", "length", "tool_calls"]:
        return "tool_calls" if called and sample.finish_reason == "stop" else sample.finish_reason

    def logprobs(self, drawn: Sequence[TokenLogprobs]) -> wire.ChatLogprobs | None:
        if not self.with_logprobs:
            return None
        return wire.ChatLogprobs(
            [
                wire.TokenLogprob(
                    *self._entry(token, logprob),
                    [wire.TopLogprob(*self._entry(*other)) for other in top],
                )
                for token, logprob, top in drawn
            ]
        )

    def _entry(self, token: int, logprob: float) -> tuple[str, float, list[int] | None]:
        text = self.tokenizer.decode([token])
        return text, logprob, None if REPLACEMENT_CHARACTER in text else list(text.encode())

    def stream(self, index: int, request: Request) -> StreamBuilder:
        return _ChatStreamBuilder(self, index, request)

    def completion(self, choices: Sequence[Any], usage: wire.Usage) -> wire.ChatCompletion:
        return wire.ChatCompletion(
            **self.envelope("chatcmpl"),
            choices=list(choices),
            usage=usage,
            prompt_token_ids=self._prompt_ids(),
        )

    def chunk(self, choices: Sequence[Any], usage: Usage, *, first: bool) -> wire.ChatChunk:
        return wire.ChatChunk(
            id=f"chatcmpl-{self.id}", created=self.created, model=self.model,
            choices=list(choices), usage=usage,
            prompt_token_ids=self._prompt_ids() if first else UNSET,
        )  # fmt: skip

    def _prompt_ids(self) -> list[int] | UnsetType:
        return list(self.prompt) if self.with_ids else UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class TextResponseBuilder(_ResponseBuilder):
    def message(self, request: Request, sample: Sample) -> Message:
        return {"role": "assistant", "content": self.text(request, sample)}

    def text(self, request: Request, sample: Sample) -> str:
        ended = sample.finish_reason == "stop" and sample.tokens[-1] in request.stop_token_ids
        text = self.tokenizer.decode(sample.tokens[:-1] if ended else sample.tokens)
        return text[: first_of(request.stop, text)]

    def choice(self, index: int, request: Request, sample: Sample) -> wire.TextChoice:
        return wire.TextChoice(
            index=index, text=self.text(request, sample), finish_reason=sample.finish_reason,
            logprobs=self.logprobs(_token_logprobs(sample), 0, request.top_logprobs > 0),
            prompt_token_ids=self.prompt_ids(request), **self.extensions(sample.tokens, sample),
        )  # fmt: skip

    def logprobs(
        self, drawn: Sequence[TokenLogprobs], offset: int, with_top: bool
    ) -> wire.TextLogprobs | None:
        """`offset`: position of the first token in the text."""
        if not self.with_logprobs:
            return None
        text = [self.tokenizer.decode([token]) for token, _, _ in drawn]
        tops = [{self.tokenizer.decode([token]): lp for token, lp in top} for _, _, top in drawn]
        return wire.TextLogprobs(
            tokens=text,
            token_logprobs=[logprob for _, logprob, _ in drawn],
            top_logprobs=tops if with_top else None,
            text_offset=list(accumulate(map(len, text), initial=offset))[:-1],
        )

    def stream(self, index: int, request: Request) -> StreamBuilder:
        return _TextStreamBuilder(self, index, request)

    def completion(self, choices: Sequence[Any], usage: wire.Usage) -> wire.Completion:
        return wire.Completion(**self.envelope("cmpl"), choices=list(choices), usage=usage)

    def chunk(self, choices: Sequence[Any], usage: Usage, *, first: bool) -> wire.TextChunk:
        return wire.TextChunk(**self.envelope("cmpl"), choices=list(choices), usage=usage)

    def prompt_ids(self, request: Request) -> list[int] | UnsetType:
        return list(request.prompt) if self.with_ids else UNSET


def _token_logprobs(sample: Sample) -> Sequence[TokenLogprobs]:
    return list(
        zip(
            sample.tokens,
            sample.logprobs,
            sample.top_logprobs or ((),) * len(sample.tokens),
            strict=True,
        )
    )


def _parts(event: Token | Sample) -> tuple[list[TokenLogprobs], Sample | None]:
    return (
        ([], event)
        if isinstance(event, Sample)
        else ([(event.token, event.logprob, event.top)], None)
    )


class _ChatStreamBuilder:
    def __init__(self, builder: ChatResponseBuilder, index: int, request: Request) -> None:
        self._form = builder
        self._index = index
        self._reader = builder.reader(request)
        self._num_calls = 0
        self._role: Literal["assistant"] | None = "assistant"

    def push(self, event: Token | Sample) -> wire.ChatChunkChoice | None:
        events = self._reader.push(event)
        builder = self._form
        if isinstance(event, Token) and not (builder.with_ids or builder.with_logprobs):
            # nearly all chunks: only the token's text
            return (
                wire.ChatChunkChoice(index=self._index, delta=self._delta(events))
                if events
                else None
            )
        drawn, sample = _parts(event)
        delta = self._delta(events)
        return wire.ChatChunkChoice(
            index=self._index, delta=delta,
            finish_reason=builder.finish_reason(sample, self._num_calls > 0) if sample else None,
            logprobs=builder.logprobs(drawn) if drawn else None,
            **builder.extensions([token for token, _, _ in drawn], sample),
        )  # fmt: skip

    def _delta(self, events: Sequence[Event]) -> wire.Delta:
        content = reasoning = ""
        calls: list[Call] = []
        for event in events:
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, Reasoning):
                reasoning += event.text
            else:
                calls.append(event)
        role, self._role = self._role, None
        return wire.Delta(
            role,
            content or ("" if role else None),
            reasoning or None,
            self._called(calls) if calls else None,
        )

    def _called(self, calls: Sequence[Call]) -> list[wire.ToolCallDelta]:
        first, self._num_calls = self._num_calls, self._num_calls + len(calls)
        return [
            convert(call_object(call) | {"index": first + number}, wire.ToolCallDelta)
            for number, call in enumerate(calls)
        ]


class _TextStreamBuilder:
    def __init__(self, builder: TextResponseBuilder, index: int, request: Request) -> None:
        self._form = builder
        self._index = index
        self._request = request
        self._pieces = PieceStream(builder.tokenizer.decode, {}, request.stop)
        self._offset = 0
        self._prompt_ids = builder.prompt_ids(request)

    def push(self, event: Token | Sample) -> wire.TextChunkChoice | None:
        builder, (drawn, sample) = self._form, _parts(event)
        text = self._text(event)
        if not (sample or text or builder.with_ids or builder.with_logprobs):
            return None
        logprobs = (
            builder.logprobs(drawn, self._offset, self._request.top_logprobs > 0) if drawn else None
        )
        self._offset += sum(map(len, logprobs.tokens)) if logprobs else 0
        prompt_ids, self._prompt_ids = self._prompt_ids, UNSET
        return wire.TextChunkChoice(
            index=self._index, text=text, finish_reason=sample.finish_reason if sample else None,
            logprobs=logprobs, prompt_token_ids=prompt_ids,
            **builder.extensions([token for token, _, _ in drawn], sample),
        )  # fmt: skip

    def _text(self, event: Token | Sample) -> str:
        if isinstance(event, Sample):
            return "".join(self._pieces.end())
        ends = event.token in self._request.stop_token_ids
        return "" if ends else "".join(self._pieces.push(event.token))
