"""Arms: which users see a candidate.

heldout      users who never see an update, so that all updates together can be measured
candidate    a share of the others, by a hash of user and update; a larger share only adds users
live         everybody else: the control
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

Arm = Literal["heldout", "candidate", "live"]


def arm(user: str, *, update: str, share: float, heldout_share: float, key: bytes) -> Arm:
    """The arm of a user: the same at every gateway, and for held-out users at every update."""
    if _place(user, "heldout", key) < heldout_share:
        return "heldout"
    return "candidate" if _place(user, f"update\x1f{update}", key) < share else "live"


def _place(user: str, what: str, key: bytes) -> float:
    """A number from 0 to 1 that nobody can foresee without the key."""
    digest = hashlib.blake2b(
        f"{what}\x1f{user}".encode(), key=key[:64], digest_size=8, person=b"canary"
    ).digest()
    return int.from_bytes(digest) / 2**64


@dataclass(slots=True)
class Pins:
    """The version of each session: the one that it began with, unless that was withdrawn. The
    sessions that were quiet for longest are forgotten first."""

    max_sessions: int = 100_000
    _versions: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def version(self, session: str, current: int) -> int:
        """Of a session whose user's arm has the version `current` now."""
        found = self._versions.setdefault(session, current)
        self._versions.move_to_end(session)
        while len(self._versions) > self.max_sessions:
            self._versions.popitem(last=False)
        return found

    def withdraw(self, version: int) -> int:
        """Unpin the sessions of a version that was rolled back; how many there were."""
        gone = [session for session, pinned in self._versions.items() if pinned == version]
        for session in gone:
            del self._versions[session]
        return len(gone)
