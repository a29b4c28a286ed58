"""Answers as Responses objects, whole or streamed. Pure."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from etude.core.sampling import Sample, Token
from etude.model.output_parser import Content, Event, Reasoning
from etude.model.tool_calls import Call
from etude.serve.http import ApiError
from etude.serve.responses import types as responses

Told = dict[str, Any]
"""An event of the stream."""
Keep = Callable[[responses.ResponseObject], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseBuilder:
    """Builds the response to one request."""

    asked: responses.ResponsesRequest
    model: str
    num_read: int
    """Number of tokens of the prompt."""
    custom: set[str]
    """Names of the tools that take a text."""
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self, **differs: Any) -> responses.ResponseObject:
        """The response before it has any output, with the given fields replaced."""
        asked = self.asked
        given: dict[str, Any] = {
            "id": self.id,
            "created_at": self.created,
            "model": self.model,
            "status": "in_progress",
            "output": [],
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": asked.reasoning or responses.ReasoningConfig(),
            "store": asked.store is not False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": asked.text or responses.TextConfig(responses.TextFormatSpec()),
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
        }
        return responses.ResponseObject(**given | differs)

    def whole(
        self, sample: Sample, output: Sequence[responses.OutputItem]
    ) -> responses.ResponseObject:
        cut = sample.finish_reason == "length"
        return self.response(
            status="incomplete" if cut else "completed",
            incomplete_details=responses.Incomplete() if cut else None,
            output=list(output),
            usage=responses.ResponseUsage(
                input_tokens=self.num_read,
                output_tokens=len(sample.tokens),
                total_tokens=self.num_read + len(sample.tokens),
                input_tokens_details=responses.InputDetails(),
                output_tokens_details=responses.OutputDetails(),
            ),
        )

    def items(self, sample: Sample, events: Sequence[Event]) -> list[responses.OutputItem]:
        cut = sample.finish_reason == "length"
        return [
            self.item(event, "incomplete" if cut and event is events[-1] else "completed")
            for event in events
        ]

    def item(
        self, event: Event, status: responses.Status, id: str | None = None
    ) -> responses.OutputItem:
        match event:
            case Reasoning(text):
                parts = [responses.ReasoningText(text)] if text else []
                return responses.ReasoningItem(id or _new_id("rs"), status, parts)
            case Content(text):
                said = [responses.OutputText(text)] if text else []
                return responses.OutputMessage(id or _new_id("msg"), status, said)
            case Call(name, arguments, call_id) if name in self.custom:
                input = _custom_input(arguments)
                return responses.CustomCallItem(
                    id or _new_id("ctc"), status, call_id or "", name, input
                )
            case Call(name, arguments, call_id):
                return responses.FunctionCallItem(
                    id or _new_id("fc"), status, call_id or "", name, arguments
                )


class ResponseWriter:
    """The stream of one response. `keep` is called with the complete response, before the client
    gets it."""

    def __init__(self, builder: ResponseBuilder, keep: Keep) -> None:
        self._builder = builder
        self._keep = keep
        self._number = 0
        self._output: list[responses.OutputItem] = []
        self._text: Content | Reasoning | None = None  # the text that is being written
        self._id = ""

    def push(self, event: Token | Sample, said: Sequence[Event]) -> list[Told]:
        told: list[Told] = []
        if self._number == 0:
            begun = self._builder.response()
            told += [self._tell("created", response=begun)]
            told += [self._tell("in_progress", response=begun)]
        for part in said:
            told += self._call(part) if isinstance(part, Call) else self._say(part)
        if isinstance(event, Sample):
            cut = event.finish_reason == "length"
            told += self._close("incomplete" if cut else "completed")
            whole = self._builder.whole(event, self._output)
            self._keep(whole)
            told.append(self._tell(whole.status, response=whole))
        return told

    def failed(self, error: ApiError) -> object:
        failure = responses.ResponseFailure(error.code, str(error))
        response = self._builder.response(status="failed", error=failure, output=self._output)
        return self._tell("failed", response=response)

    def _say(self, event: Content | Reasoning) -> list[Told]:
        told: list[Told] = []
        if type(event) is not type(self._text):
            told += self._close("completed")
            self._text = type(event)("")
            item = self._builder.item(self._text, "in_progress")
            self._id = item.id
            told.append(self._tell_item("output_item.added", item=item))
            told.append(self._tell_part("content_part.added", part=_part(self._text)))
        assert self._text is not None
        self._text = type(event)(self._text.text + event.text)
        told.append(self._tell_text("delta", event, delta=event.text))
        return told

    def _close(self, status: responses.Status) -> list[Told]:
        if self._text is None:
            return []
        text, self._text = self._text, None
        item = self._builder.item(text, status, self._id)
        told = [
            self._tell_text("done", text, text=text.text),
            self._tell_part("content_part.done", part=_part(text)),
            self._tell_item("output_item.done", item=item),
        ]
        self._output.append(item)
        return told

    def _call(self, call: Call) -> list[Told]:
        told = self._close("completed")
        item = self._builder.item(call, "completed")
        self._id = item.id
        if isinstance(item, responses.CustomCallItem):
            kind = "custom_tool_call_input"
            key = "input"
            value = item.input
        else:
            kind = "function_call_arguments"
            key = "arguments"
            value = call.arguments
        begun = msgspec.structs.replace(item, status="in_progress", **{key: ""})
        told += [
            self._tell_item("output_item.added", item=begun),
            self._tell_item(f"{kind}.delta", item_id=item.id, delta=value),
            self._tell_item(f"{kind}.done", item_id=item.id, **{key: value}),
            self._tell_item("output_item.done", item=item),
        ]
        self._output.append(item)
        return told

    def _tell_text(self, step: str, event: Event, **fields: Any) -> Told:
        kind = "reasoning_text" if isinstance(event, Reasoning) else "output_text"
        if kind == "output_text":
            fields["logprobs"] = []
        return self._tell_part(f"{kind}.{step}", **fields)

    def _tell_part(self, kind: str, **fields: Any) -> Told:
        return self._tell_item(kind, item_id=self._id, content_index=0, **fields)

    def _tell_item(self, kind: str, **fields: Any) -> Told:
        return self._tell(kind, output_index=len(self._output), **fields)

    def _tell(self, kind: str, **fields: Any) -> Told:
        number, self._number = self._number, self._number + 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}


def _part(event: Content | Reasoning) -> responses.OutputText | responses.ReasoningText:
    if isinstance(event, Reasoning):
        return responses.ReasoningText(event.text)
    return responses.OutputText(event.text)


def _custom_input(arguments: str) -> str:
    said = json.loads(arguments).get("input")
    return said if isinstance(said, str) else arguments


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
