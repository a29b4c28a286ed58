"""Users with recent activity, so that a process that follows users need not look at all of them.

    production/news/{ten minutes}/{time:013d}-{user}-{random}

An entry is empty, and written after the object that it announces. It only contains the user; the
objects are stored under the user's own key. A writer that dies in between leaves no entry, and old
ones are swept, so news is a hint: a reader lists all users when it begins, and periodically.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from etude.store.objects import Objects

NEWS = "production/news"
KEPT_S = 7200.0
"""Older entries are swept."""
LIST_ALL_S = 3600.0
"""The interval at which a reader lists all users, because some news may be missing."""
CLOCK_SKEW_S = 300.0
"""The largest difference between the clocks of two writers."""
_FOLDER_MS = 600_000
_ENTRY = re.compile(rf"{NEWS}/\d+/\d{{13}}-([0-9a-f]{{32}})-[0-9a-f]{{8}}")


class News:
    """Any number of writers. Each reader keeps its own instance."""

    def __init__(self, objects: Objects, now: Callable[[], float]) -> None:
        self._objects = objects
        self._now = now
        self._read_until = 0.0
        self._listed_all = 0.0
        """The time when all users were listed last."""
        self._seen: set[str] = set()

    def tell(self, user: str) -> None:
        time_ms = int(self._now() * 1000)
        name = f"{time_ms:013d}-{user}-{secrets.token_hex(4)}"
        self._objects.put(f"{NEWS}/{time_ms // _FOLDER_MS}/{name}", b"")

    def read(self) -> set[str] | None:
        """The users with activity since the last call; None if all users must be listed: at the
        first call, and whenever the last listing was long ago."""
        since, now = self._read_until, self._now()
        listed = self._keys(max(since, now - KEPT_S) - CLOCK_SKEW_S, now + CLOCK_SKEW_S)
        new, self._seen, self._read_until = listed - self._seen, listed, now
        if not 0 <= now - self._listed_all <= LIST_ALL_S:  # a clock may be put back, too
            self._listed_all = now
            return None
        return {match[1] for key in new if (match := _ENTRY.fullmatch(key))}

    def forget(self, user: str) -> None:
        for key in self._objects.list(NEWS):
            if f"-{user}-" in key:
                self._objects.delete(key)

    def sweep(self) -> None:
        oldest = int((self._now() - KEPT_S) * 1000) // _FOLDER_MS
        for folder in self._objects.folders(NEWS):
            if folder.isdecimal() and int(folder) < oldest:
                for key in self._objects.list(f"{NEWS}/{folder}"):
                    self._objects.delete(key)

    def _keys(self, since: float, until: float) -> set[str]:
        first, last = (int(time * 1000) // _FOLDER_MS for time in (since, until))
        after = f"{int(since * 1000):013d}"
        return {
            key
            for folder in range(first, last + 1)
            for key in self._objects.list(f"{NEWS}/{folder}", after=f"{NEWS}/{folder}/{after}")
        }
