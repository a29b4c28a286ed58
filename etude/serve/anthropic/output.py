"""Answers as Anthropic's messages, whole or streamed. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from etude.core.sampling import Sample, Token
from etude.model.output_parser import Content, Event, Reasoning
from etude.model.tool_calls import Call
from etude.serve.anthropic import types as anthropic
from etude.serve.http import ANTHROPIC_ROUTES, ApiError, error_body
from etude.serve.turn import Turn, stop_text

SIGNATURE = "unsigned"
"""Clients send thinking blocks back only if these have a signature. This server does not check
it."""


class MessageBuilder:
    """The message that answers one request."""

    def __init__(self, turn: Turn, model: str, *, thinking: bool) -> None:
        """`thinking`: show the reasoning to the client."""
        self._turn = turn
        self._model = model
        self._thinking = thinking
        self._id = f"msg_{turn.id}"

    def shown(self, events: Sequence[Event]) -> list[Event]:
        return [event for event in events if self._thinking or not isinstance(event, Reasoning)]

    def message(self, sample: Sample, events: Sequence[Event]) -> anthropic.Message:
        end = self.end(sample, called=any(isinstance(event, Call) for event in events))
        return anthropic.Message(
            id=self._id,
            model=self._model,
            content=[_block(event) for event in self.shown(events)],
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=self.usage(sample),
        )

    def begin(self) -> anthropic.Message:
        """The message before it has any content."""
        usage = anthropic.MessageUsage(len(self._turn.request.prompt), 0)
        return anthropic.Message(
            id=self._id, model=self._model, content=[], stop_reason=None, stop_sequence=None,
            usage=usage,
        )  # fmt: skip

    def end(self, sample: Sample, *, called: bool) -> anthropic.StopDelta:
        if sample.finish_reason == "length":
            return anthropic.StopDelta("max_tokens", None)
        stop = stop_text(self._turn.model.tokenizer, self._turn.request, sample)
        if stop is not None:
            return anthropic.StopDelta("stop_sequence", stop)
        return anthropic.StopDelta("tool_use" if called else "end_turn", None)

    def usage(self, sample: Sample) -> anthropic.MessageUsage:
        return anthropic.MessageUsage(len(self._turn.request.prompt), len(sample.tokens))


class MessageWriter:
    """The stream of one message."""

    def __init__(self, builder: MessageBuilder) -> None:
        self._builder = builder
        self._begun = False
        self._index = 0
        self._open: type[Event] | None = None  # the kind of the block that is being written
        self._called = False

    def push(self, event: Token | Sample, said: Sequence[Event]) -> list[msgspec.Struct]:
        told: list[msgspec.Struct] = []
        if not self._begun:
            self._begun = True
            told.append(anthropic.MessageStart(self._builder.begin()))
        for part in self._builder.shown(said):
            told += self._say(part)
        if isinstance(event, Sample):
            told += self._close()
            end = self._builder.end(event, called=self._called)
            told.append(anthropic.MessageDelta(end, self._builder.usage(event)))
            told.append(anthropic.MessageStop())
        return told

    def failed(self, error: ApiError) -> object:
        return error_body(error, ANTHROPIC_ROUTES)

    def _say(self, event: Event) -> list[msgspec.Struct]:
        told: list[msgspec.Struct] = []
        if isinstance(event, Call) or type(event) is not self._open:
            told += self._close()
            told.append(anthropic.BlockStart(self._index, _empty(event)))
            self._open = type(event)
        told.append(anthropic.BlockDelta(self._index, _delta(event)))
        self._called |= isinstance(event, Call)
        return told

    def _close(self) -> list[msgspec.Struct]:
        if self._open is None:
            return []
        told: list[msgspec.Struct] = [anthropic.BlockStop(self._index)]
        if self._open is Reasoning:
            signature = anthropic.SignatureDelta(SIGNATURE)
            told.insert(0, anthropic.BlockDelta(self._index, signature))
        self._open = None
        self._index += 1
        return told


def _block(event: Event) -> anthropic.OutputBlock:
    match event:
        case Reasoning(text):
            return anthropic.ThinkingBlock(text, SIGNATURE)
        case Content(text):
            return anthropic.TextBlock(text)
        case Call(name, arguments, id):
            return anthropic.ToolUseBlock(id or "", name, json.loads(arguments))


def _empty(event: Event) -> anthropic.OutputBlock:
    match event:
        case Reasoning():
            return anthropic.ThinkingBlock("")
        case Content():
            return anthropic.TextBlock("")
        case Call(name, _, id):
            return anthropic.ToolUseBlock(id or "", name, {})


def _delta(
    event: Event,
) -> anthropic.TextDelta | anthropic.ThinkingDelta | anthropic.InputDelta:
    match event:
        case Reasoning(text):
            return anthropic.ThinkingDelta(text)
        case Content(text):
            return anthropic.TextDelta(text)
        case Call(_, arguments, _):
            return anthropic.InputDelta(arguments)
