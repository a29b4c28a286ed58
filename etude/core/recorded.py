"""Sessions of users as they are stored: a record for every answer, with the tokens that the model
read since the previous answer, and without anything that was redacted.

Redaction keeps every token in its place. The ids of a secret are replaced by a stand-in, and the
places are recorded. The rest is what the engine saw, with one exception: a token after a secret was
drawn from a context that is no longer stored. Its log-prob could not be recomputed, and would let
anyone who has the weights test guesses of the secret; so it is not stored. Tokens before the first
redaction of a segment have log-probs: RL may learn from these. Imitation (SFT) and comparison (DPO)
need no log-probs, and leave out only the answers that were redacted themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

from etude.core.redaction import Finding
from etude.core.sampling import (
    RegionSpan,
    SamplingParams,
    SamplingSpan,
    VersionSpan,
    expand_spans,
    sampling_spans,
    version_spans,
)
from etude.core.types import Segment, SegmentKind

Redaction = Finding
"""A redacted span of tokens: places in the tokens of a turn, read and sampled together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """One answer, and the tokens read between it and the previous one."""

    completion: str
    choice: int
    user: str
    organisation: str
    session: str
    started: float
    """The time at which the session started."""
    time: float
    number: int
    """The number of the turn in its session, from 0 on."""
    propensity: float
    """The probability with which its session was selected for recording."""
    policy: str
    vocabulary: str
    """The digest of the tokenizer that the ids belong to."""
    segment: int
    start: int
    """Tokens of the segment before this turn."""
    kind: SegmentKind
    parent: int | None
    read: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probs of the sampled tokens before the first redaction of the segment; there may be fewer
    entries than tokens."""
    versions: tuple[VersionSpan, ...]
    regions: tuple[RegionSpan, ...]
    params: SamplingParams
    redacted: tuple[Redaction, ...]
    first_message: int
    """Messages of the segment before this turn."""
    messages: tuple[dict[str, Any], ...]
    """The messages since then; the last one is the answer."""
    tools: tuple[dict[str, Any], ...]
    """The tools, in the turn that opens a segment."""
    arm: str = ""
    """The pool of workers that answered, if there are several (`core.traffic`)."""
    arm_propensity: float = 1.0
    """The probability with which its user was assigned to that arm."""

    @property
    def answer(self) -> tuple[str, int]:
        return self.completion, self.choice

    @property
    def answer_redacted(self) -> bool:
        return any(span.end > len(self.read) for span in self.redacted)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSegment:
    """A context of a session, with its turns in order."""

    turns: tuple[RecordedTurn, ...]

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [message for turn in self.turns for message in turn.messages]

    @property
    def answers(self) -> list[int]:
        """The place in `messages` of each turn's answer."""
        return [turn.first_message + len(turn.messages) - 1 for turn in self.turns]

    def exact(self) -> Segment | None:
        """The segment as the engine saw it, up to its first redaction; no token after that counts
        as sampled. None if no sampled token is left."""
        parts = [(turn, len(turn.logprobs)) for turn in self.turns]
        if not any(count for _, count in parts):
            return None
        first, _ = parts[0]
        tokens: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        for turn, count in parts:
            before = () if turn is first else turn.read
            rest = len(turn.sampled) - count
            tokens += [*before, *turn.sampled]
            mask += [False] * len(before) + [True] * count + [False] * rest
            logprobs += [*[0.0] * len(before), *turn.logprobs, *[0.0] * rest]
        counted = [(turn, count) for turn, count in parts if count]
        return Segment(
            prompt=first.read,
            tokens=tuple(tokens),
            mask=tuple(mask),
            logprobs=tuple(logprobs),
            versions=version_spans(
                chain.from_iterable(
                    list(expand_spans(turn.versions))[:count] for turn, count in counted
                )
            ),
            regions=_region_spans(counted),
            sampling=sampling_spans(SamplingSpan(turn.params, count) for turn, count in counted),
            kind=first.kind,
            parent=first.parent,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSession:
    user: str
    organisation: str
    session: str
    started: float
    propensity: float
    policy: str
    segments: tuple[RecordedSegment, ...]

    @property
    def turns(self) -> list[RecordedTurn]:
        return [turn for segment in self.segments for turn in segment.turns]


@dataclass(frozen=True, slots=True)
class Sessions:
    """The sessions put together from turns, and those that could not be."""

    sessions: list[RecordedSession] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Number of sessions by reason."""


def put_together(turns: Iterable[RecordedTurn]) -> Sessions:
    """Assemble sessions from their turns, which may come in any order. A session that lacks a turn
    is dropped."""
    by_session: dict[tuple[str, str], dict[int, RecordedTurn]] = defaultdict(dict)
    for turn in turns:
        by_session[turn.user, turn.session][turn.number] = turn
    made = Sessions()
    for (user, session), numbered in sorted(by_session.items()):
        found = [numbered[number] for number in sorted(numbered)]
        segments = _segments(found)
        if sorted(numbered) != list(range(len(numbered))) or segments is None:
            made.dropped["hole"] += 1
            continue
        first = found[0]
        made.sessions.append(
            RecordedSession(
                user=user,
                organisation=first.organisation,
                session=session,
                started=first.started,
                propensity=first.propensity,
                policy=first.policy,
                segments=segments,
            )
        )
    return made


def _segments(turns: Sequence[RecordedTurn]) -> tuple[RecordedSegment, ...] | None:
    """The segments of a session; None if one does not continue where its previous turn ended."""
    by_segment: dict[int, list[RecordedTurn]] = defaultdict(list)
    for turn in turns:
        by_segment[turn.segment].append(turn)
    for found in by_segment.values():
        ends = accumulate(len(turn.read) + len(turn.sampled) for turn in found)
        if [turn.start for turn in found] != [0, *ends][:-1]:
            return None
    if sorted(by_segment) != list(range(len(by_segment))):
        return None
    return tuple(RecordedSegment(turns=tuple(by_segment[n])) for n in sorted(by_segment))


def stripped(
    turn: RecordedTurn, redacted: Sequence[Redaction], stand_in: int, *, exact_before: bool
) -> RecordedTurn:
    """The turn without the secrets: `redacted` are places in its read and sampled tokens.
    `exact_before`: nothing was redacted earlier in its segment."""
    places = {at for span in redacted for at in range(span.start, span.end)}
    tokens = [
        stand_in if at in places else token for at, token in enumerate((*turn.read, *turn.sampled))
    ]
    read = len(turn.read)
    exact = max(0, min(places, default=len(tokens)) - read) if exact_before else 0
    return replace(
        turn,
        read=tuple(tokens[:read]),
        sampled=tuple(tokens[read:]),
        logprobs=turn.logprobs[:exact],
        redacted=tuple(redacted),
    )


def _region_spans(counted: Iterable[tuple[RecordedTurn, int]]) -> tuple[RegionSpan, ...]:
    spans: list[RegionSpan] = []
    for turn, left in counted:
        for span in turn.regions:
            taken = min(left, span.count)
            left -= taken
            if spans and spans[-1].region == span.region:
                taken += spans.pop().count
            if taken:
                spans.append(RegionSpan(span.region, taken))
    return tuple(spans)


def by_answer(sessions: Iterable[RecordedSession]) -> Mapping[tuple[str, int], str]:
    """The user of every answer."""
    return {turn.answer: session.user for session in sessions for turn in session.turns}
