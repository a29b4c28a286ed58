"""Recording of answers to users, redacted before the first write.

The text of a session stays in memory, since the next turn continues it. A `RecordedTurn` is written
for each answer, before the client is told that the answer is complete. A session that cannot be
written without a secret is dropped: what was stored of it is deleted, and the reason is counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from etude.core.consent import Identity
from etude.core.errors import EtudeError
from etude.core.recorded import RecordedTurn, Redaction, stripped
from etude.core.redaction import Finding, Redactor, is_distinctive
from etude.core.sampling import RegionSpan, Request, Sample, Token
from etude.core.traffic import Arm
from etude.core.types import SegmentKind
from etude.model.detokenizer import IncrementalDetokenizer
from etude.model.tokenizer import ChatTokenizer, Message, Tool
from etude.serve.answerer import (
    ServedModel,
    Show,
    TemplateOptions,
    in_thread_if_long,
    template_errors,
)
from etude.serve.http import gather
from etude.serve.recorder import Prompt, Recorder
from etude.serve.router import Router
from etude.store.production import ProductionStore

MAX_ROUNDS = 4
"""Limit on repeating the redaction: removing one text may make another look like a secret."""


class Unredactable(Exception):
    """A text in which secrets are still found after all rounds of redaction. It is not stored."""


@dataclass(slots=True, kw_only=True)
class OpenSession:
    """A session of a user that is being recorded."""

    key: str
    """Its name in memory."""
    name: str
    """Its name in the store."""
    identity: Identity
    started: float
    propensity: float
    used: float
    router: Router | None = None
    """The router that answers it, if there are worker pools."""
    arm: Arm | None = None
    number: int = 0
    known: set[str] = field(default_factory=set)
    """Values that were recognised as secrets."""
    inexact: set[int] = field(default_factory=set)
    """Segments in which something was redacted."""
    dropped: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Recording:
    """The sessions that are being recorded. `permitted`: returns False once a user may not be
    recorded any more."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        store: ProductionStore,
        redactor: Redactor,
        policy: str,
        permitted: Callable[[OpenSession], bool],
    ) -> None:
        self.recorder = Recorder(tokenizer)
        self.counts: Counter[str] = Counter()
        self.sessions: dict[str, OpenSession] = {}
        self._store = store
        self._policy = policy
        self._vocabulary = tokenizer.vocabulary
        self._permitted = permitted
        self._redactor = redactor
        self._tokens = TokenRedactor(tokenizer, redactor)
        self._writing: set[asyncio.Task[None]] = set()

    def forget(self, session: OpenSession) -> None:
        self.sessions.pop(session.key, None)
        self.recorder.forget(session.key)

    async def keep(
        self, session: OpenSession, prompt: Prompt, request: Request, sample: Sample,
        message: Message, kind: SegmentKind, answer: tuple[str, int],
    ) -> None:  # fmt: skip
        """Record an answer. Returns when it is stored or dropped. A client that goes away meanwhile
        changes nothing."""
        # A forgotten session must not be recorded again, since nobody would forget it a second
        # time: a deleted user stays in no memory.
        if session.dropped or self.sessions.get(session.key) is not session:
            return
        placed = self.recorder.record(session.key, prompt, sample, message, request.params, kind)
        number, session.number = session.number, session.number + 1
        turn = RecordedTurn(
            completion=answer[0],
            choice=answer[1],
            user=session.identity.user,
            organisation=session.identity.organisation,
            session=session.name,
            started=session.started,
            time=self._store.now(),
            number=number,
            propensity=session.propensity,
            arm=session.arm.pool if session.arm else "",
            arm_propensity=session.arm.propensity if session.arm else 1.0,
            policy=self._policy,
            vocabulary=self._vocabulary,
            segment=placed.segment,
            start=placed.num_tokens,
            kind=placed.kind,
            parent=placed.parent,
            read=prompt.tokens[placed.num_tokens :],
            sampled=sample.tokens,
            logprobs=sample.logprobs,
            versions=sample.versions,
            regions=sample.regions or (RegionSpan("", len(sample.tokens)),),
            params=request.params,
            redacted=(),
            first_message=placed.num_messages,
            messages=(*prompt.messages[placed.num_messages :], message),
            tools=() if placed.num_tokens else prompt.tools,
        )
        task = asyncio.ensure_future(self._write(session, turn))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        await asyncio.shield(task)

    async def _write(self, session: OpenSession, turn: RecordedTurn) -> None:
        async with session.lock:
            if session.dropped:
                return
            if not self._permitted(session):
                await self.drop(session, "consent_withdrawn", delete=False)
                return
            size = 4 * (len(turn.read) + len(turn.sampled))
            try:
                clean, new = await in_thread_if_long(size, lambda: self._redacted(session, turn))
                gone = await asyncio.to_thread(self._store_turn, clean, new)
            # The other errors: data nested too deep to search, or text that cannot be encoded.
            except (Unredactable, RecursionError, OverflowError, UnicodeError):
                await self.drop(session, "unredactable")
                return
            except EtudeError as e:
                # the user has an answer; recording what follows would leave a gap
                print(f"recording of a session stops: {e}", file=sys.stderr, flush=True)
                await self.drop(session, "store_failed", delete=False)
                return
            self.counts["dropped_late_secret"] += gone
            self.counts["turns"] += 1
            self.counts["redactions"] += len(clean.redacted)

    async def drop(self, session: OpenSession, reason: str, *, delete: bool = True) -> None:
        session.dropped = reason
        session.known.clear()
        self.counts[f"dropped_{reason}"] += 1
        if reason == "store_failed":
            return
        if delete:
            await asyncio.to_thread(self._store.delete_session, session.identity.user, session.name)
        await asyncio.to_thread(self._store.drop, {f"sessions {reason}": 1})

    def _store_turn(self, clean: RecordedTurn, new: set[str]) -> int:
        """Store a turn. Earlier sessions of the user that contain one of its newly recognised
        secrets are deleted. If that includes this session, it now lacks its beginning and is
        dropped when it is read."""
        gone = self._store.drop_sessions_with(clean.user, set(filter(is_distinctive, new)))
        self._store.put_turn(clean)
        return gone

    def _redacted(self, session: OpenSession, turn: RecordedTurn) -> tuple[RecordedTurn, set[str]]:
        """The redacted turn, and the values that it is the first to reveal as secrets."""
        said = [_with_parsed_calls(message) for message in turn.messages]
        new = self._redactor.remember(self._tokens.text(turn))
        new |= self._redactor.values([*said, *turn.tools])
        new -= session.known
        session.known |= new
        clean = self._tokens.strip(
            turn, session.known, exact_before=turn.segment not in session.inexact
        )
        if clean.redacted:
            session.inexact.add(turn.segment)
        messages = [_with_spelled_calls(self._settled(message, session.known)) for message in said]
        tools = [self._settled(tool, session.known) for tool in turn.tools]
        params = replace(turn.params, grammar=self._settled(turn.params.grammar, session.known))
        return replace(clean, messages=tuple(messages), tools=tuple(tools), params=params), new

    def _settled(self, value: Any, known: Collection[str]) -> Any:
        for _ in range(MAX_ROUNDS):
            before, value = value, self._redactor.redact_json(value, known)
            if value == before:
                return value
        raise Unredactable


class TokenRedactor:
    """Redacts token positions: each token that holds a part of a secret."""

    def __init__(self, tokenizer: ChatTokenizer, redactor: Redactor) -> None:
        self._decode = tokenizer.decode
        self._redactor = redactor
        self._stand_in = tokenizer.encode("*")[0]

    def text(self, turn: RecordedTurn) -> str:
        return self._decode((*turn.read, *turn.sampled))

    def strip(
        self, turn: RecordedTurn, known: Collection[str], *, exact_before: bool
    ) -> RecordedTurn:
        places: dict[int, str] = {}
        clean = turn
        for _ in range(MAX_ROUNDS):
            found = self._redactor.find(self.text(clean), known)
            if not found:
                return clean
            before = len(places)
            for place, kind in self._places((*clean.read, *clean.sampled), found):
                places.setdefault(place, kind)
            if len(places) == before:  # the stand-ins themselves look like a secret
                return clean
            clean = stripped(turn, _spans(places), self._stand_in, exact_before=exact_before)
        raise Unredactable

    def _places(self, tokens: Sequence[int], found: Sequence[Finding]) -> list[tuple[int, str]]:
        """The positions of tokens that overlap the findings. A token that is only a part of a
        character overlaps what that character overlaps."""
        detokenizer = IncrementalDetokenizer(self._decode)
        begins, at = [], 0
        for token in tokens:
            begins.append(at)
            at += len(detokenizer.push(token))
        end = at + len(detokenizer.end())
        ends = [next_ + (next_ == begin) for begin, next_ in zip(begins, begins[1:], strict=False)]
        ends.append(end)
        return [
            (place, finding.kind)
            for finding in found
            for place, (begin, stop) in enumerate(zip(begins, ends, strict=True))
            if begin < finding.end and stop > finding.start
        ]


def _spans(places: dict[int, str]) -> list[Redaction]:
    spans: list[Redaction] = []
    for place, kind in sorted(places.items()):
        if spans and spans[-1].end == place and spans[-1].kind == kind:
            spans[-1] = replace(spans[-1], end=place + 1)
        else:
            spans.append(Redaction(place, place + 1, kind))
    return spans


def _with_parsed_calls(message: Message) -> Message:
    """The message with the arguments of its calls as objects, so that fields have names and texts
    are unescaped."""
    if not message.get("tool_calls"):
        return message

    def parsed(call: dict[str, Any]) -> dict[str, Any]:
        try:
            arguments = json.loads(call["function"]["arguments"])
        except (TypeError, ValueError):
            return call
        return call | {"function": call["function"] | {"arguments": [arguments]}}

    return message | {"tool_calls": [parsed(call) for call in message["tool_calls"]]}


def _with_spelled_calls(message: Message) -> Message:
    def spelled(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, list):
            return call
        text = json.dumps(arguments[0], ensure_ascii=False)
        return call | {"function": call["function"] | {"arguments": text}}

    if not message.get("tool_calls"):
        return message
    return message | {"tool_calls": [spelled(call) for call in message["tool_calls"]]}


class RecordingAnswerer:
    """Answers one request of a recorded session."""

    def __init__(
        self, model: ServedModel, router: Router, recording: Recording, session: OpenSession,
        kind: SegmentKind,
    ) -> None:  # fmt: skip
        self._model = model
        self._router = router
        self._recording = recording
        self._session = session
        self._kind = kind
        self._prompt: Prompt | None = None

    async def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: TemplateOptions
    ) -> tuple[int, ...]:
        with template_errors():
            draft = self._recording.recorder.partial_prompt(
                self._session.key, messages, tools, options
            )
            self._prompt = draft.complete(*await self._model.encode([draft.text], "messages"))
        return self._prompt.tokens

    async def sample(self, requests: Sequence[Request], show: Show, id: str) -> list[Sample]:
        samples = await gather(
            [self._router.sample(request, self._session.key) for request in requests]
        )
        for choice, (request, sample) in enumerate(zip(requests, samples, strict=True)):
            await self._keep(request, sample, show, (id, choice))
        return samples

    async def stream(
        self, requests: Sequence[Request], show: Show, id: str
    ) -> list[AsyncIterator[Token | Sample]]:
        return [
            self._stream(request, show, (id, choice)) for choice, request in enumerate(requests)
        ]

    async def _stream(
        self, request: Request, show: Show, answer: tuple[str, int]
    ) -> AsyncIterator[Token | Sample]:
        stream = self._router.stream(request, self._session.key)
        async with aclosing(stream):  # type: ignore[type-var]
            async for event in stream:
                if isinstance(event, Sample):
                    await self._keep(request, event, show, answer)
                yield event

    async def _keep(
        self, request: Request, sample: Sample, show: Show, answer: tuple[str, int]
    ) -> None:
        """Record the answer, unless it continues a plain text, which is not a conversation."""
        if self._prompt is not None:
            await self._recording.keep(
                self._session, self._prompt, request, sample, show(request, sample), self._kind,
                answer,
            )  # fmt: skip
