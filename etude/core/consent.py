"""Whose sessions may be recorded, which of them are, and how long what was recorded may stay. Pure:
whoever asks brings the time.

A user is known by a pseudonym, and so is an organisation: a keyed hash, so that nothing that is
stored says who it was, and yet all that somebody left behind can be found. The key lies elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who asks, as the product's backend says, by pseudonyms. No user, no recording."""

    user: str = ""
    organisation: str = ""


def pseudonym(name: str, key: bytes) -> str:
    """The same for the same name and key; without the key nobody can try names out."""
    return hashlib.blake2b(name.encode(), key=key[:64], digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent:
    """What somebody said, for a user or a whole organisation. The newest word counts."""

    subject: str
    granted: bool
    time: float

    def newer(self, other: Consent | None) -> Consent:
        """Of two words on the same subject the one that counts: of two at the same time, the
        refusal."""
        if other is None or (self.time, not self.granted) >= (other.time, not other.granted):
            return self
        return other


def consents(said: Iterable[Consent]) -> dict[str, Consent]:
    """The word that counts, by subject; in whatever order they came."""
    found: dict[str, Consent] = {}
    for one in said:
        found[one.subject] = one.newer(found.get(one.subject))
    return found


def may_record(identity: Identity, words: Iterable[bool | None]) -> bool:
    """`words`: yes, no, or nothing, from everybody who may speak: the user, the organisation, the
    request. One yes is needed, and any no is the end of it."""
    if not identity.user:
        return False
    said = list(words)
    return True in said and False not in said


def is_sampled(identity: Identity, session: str, rate: float, key: bytes) -> bool:
    """Whether a session is one of the share that is recorded. The same at each of its turns, and at
    every gateway."""
    digest = hashlib.blake2b(
        f"{identity.user}\x1f{session}".encode(), key=key[:64], digest_size=8, person=b"sampled"
    ).digest()
    return int.from_bytes(digest) < rate * 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """A user was deleted: nothing of theirs from before this time may be anywhere."""

    user: str
    time: float


def is_gone(
    time: float, *, now: float, retention_s: float, tombstone: Tombstone | None
) -> str | None:
    """Why what was recorded at `time` must not be there any more; None if it may."""
    if tombstone is not None and time <= tombstone.time:
        return "deleted"
    if now - time > retention_s:
        return "expired"
    return None
