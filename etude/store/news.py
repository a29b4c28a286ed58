"""Who did something lately, so that whoever follows users need not look at all of them.

    production/news/{ten minutes}/{time:013d}-{user}-{random}

An entry is empty, and written behind what it tells of. It says no more than who it was: what they
did lies under their own name. A writer that dies in between leaves no entry, and old ones are
swept, so news is a hint: a reader lists all users when it begins, and now and then.
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
"""After so long a reader lists all users: some news may never have been told."""
CLOCK_SKEW_S = 300.0
"""How far the clocks of two writers may be apart."""
_FOLDER_MS = 600_000
_ENTRY = re.compile(rf"{NEWS}/\d+/\d{{13}}-([0-9a-f]{{32}})-[0-9a-f]{{8}}")


class News:
    """Any number of writers. A reader keeps an object of its own."""

    def __init__(self, objects: Objects, now: Callable[[], float]) -> None:
        self._objects = objects
        self._now = now
        self._read_until = 0.0
        self._listed_all = 0.0
        """When all users were listed last."""
        self._seen: set[str] = set()

    def tell(self, user: str) -> None:
        time_ms = int(self._now() * 1000)
        name = f"{time_ms:013d}-{user}-{secrets.token_hex(4)}"
        self._objects.put(f"{NEWS}/{time_ms // _FOLDER_MS}/{name}", b"")

    def read(self) -> set[str] | None:
        """The users who did something since the last call; None if all are to be listed: at the
        first call, and whenever that was long ago."""
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
