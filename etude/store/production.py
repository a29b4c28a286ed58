"""Storage of users' sessions and feedback in production mode, by user, so that a user can be
deleted.

    production/users/{user}/turns/{session}/{number:06d}   a `RecordedTurn`
    production/users/{user}/feedback/{event}               a `FeedbackEvent`
    production/consent/{received}-{time}-{subject}-{word}  a `Consent`, all in its name
    production/tombstones/{user}                           that, and when, a user was deleted
    production/news/..                                     users with recent activity (`store.news`)
    production/drops/{time}-{random}.json                  counts of dropped objects by reason

A session's name begins with the milliseconds of its start. Names are pseudonyms and digests: the
users' own names are not stored anywhere. Nothing is written before it was redacted, so a process
may die at any point; every acknowledged object is stored, since objects appear atomically.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from blake3 import blake3

from etude.core.consent import Consent, Tombstone, consents, is_gone
from etude.core.errors import EtudeError
from etude.core.feedback import FeedbackEvent, Joined, join
from etude.core.recorded import RecordedTurn, Sessions, by_answer, put_together
from etude.store.codec import Damaged, from_json, pack, seal, to_json, unpack
from etude.store.news import News
from etude.store.objects import Missing, Objects, ReadOnce

USERS = "production/users"
CONSENT = "production/consent"
TOMBSTONES = "production/tombstones"
STALE_S = 3600.0
"""After this time a half-written file has no writer any more."""
_CONSENT = re.compile(rf"{CONSENT}/\d{{13}}-(\d{{13}})-([0-9a-f]{{32}})-(granted|refused)")
_KEY = re.compile(
    rf"{USERS}/([0-9a-f]{{32}})/(?:turns/(\d{{13}}-[0-9a-f]{{32}})/\d{{6,}}|feedback/([0-9a-f]{{32}}))"
)
_USER = re.compile(rf"{USERS}/([0-9a-f]{{32}})/")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserKey:
    """The parsed key of a turn of a session, or of an event."""

    key: str
    user: str
    session: str = ""
    event: str = ""

    @property
    def session_started(self) -> float:
        """The start of the session, from its name."""
        return int(self.session.partition("-")[0]) / 1000


class Conflict(EtudeError):
    """An event with this id is already stored, with other content."""


class ProductionStore:
    """The store of production mode; any number of writers. `now` is for tests. `announces`: write
    news for processes that follow users, such as the loop of real-time RL."""

    def __init__(
        self,
        objects: Objects,
        now: Callable[[], float] = time.time,
        *,
        announces: bool = False,
    ) -> None:
        self.objects = objects
        self.now = now
        self.news = News(objects, now)
        self._announces = announces
        self._tombstones = ReadOnce(objects, TOMBSTONES, self._tombstone)

    # Turns

    def put_turn(self, turn: RecordedTurn) -> None:
        """Store a redacted turn. If its user was deleted meanwhile, it is deleted again."""
        key = _turn_key(turn)
        self.objects.put_sealed(key, pack(turn))
        self._announce(turn.user)
        self._delete_if_gone(key, turn.user, turn.started)

    def _delete_if_gone(self, key: str, user: str, time: float) -> None:
        """Delete an object of a deleted user, since the deletion may have listed the objects before
        this one was written."""
        tombstone = self.tombstone(user)
        if tombstone is not None and time <= tombstone.time:
            self.objects.delete(key)
            self.news.forget(user)

    def delete_session(self, user: str, session: str) -> None:
        for key in self.objects.list(f"{USERS}/{user}/turns/{session}"):
            self.objects.delete(key)
        self._announce(user)

    def _announce(self, user: str) -> None:
        if self._announces:
            self.news.tell(user)

    def drop_sessions_with(self, user: str, values: Collection[str]) -> int:
        """Delete the sessions of a user that contain one of these values; return their number."""
        texts = (text for value in values for text in (value, json.dumps(value)[1:-1]))
        spelled = {text.encode(errors="surrogatepass") for text in texts}
        found = {
            key.session
            for key in (self.keys(user) if spelled else ())
            if key.session and any(text in self._bytes(key.key) for text in spelled)
        }
        for session in found:
            self.delete_session(user, session)
        self.drop({"sessions late_secret": len(found)} if found else {})
        return len(found)

    def sessions(self, refused: Collection[str] = ()) -> Sessions:
        """All sessions that may be read now: none of deleted users, nor of users who, or whose
        organisation, have withdrawn consent. `refused`: further withdrawn subjects."""
        tombstones, refused = self.tombstones(), self.refused() | set(refused)
        turns: list[RecordedTurn] = []
        dropped: dict[str, set[tuple[str, str]]] = {"consent_withdrawn": set(), "damaged": set()}
        for key, turn in self._turns():
            session = (key.user, key.session)
            if turn is None:
                dropped["damaged"].add(session)
                continue
            tombstone = tombstones.get(turn.user)
            if tombstone is not None and turn.started <= tombstone.time:
                continue
            if turn.user in refused or turn.organisation in refused:
                dropped["consent_withdrawn"].add(session)
            else:
                turns.append(turn)
        made = put_together(t for t in turns if (t.user, t.session) not in dropped["damaged"])
        for reason, sessions in dropped.items():
            if sessions:
                made.dropped[reason] += len(sessions)
        return made

    # Feedback

    def put_feedback(self, event: FeedbackEvent) -> bool:
        """Store an event. True if it is new, False if it was already stored; raises `Conflict` if
        another event has its id. If its user was deleted meanwhile, it is deleted again."""
        key = f"{USERS}/{event.user}/feedback/{event.event}"
        is_new = self.objects.create(key, seal(to_json(event)))
        self._announce(event.user)  # even if not new: its writer may have died here
        if is_new:
            self._delete_if_gone(key, event.user, event.received)
            return True
        there = self._get(key, FeedbackEvent)
        if there is not None and _said(there) != _said(event):
            raise Conflict("this event id belongs to another event: use a new id for each event")
        return False

    def feedback(self) -> list[FeedbackEvent]:
        tombstones = self.tombstones()
        return [
            event
            for _, event in self._events()
            if event is not None
            and (
                (tombstone := tombstones.get(event.user)) is None or event.received > tombstone.time
            )
        ]

    def joined(self, sessions: Sessions, *, horizon_s: float) -> Joined:
        owners = by_answer(sessions.sessions)
        return join(owners, self.feedback(), now=self.now(), horizon_s=horizon_s)

    # Consent

    def put_consent(self, consent: Consent) -> None:
        """Store a consent. Each is a separate object, so that no concurrent one is lost."""
        word = "granted" if consent.granted else "refused"
        received, said = (int(t * 1000) for t in (self.now(), consent.time))
        name = f"{received:013d}-{said:013d}-{consent.subject}-{word}"
        self.objects.put(f"{CONSENT}/{name}", b"")

    def consents(self, since: float = 0.0) -> dict[str, Consent]:
        """The current consent by subject, of all that were received since."""
        listed = self.objects.list(CONSENT, after=f"{CONSENT}/{int(since * 1000):013d}")
        found = (_CONSENT.fullmatch(key) for key in listed)
        return consents(
            Consent(subject=word[2], granted=word[3] == "granted", time=int(word[1]) / 1000)
            for word in found
            if word
        )

    def refused(self) -> set[str]:
        return {subject for subject, word in self.consents().items() if not word.granted}

    # Deleting

    def delete_user(self, user: str) -> int:
        """Delete all objects of a user before returning; return their number. The tombstone is
        written first, so that concurrent writers see it. Apart from it only a refusal is kept, if
        there was one, because it would otherwise be forgotten."""
        tombstone = Tombstone(user=user, time=self.now())
        self.objects.put_sealed(f"{TOMBSTONES}/{user}", to_json(tombstone))
        deleted = 0
        while keys := self.objects.list(f"{USERS}/{user}"):
            for key in keys:
                self.objects.delete(key)
            deleted += len(keys)
        for key in self.objects.list(CONSENT):
            if key.endswith(f"-{user}-granted"):
                self.objects.delete(key)
        self.news.forget(user)
        self.objects.sweep(f"{USERS}/{user}")
        return deleted

    def tombstone(self, user: str) -> Tombstone | None:
        return self._get(f"{TOMBSTONES}/{user}", Tombstone)

    def tombstones(self) -> dict[str, Tombstone]:
        return {tombstone.user: tombstone for tombstone in self._tombstones.items().values()}

    def _tombstone(self, key: str) -> Tombstone:
        return from_json(self.objects.get_sealed(key), Tombstone, self._where(key))

    def sweep(self, *, retention_s: float, horizon_s: float) -> Mapping[str, int]:
        """Delete objects past their retention time, objects covered by a tombstone, and feedback
        whose answer never came; return the number of each."""
        counts: Counter[str] = Counter()
        answers: set[tuple[str, str]] = set()
        now, tombstones = self.now(), self.tombstones()

        def gone(time: float, user: str) -> str | None:
            tombstone = tombstones.get(user)
            return is_gone(time, now=now, retention_s=retention_s, tombstone=tombstone)

        def remove(key: UserKey, reason: str) -> None:
            self.objects.delete(key.key)
            counts[reason] += 1

        for key, turn in self._turns():
            if why := gone(key.session_started, key.user):
                remove(key, f"turns {why}")
            elif turn is not None:
                answers.add((key.user, turn.completion))
        for key, event in list(self._events()):
            if event is None:  # its time cannot be read
                remove(key, "feedback damaged")
            elif why := gone(event.received, event.user):
                remove(key, f"feedback {why}")
            elif (event.user, event.completion) in answers:
                continue
            elif now - event.received > horizon_s:
                remove(key, "feedback unknown_completion")
        self.news.sweep()
        self.objects.sweep(USERS, min_age_s=STALE_S)
        self.drop(counts)
        return counts

    def drop(self, counts: Mapping[str, int]) -> None:
        """Store the counts of dropped objects."""
        if counts:
            name = f"{int(self.now() * 1000):013d}-{secrets.token_hex(4)}"
            self.objects.put_sealed(f"production/drops/{name}.json", to_json(dict(counts)))

    def dropped(self) -> Mapping[str, int]:
        total: Counter[str] = Counter()
        for key in self.objects.list("production/drops"):
            total.update(self._get(key, dict[str, int]) or {})
        return total

    def scan(self, words: list[bytes]) -> tuple[int, list[str]]:
        """The number of objects, and the keys of those that contain, or are named by, one of the
        words. Tombstones and refusals are left out, because naming the user is their purpose."""
        keys = [
            key
            for key in self.objects.list("production")
            if "/tombstones/" not in key and not key.endswith("-refused")
        ]
        found = [
            key
            for key in keys
            if any(word in key.encode() or word in self._bytes(key) for word in words)
        ]
        return len(keys), found

    def users(self) -> list[str]:
        found = (_USER.match(key) for key in self.objects.list(USERS))
        return sorted({match[1] for match in found if match})

    def keys(self, user: str = "") -> Iterator[UserKey]:
        """The keys of all objects of a user, or of all users."""
        for key in self.objects.list(f"{USERS}/{user}" if user else USERS):
            if (match := _KEY.fullmatch(key)) is not None:
                yield UserKey(key=key, user=match[1], session=match[2] or "", event=match[3] or "")

    def turn(self, key: UserKey) -> RecordedTurn | None:
        """Read a turn; None if it is damaged. Raises `Missing`: a sweep may be in progress."""
        with contextlib.suppress(Damaged):
            return unpack(self.objects.get_sealed(key.key), RecordedTurn, self._where(key.key))
        return None

    def event(self, key: UserKey) -> FeedbackEvent | None:
        """Read an event; None if it is damaged. Raises `Missing`."""
        with contextlib.suppress(Damaged):
            return from_json(self.objects.get_sealed(key.key), FeedbackEvent, self._where(key.key))
        return None

    def _turns(self) -> Iterator[tuple[UserKey, RecordedTurn | None]]:
        for key in self.keys():
            with contextlib.suppress(Missing):
                if key.session:
                    yield key, self.turn(key)

    def _events(self) -> Iterator[tuple[UserKey, FeedbackEvent | None]]:
        for key in self.keys():
            with contextlib.suppress(Missing):
                if key.event:
                    yield key, self.event(key)

    def _get(self, key: str, kind: type[T]) -> T | None:
        try:
            return from_json(self.objects.get_sealed(key), kind, self._where(key))
        except Missing:
            return None

    def _bytes(self, key: str) -> bytes:
        try:
            return self.objects.get(key)
        except Missing:
            return b""

    def _where(self, key: str) -> str:
        return f"{self.objects.url}: {key}"


def digest(text: str) -> str:
    return blake3(text.encode()).hexdigest(length=16)


def _turn_key(turn: RecordedTurn) -> str:
    return f"{USERS}/{turn.user}/turns/{turn.session}/{turn.number:06d}"


def _said(event: FeedbackEvent) -> tuple[object, ...]:
    """The fields by which events are equal: a repetition is received at another time."""
    return event.completion, event.choice, event.kind, event.strength, event.text
