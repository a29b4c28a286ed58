"""Conversion of messages to tokens and back without losing one; the only place that sees both.

A harness sends messages; the trainer needs the very tokens that the engine read and sampled.
Rendering and tokenising a history again would not reproduce them: the same text may be split into
other tokens, and the arguments of a tool call may be spelled differently. So recorded tokens are
kept, and only what the harness has added since is rendered, encoded and appended:

    turn 1   prompt                              sampled
    turn 2   prompt  sampled  what was added     sampled          (one segment, one unbroken
                                                                  context)

Harnesses seldom send an answer back exactly as they received it: they drop its reasoning, strip
whitespace, or spell the arguments of a call in their own way. Such an echo is recognised by its
meaning, and replaced with the recorded answer before the history is rendered. The decision is then
made on the rendered history, not on single messages: if it begins with the text of the recorded
tokens, it continues them.

A history that continues nothing recorded (a summary, a compaction, a sub-agent) opens a new
segment. So does one that the template now renders differently from what was recorded, as templates
do that drop the reasoning of earlier turns: a model must see, and be trained on, exactly what its
template shows it. A segment's parent is the newest segment before it. Its kind comes from the
request that opens it.

The experts of a sparse model are recorded once per token: a turn reports those of the tokens that
no earlier turn has reported. The tokens after a token were sampled from the experts that it was
routed to when it was first read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from etude.core.sampling import Request, Sample, SamplingParams
from etude.core.types import Segment, SegmentKind
from etude.model.detokenizer import first_of
from etude.model.output_parser import THINK_MARKS
from etude.model.tokenizer import ChatTokenizer, Message, Tool
from etude.model.tool_calls import Call
from etude.serve.segments import OpenSegment, RecordedTurn, RoutedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The tokens for the engine to read, and the messages that they stand for."""

    tokens: tuple[int, ...]
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    text: str
    """The messages as rendered by the template."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the template."""
    routed: RoutedExperts = RoutedExperts()


@dataclass(frozen=True, slots=True)
class PartialPrompt:
    """A prompt whose last part, `text`, is still to be encoded."""

    known: Prompt
    text: str

    def complete(self, tokens: Sequence[int]) -> Prompt:
        return replace(self.known, tokens=(*self.known.tokens, *tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The place at which an answer was recorded."""

    segment: int
    kind: SegmentKind
    parent: int | None
    num_tokens: int
    """Number of tokens that the segment held before."""
    num_messages: int


@dataclass(slots=True)
class _Session:
    segments: list[OpenSegment] = field(default_factory=list)
    num_turns: int = 0


class Hole(Exception):
    """A turn that cannot be applied because earlier turns of its session are missing."""


class Recorder:
    """The recorded tokens of all sessions. Pure: no clock, no network. A session is everything
    recorded under one name; it may hold several conversations."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._sessions: dict[str, _Session] = {}

    def partial_prompt(
        self,
        session: str,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
    ) -> PartialPrompt:
        """The recorded tokens and the text that the messages add to them; or, if they continue
        nothing, all of the messages rendered. `options`: of the template."""
        said = tuple(map(_without_nulls, messages))
        new = Prompt(tokens=(), messages=said, tools=tuple(tools), text="", options=options or {})
        rendered: list[tuple[Sequence[Message], str]] = []

        def shown(history: Sequence[Message]) -> str:
            """Render a history once, however many segments it may continue."""
            for known, text in rendered:
                if known == history:
                    return text
            text = self._render(history, new.tools, new.options)
            rendered.append((history, text))
            return text

        for segment in reversed(self._segments(session)):
            known = self._known(segment, new, shown) if segment.tools == new.tools else None
            if known is not None:
                return known
        text = shown(new.messages)
        return PartialPrompt(replace(new, text=text), text)

    def _known(
        self, segment: OpenSegment, new: Prompt, shown: Callable[[Sequence[Message]], str]
    ) -> PartialPrompt | None:
        """The prompt as a continuation of the segment, or as a repetition of the prompt of its last
        answer; None if it is neither."""
        again = len(new.messages) == len(segment.messages) - 1
        history = _restored(segment, new.messages, segment.answered[: -1 if again else None])
        if history is None:
            return None
        text = shown(history)
        if again:
            added = "" if text == self._text(segment) else None
            tokens, routed = segment.asked, segment.asked_routed
        else:
            added = self._added(segment, text)
            tokens, routed = segment.context, segment.routed
        if added is None:
            return None
        known = replace(new, messages=history, tokens=tokens, text=text, routed=routed)
        return PartialPrompt(known, added)

    def _added(self, segment: OpenSegment, text: str) -> str | None:
        """The part of `text` after the segment; None if `text` does not continue it."""
        before = self._text(segment)
        if not text.startswith(before):  # the template renders old turns differently
            return None
        # The end mark of the answer was sampled; or, if the answer was cut off, it is missing from
        # the recorded tokens.
        last = segment.answer[-1]
        ended = last in self._tokenizer.stop_token_ids
        end_mark = self._tokenizer.decode([last]) if ended else self._tokenizer.eos_token
        end = text.find(end_mark, len(before))
        if end < 0 or not self._shows(text[len(before) : end], segment):
            return None
        return text[end + len(end_mark) * ended :]

    def _shows(self, shown: str, segment: OpenSegment) -> bool:
        """True if the template's text of the last answer has the same content as what was sampled.
        The spelling of calls and the surrounding whitespace may differ, but no word may be
        missing."""
        answer = segment.answer
        end = segment.answer[-1:]
        if end[0] in self._tokenizer.stop_token_ids:
            answer = answer[:-1]
        else:
            end = end[:0]
        if self._tokenizer.is_plain(shown) and shown == self._tokenizer.decode(answer):
            return True
        told, sampled = (
            self._tokenizer.parse(tokens, segment.tools, str, segment.asked)
            for tokens in ([*self._tokenizer.encode(shown), *end], segment.answer)
        )
        return _echoes(told, sampled, reasoning=True)

    def _text(self, segment: OpenSegment) -> str:
        """The rendered text of the segment; for a restored session it is rendered on first use."""
        if segment.text is None:
            segment.text = self._render(segment.messages[:-1], segment.tools, segment.options)
        return segment.text

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any]
    ) -> str:
        return self._tokenizer.render(messages, tools, answer=True, options=options)

    def record(
        self, session: str, prompt: Prompt, sample: Sample, message: Message,
        params: SamplingParams, kind: SegmentKind = "turns",
    ) -> Placement:  # fmt: skip
        """Make a `turn` and apply it."""
        turn = self.turn(session, prompt, sample, message, params, kind)
        before = self._segments(session)[turn.segment :][:1]
        held = [(len(segment.context), len(segment.messages)) for segment in before]
        self.apply(turn, prompt.text)
        segment = self._segments(session)[turn.segment]
        num_tokens, num_messages = held[0] if held else (0, 0)
        return Placement(
            segment=turn.segment,
            kind=segment.kind,
            parent=segment.parent,
            num_tokens=num_tokens,
            num_messages=num_messages,
        )

    def turn(
        self, session: str, prompt: Prompt, sample: Sample, message: Message,
        params: SamplingParams, kind: SegmentKind = "turns",
    ) -> RecordedTurn:  # fmt: skip
        """The record of an answer: the engine answered `prompt` with `sample`, drawn with `params`,
        and the harness received it as `message`. The experts of the sample begin where those of the
        prompt end. `kind`: of the segment, if the turn opens one. It changes nothing until
        `apply`."""
        known = self._sessions.get(session) or _Session()
        # Tokens decide, not messages: of two answers to the same prompt, the second one opens a
        # segment of its own.
        numbers = reversed(range(len(known.segments)))
        number = next((n for n in numbers if _goes_on(known.segments[n], prompt)), None)
        if number is None:
            segment = OpenSegment(kind=kind, parent=None, tools=())
        else:
            segment = known.segments[number]
        num_known = _num_common(segment.messages, prompt.messages)
        return RecordedTurn(
            session=session,
            number=known.num_turns,
            segment=len(known.segments) if number is None else number,
            kind=kind,
            num_known=num_known,
            messages=prompt.messages[num_known:],
            message=_without_nulls(message),
            tools=prompt.tools if number is None else (),
            options=prompt.options,
            tokens=prompt.tokens[len(segment.context) :],
            routed=None if prompt.routed == segment.routed else prompt.routed,
            sample=replace(sample, top_logprobs=()) if sample.top_logprobs else sample,
            params=params,
        )

    def apply(self, turn: RecordedTurn, text: str | None = None) -> None:
        """Add a turn to its session. `text`: the rendered prompt. Raises `Hole` if earlier turns
        are missing."""
        session = self._sessions.get(turn.session) or _Session()
        segments = session.segments
        if turn.number != session.num_turns or turn.segment > len(segments):
            raise Hole(f"turn {turn.number} follows {session.num_turns} turns")
        if turn.segment == len(segments):
            parent = len(segments) - 1 if segments else None
            segments.append(OpenSegment(kind=turn.kind, parent=parent, tools=turn.tools))
        segments[turn.segment].apply(turn, text)
        session.num_turns += 1
        self._sessions[turn.session] = session

    def received(self, turn: RecordedTurn) -> None:
        """Note that the harness has received the answer."""
        segments = self._segments(turn.session)
        if turn.segment < len(segments) and segments[turn.segment].unreceived is turn.sample:
            segments[turn.segment].unreceived = None

    def take_unreceived(self, session: str, prompt: Prompt, request: Request) -> Sample | None:
        """The recorded answer to the prompt, if its harness may not have received it: a repeated
        request then gets the same answer."""
        for segment in self._segments(session):
            sample = segment.unreceived
            if (
                sample is not None
                and segment.sampling[-1].params == request.params
                and segment.asked == prompt.tokens
                and _may_answer(sample, request)
                and self._ends_alike(sample, request)
            ):
                segment.unreceived = None
                return sample
        return None

    def _ends_alike(self, sample: Sample, request: Request) -> bool:
        """True if the request's stop strings would end the answer exactly where it ended: at its
        last token if a stop string ended it, and nowhere otherwise."""
        ended = sample.tokens[-1] in request.stop_token_ids
        said = sample.tokens[:-1] if ended else sample.tokens
        stopped = sample.finish_reason == "stop" and not ended
        before, now = (
            first_of(request.stop, self._tokenizer.decode(tokens)) is not None
            for tokens in (said[:-1], said)
        )
        return not before and now == stopped

    def _segments(self, session: str) -> list[OpenSegment]:
        known = self._sessions.get(session)
        return known.segments if known else []

    @property
    def sessions(self) -> list[str]:
        return list(self._sessions)

    def segments(self, session: str) -> tuple[Segment, ...]:
        """All segments of a session, in the order in which they began. Raises KeyError for an
        unknown session."""
        return tuple(segment.to_segment() for segment in self._sessions[session].segments)

    def experts(self, session: str) -> tuple[bytes, ...]:
        """The routed experts of each segment; empty if none were reported."""
        return tuple(segment.routed.ids for segment in self._sessions[session].segments)

    def forget(self, session: str) -> None:
        self._sessions.pop(session, None)


def _goes_on(segment: OpenSegment, prompt: Prompt) -> bool:
    return segment.context == prompt.tokens[: len(segment.context)]


def _may_answer(sample: Sample, request: Request) -> bool:
    """True if the sample has everything that the request asks for, and is not too long for it."""
    num_tokens = len(sample.tokens)
    most = request.max_tokens
    fits = num_tokens == most if sample.finish_reason == "length" else num_tokens <= most
    return fits and not request.top_logprobs


def _num_common(known: Sequence[Message], messages: Sequence[Message]) -> int:
    """Number of messages that both have in common at the beginning."""
    if messages[: len(known)] == known:  # nearly always, and fast
        return len(known)
    pairs = enumerate(zip(known, messages, strict=False))
    return next((n for n, (a, b) in pairs if a is not b and a != b), min(len(known), len(messages)))


def _without_nulls(message: Message) -> Message:
    """The message without keys that are None: clients send answers back with or without them."""
    if None not in message.values():
        return message
    return {key: value for key, value in message.items() if value is not None}


def _restored(
    segment: OpenSegment, said: tuple[Message, ...], answered: Sequence[int]
) -> tuple[Message, ...] | None:
    """The messages with the segment's recorded answers in place of their echoes; None if one of the
    answers is missing."""
    history = list(said)
    for place in answered:
        if place < len(said) and said[place] == segment.messages[place]:
            continue
        if place >= len(said) or not _echoes(said[place], segment.messages[place]):
            return None
        history[place] = segment.messages[place]
    return tuple(history)


def _echoes(echo: Message, answer: Message, *, reasoning: bool = False) -> bool:
    """True if both have the same content, apart from whitespace and spelling. An echo may lack the
    reasoning, unless `reasoning`."""
    if echo.get("role") != "assistant":
        return False
    (thought, content), (own_thought, own_content) = _texts(echo), _texts(answer)
    calls, own_calls = echo.get("tool_calls") or (), answer.get("tool_calls") or ()
    return (
        content == own_content
        and (thought == own_thought or not (thought or reasoning))
        and len(calls) == len(own_calls)
        and all(_call(one).means(_call(other)) for one, other in zip(calls, own_calls, strict=True))
    )


def _texts(message: Message) -> tuple[str, str]:
    """Reasoning and content without whitespace. The reasoning may be inside the content."""
    content = "".join((message.get("content") or "").split())
    begin, end = next((marks for marks in THINK_MARKS if marks[1] in content), THINK_MARKS[0])
    thought, _, rest = content.rpartition(end)
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning.strip():
        return "".join(reasoning.split()), rest
    return thought.removeprefix(begin), rest


def _call(said: Mapping[str, Any]) -> Call:
    """A call of a message; its arguments may be a text or an object."""
    arguments = said["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(said["function"]["name"], arguments)
