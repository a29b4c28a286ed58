"""Segments that may still grow, and the turns that they grow by.

A turn holds what it adds to the record before it. So the turns of a session, applied in order,
restore its segments; this is how a session outlives the gateway (`session_journal.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from etude.core.sampling import RegionSpan, Sample, SamplingParams, SamplingSpan, VersionSpan
from etude.core.types import Segment, SegmentKind
from etude.model.tokenizer import Message, Tool

Span = TypeVar("Span", VersionSpan, RegionSpan, SamplingSpan)


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The routed experts of the first `num_tokens` tokens of a context, as reported by the
    engine."""

    num_tokens: int = 0
    ids: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """One answer of a session, as a change to the record before it."""

    session: str
    number: int
    """Number of the turn in its session, from 0. A missing number is a hole."""
    segment: int
    """Index of the segment that it continues; the next free index opens a new one."""
    kind: SegmentKind
    num_known: int
    """Number of messages that the prompt and the segment share at the beginning."""
    messages: tuple[Message, ...]
    """The other messages of the prompt."""
    message: Message
    """The answer as the harness received it."""
    tools: tuple[Tool, ...]
    options: Mapping[str, Any]
    """Options of the template."""
    tokens: tuple[int, ...]
    """Tokens of the prompt after those of the segment."""
    routed: RoutedExperts | None
    """Routed experts of the prompt; None if they are those of the segment."""
    sample: Sample
    params: SamplingParams


@dataclass(slots=True, kw_only=True)
class OpenSegment:
    """A segment that may still grow."""

    kind: SegmentKind
    parent: int | None
    tools: tuple[Tool, ...]
    prompt: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    """The prompt and all tokens after it."""
    messages: tuple[Message, ...] = ()
    answered: list[int] = field(default_factory=list)
    """Indices of the messages that were sampled here."""
    options: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    """The rendered text of the tokens before the last answer; None if it is still to be
    rendered."""
    answer: tuple[int, ...] = ()
    """Tokens of the last answer."""
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    regions: list[RegionSpan] = field(default_factory=list)
    sampling: list[SamplingSpan] = field(default_factory=list)
    routed: RoutedExperts = RoutedExperts()
    asked_routed: RoutedExperts = RoutedExperts()
    """The routed experts known before the last answer."""
    unreceived: Sample | None = None
    """The last answer, until its harness is known to have received it."""

    @property
    def asked(self) -> tuple[int, ...]:
        """The prompt of the last answer."""
        return self.context[: -len(self.answer)]

    def apply(self, turn: RecordedTurn, text: str | None) -> None:
        """Add a turn. `text`: the turn's prompt as rendered by the template."""
        sample, added = turn.sample, turn.tokens
        if not self.answer:
            self.prompt, added = turn.tokens, ()
        self.context = (*self.context, *turn.tokens, *sample.tokens)
        self.mask += [False] * len(added) + [True] * len(sample.tokens)
        self.logprobs += [0.0] * len(added)
        self.logprobs += sample.logprobs
        _extend(self.versions, sample.versions, "version")
        _extend(self.regions, sample.regions or [RegionSpan("", len(sample.tokens))], "region")
        _extend(self.sampling, [SamplingSpan(turn.params, len(sample.tokens))], "params")
        self.messages = (*self.messages[: turn.num_known], *turn.messages, turn.message)
        self.answered.append(len(self.messages) - 1)
        self.text = text
        self.options = turn.options
        self.answer = sample.tokens
        self.asked_routed = self.routed if turn.routed is None else turn.routed
        self.routed = self.asked_routed
        if sample.experts is not None:
            num_read = len(self.context) - 1
            self.routed = RoutedExperts(num_read, self.asked_routed.ids + sample.experts)
        self.unreceived = sample

    def to_segment(self) -> Segment:
        return Segment(
            prompt=self.prompt,
            tokens=self.context[len(self.prompt) :],
            mask=tuple(self.mask),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            regions=tuple(self.regions),
            sampling=tuple(self.sampling),
            kind=self.kind,
            parent=self.parent,
        )


def _extend(spans: list[Span], more: Sequence[Span], key: str) -> None:
    """Append spans, merging neighbours with the same value."""
    for span in more:
        if spans and getattr(spans[-1], key) == getattr(span, key):
            span = type(span)(getattr(span, key), spans.pop().count + span.count)
        spans.append(span)
