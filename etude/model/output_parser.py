"""Parser of the tokens of an answer into reasoning, content and tool calls, as they arrive. Pure
and exact: the events do not depend on how the answer is cut into tokens.

A family marks the parts of an answer with control tokens. If a mark is a token of the vocabulary,
only that token is the mark, and text that spells it is text. If it is not, as with models that were
taught a format later, the spelling counts. Text is returned as soon as no later token can change
it; a call is returned whole.

`FORMATS` has one entry for each family. The format of a model is detected from its chat template
(`detect_format`), or set by `tool_syntax` in tokenizer_config.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

from etude.model import tool_calls
from etude.model.detokenizer import Mark, PieceStream, overlap
from etude.model.tool_calls import Call, Read, Schemas, can_read, read_calls

TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"
THINK_START, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


Event = Reasoning | Content | Call


class OutputParser(Protocol):
    """Parser of the pieces of one answer."""

    def push(self, piece: str) -> Iterable[Event]: ...

    def end(self, *, finished: bool) -> Iterable[Event]:
        """End the answer. `finished`: the model ended it; False if a limit or a stop text cut it
        off. A call that was cut off is content, unless it is complete."""


class MarkedParser:
    """Parser of the families that put marks around reasoning and before each call: all but Llama 3
    and gpt-oss."""

    def __init__(
        self, format: MarkedFormat, schemas: Schemas | None, *, reasons: bool, reasoning: bool
    ) -> None:
        """`schemas`: None if no tools may be called. `reasons`: the model reasons, between marks.
        `reasoning`: the prompt has begun the reasoning."""
        self._format = format
        self._schemas = schemas
        self._reasons = reasons
        self._reasoning = _Trimmed(always=True) if reasoning else None
        self._content = _Trimmed(always=reasoning)
        self._body: list[str] | None = None

    def push(self, piece: str) -> Iterable[Event]:
        # Nearly all pieces are text; this branch avoids a generator for each of them.
        if self._body is None and not isinstance(piece, Mark):
            return self._say(piece)
        return self._read(piece)

    def _read(self, piece: str) -> Iterator[Event]:
        if self._body is not None:
            mark = piece if isinstance(piece, Mark) else None
            if mark is not None and mark in self._format.ends:
                yield from self._close()
                self._body = [] if mark == self._format.begin else None
            else:
                self._body.append(piece)
        elif not isinstance(piece, Mark) or not self._turns(piece):
            yield from self._say(piece)

    def _close(self) -> Iterator[Event]:
        assert self._schemas is not None and self._body is not None
        body, self._body = "".join(self._body), None
        yield from read_calls(self._format.read, body, self._schemas)

    def _turns(self, mark: Mark) -> bool:
        """Begin another part of the answer; False if the mark is text."""
        calls = self._schemas is not None and mark in self._format.call_marks
        if self._reasons and mark == self._format.think[self._reasoning is not None]:
            self._reasoning = None if self._reasoning else _Trimmed(always=True)
        elif calls:
            self._reasoning = None
            self._body = [] if mark == self._format.begin else None
        else:
            return False
        self._content.at_mark()
        return True

    def _say(self, text: str) -> Iterable[Event]:
        if self._reasoning is not None:
            text = self._reasoning.push(text)
            return (Reasoning(text),) if text else ()
        text = self._content.push(text)
        return (Content(text),) if text else ()

    def end(self, *, finished: bool) -> Iterator[Event]:
        if self._body is not None and self._format.ends_with_answer:
            body = "".join(self._body)
            calls = read_calls(self._format.read, body, self._schemas or {})
            if finished or can_read(calls):
                self._body = None
                yield from calls
        if self._body is not None:  # never closed: content
            text = self._content.push(self._format.begin + "".join(self._body))
            self._body = None
            yield Content(text)
        if text := self._content.end():
            yield Content(text)


class _Trimmed:
    """A text without the space at its ends, if it is next to marks."""

    def __init__(self, *, always: bool = False) -> None:
        self._trims = always
        self._held = ""
        self._begun = False

    def push(self, text: str) -> str:
        text = self._held + text
        if self._trims and not self._begun:
            text = text.lstrip()
        said = text.rstrip()
        self._begun |= bool(said)
        self._held = text[len(said) :]
        return said

    def at_mark(self) -> None:
        self._trims = True

    def end(self) -> str:
        return "" if self._trims else self._held


class Llama3Parser:
    """Parser of Llama 3: a call is an answer that is JSON from its first character on, or all that
    follows `<|python_tag|>`."""

    TAG = "<|python_tag|>"

    def __init__(self, schemas: Schemas | None) -> None:
        self._schemas = schemas
        self._held = ""
        self._says = schemas is None
        self._tagged = False

    def push(self, piece: str) -> Iterator[Event]:
        if isinstance(piece, Mark) and piece == self.TAG and not (self._says or self._held.strip()):
            self._tagged = True
            return
        self._held += piece
        begins = self._held.lstrip()
        if not self._tagged and not self._says and begins:
            self._says = begins[0] not in "{["
        if self._says and self._held:
            text, self._held = self._held, ""
            yield Content(text)

    def end(self, *, finished: bool) -> Iterator[Event]:
        if not self._held:
            return
        calls = read_calls(tool_calls.llama3, self._held, self._schemas or {})
        known = all(call.name in (self._schemas or {}) for call in calls)
        is_call = finished or can_read(calls) if self._tagged else known and not self._says
        if is_call:
            yield from calls
        else:
            yield Content((self.TAG if self._tagged else "") + self._held)


class HarmonyParser:
    """Parser of gpt-oss: an answer is a list of messages, each with a channel and perhaps a
    recipient in its header. The analysis channel is reasoning, a message to a function is a
    call."""

    START, MESSAGE, CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
    ENDS = ("<|end|>", "<|call|>", "<|return|>")

    _CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
    _RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")

    def __init__(self, schemas: Schemas | None) -> None:
        self._may_call = schemas is not None
        self._header: str | None = ""
        self._channel = ""
        self._function: str | None = None
        self._body = ""

    def push(self, piece: str) -> Iterator[Event]:
        mark = piece if isinstance(piece, Mark) else ""
        if mark in self.ENDS and self._header is None:
            yield from self._close()
            self._header = ""
        elif mark == self.START:
            self._header = ""
        elif self._header is None:
            yield from self._say(piece)
        elif mark == self.MESSAGE:
            self._open(self._header)
            self._header = None
        else:
            self._header += piece

    def _open(self, header: str) -> None:
        channel, recipient = self._CHANNEL.search(header), self._RECIPIENT.search(header)
        self._channel = channel[1] if channel else "final"
        self._function = recipient[1] if recipient and self._may_call else None
        self._body = ""

    def _say(self, text: str) -> Iterator[Event]:
        if self._function is not None:
            self._body += text
        elif text:
            yield Reasoning(text) if self._channel == "analysis" else Content(text)

    def _close(self) -> list[Call]:
        if self._function is None:
            return []
        name, self._function = self._function, None
        return read_calls(lambda body, _: tool_calls.harmony(name, body), self._body, {})

    def end(self, *, finished: bool) -> Iterator[Event]:
        if self._header is not None:
            if text := self._header:
                yield Content(text)
        elif self._function is not None:
            calls = self._close()
            if finished or (self._body and can_read(calls)):
                yield from calls
            else:
                yield Content(self._body)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedFormat:
    """The marks around a call, those around all calls of an answer, and the syntax between them."""

    read: Read
    begin: str = TOOL_CALL_START
    end: str | None = TOOL_CALL_END
    section: tuple[str, ...] = ()
    ends_with_answer: bool = False
    """A call may also end where the next one begins, or where the answer ends."""
    think: tuple[str, str] = (THINK_START, THINK_END)

    @property
    def call_marks(self) -> tuple[str, ...]:
        return (self.begin, *self.section)

    @property
    def ends(self) -> tuple[str | None, ...]:
        """Marks that end a call."""
        return (self.end, self.begin) if self.ends_with_answer else (self.end,)

    @property
    def marks(self) -> tuple[str, ...]:
        end = () if self.end is None else (self.end,)
        return (self.begin, *end, *self.section, *self.think)

    def parser(self, schemas: Schemas | None, *, reasons: bool, reasoning: bool) -> OutputParser:
        return MarkedParser(self, schemas, reasons=reasons, reasoning=reasoning)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFormat:
    """A family with its own parser."""

    make: Callable[[Schemas | None], OutputParser]
    marks: tuple[str, ...]
    think: tuple[str, str] = (THINK_START, THINK_END)

    def parser(self, schemas: Schemas | None, *, reasons: bool, reasoning: bool) -> OutputParser:
        return self.make(schemas)


Format = MarkedFormat | OwnFormat

FORMATS: dict[str, Format] = {
    "compact": MarkedFormat(read=tool_calls.compact),
    "hermes": MarkedFormat(read=tool_calls.hermes),
    "qwen3_coder": MarkedFormat(read=tool_calls.qwen3_coder),
    "glm45": MarkedFormat(read=tool_calls.glm45),
    "deepseek": MarkedFormat(
        read=tool_calls.deepseek,
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "kimi_k2": MarkedFormat(
        read=tool_calls.kimi_k2,
        begin="<|tool_call_begin|>",
        end="<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "mistral": MarkedFormat(
        read=tool_calls.mistral,
        begin="[TOOL_CALLS]",
        end=None,
        ends_with_answer=True,
        think=("[THINK]", "[/THINK]"),
    ),
    "granite": MarkedFormat(
        read=tool_calls.hermes, begin="<|tool_call|>", end="<|/tool_call|>", ends_with_answer=True
    ),
    "seed_oss": MarkedFormat(
        read=tool_calls.qwen3_coder,
        begin="<seed:tool_call>",
        end="</seed:tool_call>",
        think=("<seed:think>", "</seed:think>"),
    ),
    "olmo3": MarkedFormat(
        read=tool_calls.olmo3, begin="<function_calls>", end="</function_calls>"
    ),
    "llama3": OwnFormat(make=Llama3Parser, marks=(Llama3Parser.TAG,)),
    "harmony": OwnFormat(
        make=HarmonyParser,
        marks=(
            HarmonyParser.START, HarmonyParser.MESSAGE, HarmonyParser.CHANNEL, *HarmonyParser.ENDS,
        ),
    ),
}  # fmt: skip

THINK_MARKS = tuple(dict.fromkeys(format.think for format in FORMATS.values()))


def with_think_marks_of(template: str, format: Format) -> Format:
    """Use the reasoning marks in the template, since fine-tunes may use other marks than their
    family; the family's own come first."""
    written = (
        marks for marks in (format.think, *THINK_MARKS) if any(mark in template for mark in marks)
    )
    return replace(format, think=next(written, format.think))


SIGNS = {
    "<|channel|>": "harmony",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<｜tool▁calls▁begin｜>": "deepseek",
    "[TOOL_CALLS]": "mistral",
    "<seed:tool_call>": "seed_oss",
    "<function_calls>": "olmo3",
    "<|tool_call|>": "granite",
    "<|/tool|>": "granite",
    "<arg_key>": "glm45",
    "<function=": "qwen3_coder",
    TOOL_CALL_START: "hermes",
    "<|python_tag|>": "llama3",
    "<|start_header_id|>": "llama3",
}
"""Words of a chat template that identify the family, the most reliable first."""


def detect_format(template: str) -> str:
    return next((name for sign, name in SIGNS.items() if sign in template), "hermes")


class MarkScanner:
    """Finds the marks that are not tokens of the vocabulary, by their spelling."""

    def __init__(self, spelled: Sequence[str]) -> None:
        self._spelled = spelled
        self._beginnings = {mark[0] for mark in spelled}
        self._any = any_of(tuple(spelled))
        self._held = ""

    def push(self, piece: str) -> Iterable[str]:
        if isinstance(piece, Mark):
            return [*self.end(), piece]
        if not self._held and self._beginnings.isdisjoint(piece):
            return (piece,)
        return self._scan(piece)

    def _scan(self, piece: str) -> Iterator[str]:
        self._held += piece
        while found := self._any.search(self._held):
            if found.start():
                yield self._held[: found.start()]
            yield Mark(found[0])
            self._held = self._held[found.end() :]
        keep = max((overlap(self._held, mark) for mark in self._spelled), default=0)
        if said := self._held[: len(self._held) - keep]:
            yield said
        self._held = self._held[len(said) :]

    def end(self) -> Iterator[str]:
        said, self._held = self._held, ""
        if said:
            yield said


@lru_cache
def any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Pattern of the first mark, and of two at one position the shorter."""
    return re.compile("|".join(map(re.escape, sorted(marks))) or r"(?!)")


class AnswerParser:
    """Parser of the tokens of one answer."""

    def __init__(
        self, pieces: PieceStream, scanner: MarkScanner, parser: OutputParser,
        stop_token_ids: Sequence[int],
    ) -> None:  # fmt: skip
        self._pieces = pieces
        self._scanner = scanner
        self._parser = parser
        self._stop = frozenset(stop_token_ids)

    def push(self, token: int) -> list[Event]:
        if token in self._stop:
            return []
        return self._read(self._pieces.push(token))

    def extend(self, tokens: Sequence[int]) -> list[Event]:
        """Push several tokens at once: the same events, except that texts come in fewer pieces."""
        return self._read(self._pieces.extend([each for each in tokens if each not in self._stop]))

    def end(self, *, finished: bool) -> list[Event]:
        """`finished`: it was not cut off by a limit."""
        events = self._read(self._pieces.end())
        events += [event for piece in self._scanner.end() for event in self._parser.push(piece)]
        is_whole = finished and not self._pieces.is_stopped
        return [*events, *self._parser.end(finished=is_whole)]

    def _read(self, pieces: Iterable[str]) -> list[Event]:
        return [
            event
            for piece in pieces
            for part in self._scanner.push(piece)
            for event in self._parser.push(part)
        ]


def with_ids(
    events: Iterable[Event], call_id: Callable[[int], str], taken: set[str] | None = None
) -> list[Event]:
    """Give every call an id: the model's own if it wrote one that no other call of the answer has.
    `call_id`: id of the n-th call. `taken`: the ids of earlier calls, to which these are added."""
    taken = set() if taken is None else taken
    found = list[Event]()
    for event in events:
        if isinstance(event, Call):
            if event.id is None or event.id in taken:
                event = replace(event, id=call_id(len(taken)))
            taken.add(event.id or "")
        found.append(event)
    return found


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """The assistant message that the events of an answer make, in OpenAI's format."""
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    calls = [call_object(event) for event in events if isinstance(event, Call)]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def call_object(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def schemas_of(tools: Iterable[Mapping[str, Any]]) -> Schemas:
    """The properties of every tool by its name."""
    return {
        tool["function"]["name"]: (tool["function"].get("parameters") or {}).get("properties") or {}
        for tool in tools
    }
