"""The record of all sessions: the recorder in memory, and the journal that restores it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from etude.core.sampling import Request, Sample, SamplingParams
from etude.core.types import SegmentKind
from etude.model.tokenizer import ChatTokenizer, Message
from etude.serve.conversations import ConversationStore
from etude.serve.http import ApiError
from etude.serve.recorder import Hole, Prompt, Recorder
from etude.serve.segments import RecordedTurn
from etude.serve.session_journal import (
    BrokenSession,
    Entry,
    ForgottenSession,
    Journal,
    NoJournal,
    SessionJournal,
    SettledSession,
    WithdrawnSession,
)

ENCODED_CHARS = 4 << 20
"""Limit on the characters of all remembered texts."""


class EncodedTexts:
    """The tokens of recently encoded texts. Attempts at a task begin alike and see the same files
    and tests, and encoding a text takes a hundred times as long as finding it here."""

    def __init__(self, max_chars: int = ENCODED_CHARS) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._tokens: dict[str, array[int]] = {}

    def get(self, text: str) -> Sequence[int] | None:
        if (tokens := self._tokens.pop(text, None)) is not None:
            self._tokens[text] = tokens  # now the newest
        return tokens

    def add(self, text: str, tokens: Sequence[int]) -> None:
        if text in self._tokens:
            return
        self._tokens[text] = array("I", tokens)
        self._num_chars += len(text)
        while self._num_chars > self._max_chars:
            oldest = next(iter(self._tokens))
            del self._tokens[oldest]
            self._num_chars -= len(oldest)


class SessionRecords:
    """The recorder, and the journal that restores it."""

    def __init__(self, tokenizer: ChatTokenizer, conversations: ConversationStore) -> None:
        self.recorder = Recorder(tokenizer)
        self.encoded = EncodedTexts()
        self._conversations = conversations
        self._journal: Journal = NoJournal()
        self._broken: dict[str, str] = {}
        self._lives: dict[str, object] = {}

    def restore(
        self, journal: SessionJournal, settled: Callable[[SettledSession], None]
    ) -> list[str]:
        """Restore the sessions of earlier processes, and write all sessions to the journal from now
        on. `settled`: receives the results of sessions that others run."""
        journal.restore(lambda entry: self._apply(entry, settled))
        self._journal = self._conversations.journal = journal
        return [*self.recorder.sessions, *self._broken]

    def _apply(self, entry: Entry, settled: Callable[[SettledSession], None]) -> None:
        match entry:
            case RecordedTurn():
                with self._holes(entry.session):
                    self.recorder.apply(entry)
            case BrokenSession():
                self._break(entry.session, entry.reason)
            case SettledSession():
                settled(entry)
            case ForgottenSession() | WithdrawnSession():
                raise AssertionError("the journal leaves out what was forgotten")
            case _:
                self._conversations.restore(entry)

    @contextmanager
    def _holes(self, session: str) -> Iterator[None]:
        try:
            yield
        except Hole as e:
            self._break(session, f"turns are missing from its journal: {e}")

    def _break(self, session: str, reason: str) -> None:
        self.recorder.forget(session)
        self._broken.setdefault(session, reason)

    def check(self, session: str) -> None:
        """Raise ApiError (409) for a session that has lost a turn: it is neither continued nor
        read."""
        if (reason := self._broken.get(session)) is not None:
            message = f"session {session!r} is incomplete and was dropped: {reason}"
            raise ApiError(message, status=409, code="session_incomplete")

    def has_answer(self, session: str) -> bool:
        """True if the session has a recorded answer, even one that was lost."""
        return session in self._broken or session in self.recorder.sessions

    def life(self, session: str) -> object:
        """A marker of the session's present life, taken when a request begins; after `forget` the
        session has another marker."""
        return self._lives.setdefault(session, object())

    async def record(
        self, session: str, prompt: Prompt, sample: Sample, message: Message,
        params: SamplingParams, kind: SegmentKind, life: object,
    ) -> RecordedTurn:  # fmt: skip
        """Record a turn; returns when it is stored. In memory it is recorded at once, so that turns
        are written in the order in which they build on each other. `life`: the marker from when the
        request began. If the session was forgotten since, this raises ApiError (404): a late answer
        must not revive the session, since nobody would forget it again."""
        if self._lives.get(session) is not life:
            raise ApiError(f"session {session!r} has ended", status=404, code="unknown_session")
        turn = self.recorder.turn(session, prompt, sample, message, params, kind)
        self._journal.append(turn)
        self.recorder.apply(turn, prompt.text)
        await self._journal.commit()
        return turn

    async def take_unreceived(
        self, session: str, prompt: Prompt, request: Request
    ) -> Sample | None:
        """As `Recorder.take_unreceived`, but makes sure that the answer is stored, which may have
        failed before."""
        sample = self.recorder.take_unreceived(session, prompt, request)
        if sample is not None:
            await self._journal.commit()
        return sample

    async def forget(self, session: str) -> None:
        self._broken.pop(session, None)
        self._lives.pop(session, None)
        self.recorder.forget(session)
        self._conversations.forget(session)
        self._journal.append(ForgottenSession(session=session))
        await self._journal.commit()
