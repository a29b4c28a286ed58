"""From messages to tokens and back, without losing one: the only place that sees both.

A harness speaks messages; the trainer needs the very tokens that the engine read and sampled.
Rendering and tokenising a history anew would not give them back (another split of the same text,
arguments of a tool call in another spelling), so what was recorded is kept, and only what the
harness added since is rendered, encoded and put behind it:

    turn 1   prompt                              sampled
    turn 2   prompt  sampled  what was added     sampled          (one segment, one unbroken
                                                                  context)

Harnesses seldom send an answer back as they were given it: they drop its reasoning, strip its
space, or spell the arguments of a call in their own way. Such an echo is known by what it says, and
the answer as it was recorded takes its place before the history is rendered. So what is compared is
never a message, but what the template makes of the history: if that begins with the text that the
recorded tokens stand for, it goes on from them.

A history that does not go on from anything recorded (a summary, a compaction, a sub-agent) opens a
new segment. So does one that the template shows in another way than it was recorded, as those do
that drop the reasoning of earlier turns: a model must see, and be trained on, what its template
means it to see. A segment's parent is the newest one before it, and its kind is what the harness
says of the request that opens it.

The experts of a sparse model are recorded once for each token: a turn reports those of the tokens
that no turn before it has reported. What a token was routed to when it was first read is what the
tokens behind it were sampled from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from etude.core.sampling import (
    RegionSpan,
    Sample,
    SamplingParams,
    SamplingSpan,
    VersionSpan,
    expand_spans,
    sampling_spans,
    version_spans,
)
from etude.core.types import Segment, SegmentKind
from etude.model.output_parser import THINK_END, THINK_START
from etude.model.tokenizer import ChatTokenizer, Message, Tool
from etude.model.tool_calls import Call


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of the first `num_tokens` tokens of a context, as the engine reports them."""

    num_tokens: int = 0
    ids: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The tokens that the engine is to read, and the messages that they stand for."""

    tokens: tuple[int, ...]
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    text: str
    """The messages as the template shows them."""
    routed: RoutedExperts = RoutedExperts()


@dataclass(frozen=True, slots=True)
class PartialPrompt:
    """A prompt whose end, `text`, is still to be encoded."""

    known: Prompt
    text: str

    def complete(self, tokens: Sequence[int]) -> Prompt:
        return replace(self.known, tokens=(*self.known.tokens, *tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where an answer was recorded."""

    segment: int
    kind: SegmentKind
    parent: int | None
    num_tokens: int
    """That the segment held before."""
    num_messages: int


@dataclass(slots=True, kw_only=True)
class _OpenSegment:
    """A segment that may still grow."""

    prompt: tuple[int, ...]
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    kind: SegmentKind
    parent: int | None
    answered: list[int] = field(default_factory=list)
    """Which of the messages were sampled here."""
    text: str = ""
    """What the tokens before the last answer stand for."""
    answer: tuple[int, ...] = ()
    """The last one."""
    tokens: list[int] = field(default_factory=list)  # behind the prompt
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: tuple[VersionSpan, ...] = ()
    regions: list[RegionSpan] = field(default_factory=list)
    sampling: tuple[SamplingSpan, ...] = ()
    routed: RoutedExperts = RoutedExperts()

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)

    def append(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        self.tokens += tokens
        self.mask += [logprobs is not None] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs

    def add_region(self, region: str, count: int) -> None:
        if self.regions and self.regions[-1].region == region:
            count += self.regions.pop().count
        self.regions.append(RegionSpan(region, count))

    def to_segment(self) -> Segment:
        return Segment(
            prompt=self.prompt,
            tokens=tuple(self.tokens),
            mask=tuple(self.mask),
            logprobs=tuple(self.logprobs),
            versions=self.versions,
            regions=tuple(self.regions),
            sampling=self.sampling,
            kind=self.kind,
            parent=self.parent,
        )


class Recorder:
    """Pure: no clock, no network. A session is whatever shares a name; it may hold several
    conversations."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._sessions: dict[str, list[_OpenSegment]] = {}

    def partial_prompt(
        self,
        session: str,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
    ) -> PartialPrompt:
        """The recorded tokens and what the messages add to them, or all of the messages rendered
        anew. `options`: of the template."""
        said, offered = tuple(map(_without_nulls, messages)), tuple(tools)
        for segment in reversed(self._sessions.get(session, [])):
            history = _restored(segment, said) if segment.tools == offered else None
            if history is None:
                continue
            text = self._tokenizer.render(history, offered, answer=True, options=options)
            if (added := self._added(segment, text)) is not None:
                known = Prompt(
                    tokens=segment.context,
                    messages=history,
                    tools=offered,
                    text=text,
                    routed=segment.routed,
                )
                return PartialPrompt(known, added)
        text = self._tokenizer.render(said, offered, answer=True, options=options)
        return PartialPrompt(Prompt(tokens=(), messages=said, tools=offered, text=text), text)

    def _added(self, segment: _OpenSegment, text: str) -> str | None:
        """What stands in `text` behind the segment; None if it does not go on from it."""
        if not text.startswith(segment.text):  # a template that shows old turns in another way
            return None
        # The end of the answer: sampled, or, if the answer was cut off, missing from what was
        # recorded so far.
        last = segment.answer[-1]
        ended = last in self._tokenizer.stop_token_ids
        end_mark = self._tokenizer.decode([last]) if ended else self._tokenizer.eos_token
        end = text.find(end_mark, len(segment.text))
        if end < 0 or not self._shows(text[len(segment.text) : end], segment):
            return None
        return text[end + len(end_mark) * ended :]

    def _shows(self, shown: str, segment: _OpenSegment) -> bool:
        """Whether the template's text of the last answer says what was sampled. Calls may be spelt
        otherwise, and there may be other space around; no word may be missing."""
        before = segment.context[: -len(segment.answer)]
        told, sampled = (
            self._tokenizer.parse(tokens, segment.tools, str, before)
            for tokens in (self._tokenizer.encode(shown), segment.answer)
        )
        return _echoes(told, sampled, reasoning=True)

    def record(
        self, session: str, prompt: Prompt, sample: Sample, message: Message,
        params: SamplingParams, kind: SegmentKind = "turns",
    ) -> Placement:  # fmt: skip
        """The engine answered `prompt` with `sample`, drawn with `params`, and the harness was
        given it as `message`. The experts of the sample begin where those of the prompt end.
        `kind`: of the segment, if this opens one."""
        segments = self._sessions.setdefault(session, [])
        # Tokens decide, not messages: of two answers to the same prompt, the second one begins a
        # segment of its own.
        segment = next(
            (
                s
                for s in reversed(segments)
                if s.context == prompt.tokens[: len(s.prompt) + len(s.tokens)]
            ),
            None,
        )
        if segment is None:
            segment = _OpenSegment(
                prompt=prompt.tokens,
                messages=(),
                tools=prompt.tools,
                routed=prompt.routed,
                kind=kind,
                parent=len(segments) - 1 if segments else None,
            )
            segments.append(segment)
            held = (0, 0)
        else:
            held = (len(segment.prompt) + len(segment.tokens), len(segment.messages))
        segment.append(prompt.tokens[len(segment.prompt) + len(segment.tokens) :])
        segment.append(sample.tokens, sample.logprobs)
        segment.versions = version_spans(
            chain(expand_spans(segment.versions), expand_spans(sample.versions))
        )
        segment.sampling = sampling_spans(
            [*segment.sampling, SamplingSpan(params, len(sample.tokens))]
        )
        for span in sample.regions or [RegionSpan("", len(sample.tokens))]:
            segment.add_region(span.region, span.count)
        segment.answered.append(len(prompt.messages))
        segment.messages = (*prompt.messages, _without_nulls(message))
        segment.text, segment.answer = prompt.text, sample.tokens
        if sample.experts is not None:
            num_read = len(prompt.tokens) + len(sample.tokens) - 1
            segment.routed = RoutedExperts(num_read, prompt.routed.ids + sample.experts)
        return Placement(
            segment=next(n for n, one in enumerate(segments) if one is segment),
            kind=segment.kind,
            parent=segment.parent,
            num_tokens=held[0],
            num_messages=held[1],
        )

    def segments(self, session: str) -> tuple[Segment, ...]:
        """All segments of a session in the order in which they began. Raises KeyError for an
        unknown session."""
        return tuple(segment.to_segment() for segment in self._sessions[session])

    def experts(self, session: str) -> tuple[bytes, ...]:
        """Of each segment; empty if none were reported."""
        return tuple(segment.routed.ids for segment in self._sessions[session])

    def forget(self, session: str) -> None:
        self._sessions.pop(session, None)


def _without_nulls(message: Message) -> Message:
    """Without the keys that say nothing: clients send an answer back with or without them."""
    return {key: value for key, value in message.items() if value is not None}


def _restored(segment: _OpenSegment, said: tuple[Message, ...]) -> tuple[Message, ...] | None:
    """The messages with the segment's answers as they were given; None if one is not there."""
    if len(said) < len(segment.messages):
        return None
    history = list(said)
    for place in segment.answered:
        if not _echoes(said[place], segment.messages[place]):
            return None
        history[place] = segment.messages[place]
    return tuple(history)


def _echoes(echo: Message, answer: Message, *, reasoning: bool = False) -> bool:
    """Whether both say the same, but for space and spelling. An echo may leave the reasoning out,
    unless `reasoning`."""
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
    """Reasoning and content without space; the reasoning may stand within the content."""
    content = "".join((message.get("content") or "").split())
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning.strip():
        return "".join(reasoning.split()), content.rpartition(THINK_END)[2]
    reasoning, mark, rest = content.rpartition(THINK_END)
    return (reasoning.removeprefix(THINK_START), rest) if mark else ("", content)


def _call(said: Mapping[str, Any]) -> Call:
    """Of a message; its arguments may be a text or an object."""
    arguments = said["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(said["function"]["name"], arguments)
