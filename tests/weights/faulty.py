"""Stores that fail as real stores do: stale listings, transient errors, lost replies, damaged
downloads, a power failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from etude.core.errors import EtudeError
from etude.store.objects import Missing, Objects
from etude.weights.manifest import TRIES


class PowerCut(Exception):
    """The process that uses the store has died."""


class Faulty(Objects):
    """A store that shares its objects with other `Faulty`s over the same store; each has its own
    faults. Time is simulated.

    Trouble with one key ends before a client that tries `TRIES` times gives up, so it excuses no
    failure.
    """

    def __init__(
        self, inner: Objects, random: Random, *, trouble: float = 0.0, late_s: float = 0.0
    ) -> None:
        self._inner = inner
        self._random = random
        self._trouble = trouble
        self._late_s = late_s
        self.url = "faulty:"
        self.writes_left: int | None = None
        self.now = 0.0
        self.late: list[tuple[float, list[str]]] = []
        """The results of listings, and their times."""
        self._in_a_row: Counter[str] = Counter()

    def put(self, key: str, data: bytes) -> None:
        self._write(key, lambda: self._inner.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        made: list[bool] = []
        self._write(key, lambda: made.append(self._inner.create(key, data)))
        return made[0]

    def delete(self, key: str) -> None:
        self._write(key, lambda: self._inner.delete(key))

    def get(self, key: str) -> bytes:
        data = self._inner.get(key)
        if not self._is_troubled(key):
            return data
        kind = self._random.randrange(3)
        if kind == 0 or not data:
            raise _bad_moment()
        return data[: len(data) // 2] if kind == 1 else data[:-1] + bytes([data[-1] ^ 4])

    def exists(self, key: str) -> bool:
        if self._is_troubled(key):
            raise _bad_moment()
        return self._inner.exists(key)

    def list(self, prefix: str, *, after: str | None = None) -> list[str]:
        if self._is_troubled(prefix):
            raise _bad_moment()
        self.late = [(t, keys) for t, keys in self.late if t >= self.now - self._late_s]
        self.late.append((self.now, self._inner.list("")))
        _, keys = self._random.choice(self.late)
        return [
            key for key in keys if key.startswith(prefix + "/") and (after is None or key > after)
        ]

    def _write(self, key: str, write: Callable[[], None]) -> None:
        if self.writes_left is not None:
            if self.writes_left == 0:
                raise PowerCut
            self.writes_left -= 1
        troubled = self._is_troubled(key)
        if not troubled or self._random.random() < 0.5:
            write()
        if troubled:  # after the write, too: then only the reply is lost
            raise _bad_moment()

    def _is_troubled(self, key: str) -> bool:
        if self._random.random() < self._trouble and self._in_a_row[key] < TRIES - 1:
            self._in_a_row[key] += 1
            return True
        self._in_a_row[key] = 0
        return False


class Lagging(Objects):
    """A store whose listings show any part of the objects, however old; `pause` is called before
    each access."""

    def __init__(
        self, inner: Objects, random: Random, share: float, pause: Callable[[], None] = lambda: None
    ) -> None:
        self._inner = inner
        self._random = random
        self._share = share
        self.pause = pause
        self.url = "lagging:"

    def put(self, key: str, data: bytes) -> None:
        self.pause()
        self._inner.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self.pause()
        return self._inner.create(key, data)

    def get(self, key: str) -> bytes:
        self.pause()
        return self._inner.get(key)

    def exists(self, key: str) -> bool:
        self.pause()
        return self._inner.exists(key)

    def list(self, prefix: str, *, after: str | None = None) -> list[str]:
        self.pause()
        return [
            key
            for key in self._inner.list(prefix, after=after)
            if self._random.random() < self._share
        ]


def _bad_moment() -> EtudeError:
    return EtudeError("503: the store has a bad moment")


__all__ = ["Faulty", "Lagging", "Missing", "PowerCut"]
