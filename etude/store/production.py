"""Where production mode keeps what users said and did, by user, so that a user can be deleted.

    production/users/{user}/turns/{session}/{number:06d}   a `RecordedTurn`
    production/users/{user}/feedback/{event}               a `FeedbackEvent`
    production/consent/{received}-{time}-{subject}-{word}  a `Consent`, all in its name
    production/tombstones/{user}                           that, and when, a user was deleted
    production/drops/{time}-{random}.json                  what was dropped, in numbers by reason

A session's name begins with the milliseconds of its start. Names are pseudonyms and digests: what
a user called something stands nowhere. Nothing is written before it was redacted, so a process may
die at any point; whatever was acknowledged is there, since an object appears whole or not at all.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from blake3 import blake3

from etude.core.consent import Consent, Tombstone, consents, is_gone
from etude.core.errors import EtudeError
from etude.core.feedback import FeedbackEvent, Joined, join
from etude.core.recorded import RecordedTurn, Sessions, by_answer, put_together
from etude.store.codec import from_json, pack, to_json, unpack
from etude.store.objects import Missing, Objects

USERS = "production/users"
CONSENT = "production/consent"
STALE_S = 3600.0
"""After so long nobody is still writing what is half-written."""
_CONSENT = re.compile(rf"{CONSENT}/\d{{13}}-(\d{{13}})-([0-9a-f]{{32}})-(granted|refused)")
_USER = re.compile(rf"{USERS}/([0-9a-f]{{32}})/")
T = TypeVar("T")


class Conflict(EtudeError):
    """An event with this id is there, and says something else."""


class ProductionStore:
    """Any number of writers. `now` is for tests."""

    def __init__(self, objects: Objects, now: Callable[[], float] = time.time) -> None:
        self.objects = objects
        self.now = now

    # Turns

    def put_turn(self, turn: RecordedTurn) -> None:
        """A turn that was redacted. If its user was deleted meanwhile, it is not there
        afterwards."""
        key = _turn_key(turn)
        self.objects.put_sealed(key, pack(turn))
        tombstone = self.tombstone(turn.user)
        if tombstone is not None and turn.started <= tombstone.time:
            self.objects.delete(key)

    def delete_session(self, user: str, session: str) -> None:
        for key in self.objects.list(f"{USERS}/{user}/turns/{session}"):
            self.objects.delete(key)

    def drop_sessions_with(self, user: str, values: Collection[str]) -> int:
        """Deletes the sessions of a user that say one of these values; how many."""
        spelled = {text.encode() for v in values for text in (v, json.dumps(v)[1:-1])}
        folder = f"{USERS}/{user}/turns"
        found = {
            key.split("/")[4]
            for key in (self.objects.list(folder) if spelled else ())
            if any(text in self._bytes(key) for text in spelled)
        }
        for session in found:
            self.delete_session(user, session)
        self.drop({"sessions late_secret": len(found)} if found else {})
        return len(found)

    def sessions(self, refused: Collection[str] = ()) -> Sessions:
        """All that may be read now: nothing of users who were deleted or who, or whose
        organisation, have withdrawn. `refused`: more of these."""
        tombstones, refused = self.tombstones(), self.refused() | set(refused)
        turns: list[RecordedTurn] = []
        withdrawn: set[tuple[str, str]] = set()
        for key in self.objects.list(USERS):
            if "/turns/" not in key:
                continue
            turn = unpack(self.objects.get_sealed(key), RecordedTurn, self._where(key))
            if (tomb := tombstones.get(turn.user)) is not None and turn.started <= tomb.time:
                continue
            if turn.user in refused or turn.organisation in refused:
                withdrawn.add((turn.user, turn.session))
                continue
            turns.append(turn)
        made = put_together(turns)
        if withdrawn:
            made.dropped["consent_withdrawn"] += len(withdrawn)
        return made

    # Feedback

    def put_feedback(self, event: FeedbackEvent) -> bool:
        """True if it is new, False if it was there already; `Conflict` if another one was."""
        key = f"{USERS}/{event.user}/feedback/{event.event}"
        data = to_json(event)
        if self.objects.create(key, data):
            return True
        there = from_json(self.objects.get(key), FeedbackEvent, self._where(key))
        if _said(there) != _said(event):
            raise Conflict("this event id was used for another event: give each one its own")
        return False

    def feedback(self) -> list[FeedbackEvent]:
        tombstones = self.tombstones()
        events = []
        for key in self.objects.list(USERS):
            if "/feedback/" in key:
                event = from_json(self.objects.get(key), FeedbackEvent, self._where(key))
                tomb = tombstones.get(event.user)
                if tomb is None or event.received > tomb.time:
                    events.append(event)
        return events

    def joined(self, sessions: Sessions, *, horizon_s: float) -> Joined:
        owners = by_answer(sessions.sessions)
        return join(owners, self.feedback(), now=self.now(), horizon_s=horizon_s)

    # Consent

    def put_consent(self, consent: Consent) -> None:
        """Each word is an object of its own, so that two at once lose nothing."""
        word = "granted" if consent.granted else "refused"
        received, said = (int(t * 1000) for t in (self.now(), consent.time))
        name = f"{received:013d}-{said:013d}-{consent.subject}-{word}"
        self.objects.put(f"{CONSENT}/{name}", b"")

    def consents(self, since: float = 0.0) -> dict[str, Consent]:
        """The word that counts, by subject, of all that were received since."""
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
        """All that is stored of a user is gone when it returns; how many objects that were. The
        tombstone is first: who writes meanwhile sees it. What stays beside it is a refusal, if
        there was one: otherwise nobody would know of it."""
        tombstone = Tombstone(user=user, time=self.now())
        self.objects.put(f"production/tombstones/{user}", to_json(tombstone))
        deleted = 0
        while keys := self.objects.list(f"{USERS}/{user}"):
            for key in keys:
                self.objects.delete(key)
            deleted += len(keys)
        for key in self.objects.list(CONSENT):
            if key.endswith(f"-{user}-granted"):
                self.objects.delete(key)
        self.objects.sweep(f"{USERS}/{user}")
        return deleted

    def tombstone(self, user: str) -> Tombstone | None:
        return self._get(f"production/tombstones/{user}", Tombstone)

    def tombstones(self) -> dict[str, Tombstone]:
        found = (self._get(key, Tombstone) for key in self.objects.list("production/tombstones"))
        return {tombstone.user: tombstone for tombstone in found if tombstone is not None}

    def sweep(self, *, retention_s: float, horizon_s: float) -> Mapping[str, int]:
        """Deletes what is past its time, what a tombstone speaks of, and feedback whose answer
        never came; how much of each."""
        counts: Counter[str] = Counter()
        answers: set[tuple[str, str]] = set()
        events: list[tuple[str, FeedbackEvent]] = []
        now, tombstones = self.now(), self.tombstones()

        def gone(time: float, user: str) -> str | None:
            tombstone = tombstones.get(user)
            return is_gone(time, now=now, retention_s=retention_s, tombstone=tombstone)

        def remove(key: str, reason: str) -> None:
            self.objects.delete(key)
            counts[reason] += 1

        for key in self.objects.list(USERS):
            if "/turns/" in key and (turn := self._turn(key)) is not None:
                if why := gone(turn.started, turn.user):
                    remove(key, f"turns {why}")
                else:
                    answers.add((turn.user, turn.completion))
            elif "/feedback/" in key and (event := self._get(key, FeedbackEvent)) is not None:
                events.append((key, event))
        for key, event in events:
            unknown = (event.user, event.completion) not in answers
            if why := gone(event.received, event.user):
                remove(key, f"feedback {why}")
            elif unknown and now - event.received > horizon_s:
                remove(key, "feedback unknown_completion")
        self.objects.sweep(USERS, min_age_s=STALE_S)
        self.drop(counts)
        return counts

    def drop(self, counts: Mapping[str, int]) -> None:
        """Keeps the numbers of what was dropped."""
        if counts:
            name = f"{int(self.now() * 1000):013d}-{secrets.token_hex(4)}"
            self.objects.put(f"production/drops/{name}.json", to_json(dict(counts)))

    def dropped(self) -> Mapping[str, int]:
        total: Counter[str] = Counter()
        for key in self.objects.list("production/drops"):
            total.update(self._get(key, dict[str, int]) or {})
        return total

    def scan(self, words: list[bytes]) -> tuple[int, list[str]]:
        """How many objects there are, and the keys of those that hold, or are named by, one of the
        words. Tombstones and refusals are left out: to name the user is what they are for."""
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

    def _turn(self, key: str) -> RecordedTurn | None:
        try:
            return unpack(self.objects.get_sealed(key), RecordedTurn, self._where(key))
        except Missing:  # another one sweeps too
            return None

    def _get(self, key: str, kind: type[T]) -> T | None:
        try:
            return from_json(self.objects.get(key), kind, self._where(key))
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
    """What makes two of them the same: a repetition is received at another time."""
    return event.completion, event.choice, event.kind, event.strength, event.text
