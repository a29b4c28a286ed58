"""Consent to recording: the users whose sessions may be recorded, the sessions that are sampled for
it, and the time that recordings may be kept. Pure: the caller passes in the time.

A user is known by a pseudonym, and so is an organisation: a keyed hash. Nothing that is stored
reveals the person, and yet everything that a user left behind can be found. The key is stored
elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The user behind a request, as stated by the product's backend, in pseudonyms. Without a user
    there is no recording."""

    user: str = ""
    organisation: str = ""


def pseudonym(name: str, key: bytes) -> str:
    """A keyed hash, the same for the same name and key; without the key nobody can test guesses of
    names."""
    return hashlib.blake2b(name.encode(), key=key[:64], digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent:
    """A statement of consent or refusal, for a user or a whole organisation. The newest one
    counts."""

    subject: str
    granted: bool
    time: float

    def newer(self, other: Consent | None) -> Consent:
        """The one of two statements on the same subject that counts; of two at the same time, the
        refusal."""
        if other is None or (self.time, not self.granted) >= (other.time, not other.granted):
            return self
        return other


def consents(said: Iterable[Consent]) -> dict[str, Consent]:
    """The statement that counts, by subject; the order of the input does not matter."""
    found: dict[str, Consent] = {}
    for one in said:
        found[one.subject] = one.newer(found.get(one.subject))
    return found


def may_record(identity: Identity, words: Iterable[bool | None]) -> bool:
    """True if the session may be recorded. `words`: yes, no, or None, from everyone who has a say:
    the user, the organisation, the request. At least one yes is needed, and a single no forbids
    it."""
    if not identity.user:
        return False
    said = list(words)
    return True in said and False not in said


def is_sampled(identity: Identity, session: str, rate: float, key: bytes) -> bool:
    """True if a session is part of the recorded share. The answer is the same at each of its turns,
    and at every gateway."""
    digest = hashlib.blake2b(
        f"{identity.user}\x1f{session}".encode(), key=key[:64], digest_size=8, person=b"sampled"
    ).digest()
    return int.from_bytes(digest) < rate * 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """The deletion of a user: none of their data from before this time may be kept anywhere."""

    user: str
    time: float


def is_gone(
    time: float, *, now: float, retention_s: float, tombstone: Tombstone | None
) -> str | None:
    """The reason why data recorded at `time` must be deleted; None if it may be kept."""
    if tombstone is not None and time <= tombstone.time:
        return "deleted"
    if now - time > retention_s:
        return "expired"
    return None
