"""A store that misbehaves as stores do: late listings, bad moments, lost answers, damaged downloads, a power cut."""

from __future__ import annotations

from random import Random

from etude.core.errors import EtudeError
from etude.store.objects import Missing, Objects


class PowerCut(Exception):
    """The process that uses the store is gone."""


class Faulty(Objects):
    """Shares its objects with other `Faulty`s over the same store; each has faults of its own. Time is simulated."""

    def __init__(self, inner: Objects, random: Random, *, trouble: float = 0.0, late_s: float = 0.0) -> None:
        self._inner, self._random, self._trouble, self._late_s = inner, random, trouble, late_s
        self.url = "faulty:"
        self.writes_left: int | None = None
        self.now = 0.0
        self.late: list[tuple[float, list[str]]] = []
        """What listings showed, and when."""

    def put(self, key: str, data: bytes) -> None:
        self._write()
        self._inner.put(key, data)
        self._maybe_fail()

    def create(self, key: str, data: bytes) -> bool:
        self._write()
        made = self._inner.create(key, data)
        self._maybe_fail()  # after the fact: the answer is lost
        return made

    def get(self, key: str) -> bytes:
        self._maybe_fail()
        data = self._inner.get(key)
        if data and self._random.random() < self._trouble:
            return data[: len(data) // 2] if self._random.random() < 0.5 else data[:-1] + bytes([data[-1] ^ 4])
        return data

    def exists(self, key: str) -> bool:
        self._maybe_fail()
        return self._inner.exists(key)

    def list(self, prefix: str, *, after: str | None = None) -> list[str]:
        self._maybe_fail()
        self.late = [(t, keys) for t, keys in self.late if t >= self.now - self._late_s]
        self.late.append((self.now, self._inner.list("")))
        _, keys = self._random.choice(self.late)
        return [key for key in keys if key.startswith(prefix + "/") and (after is None or key > after)]

    def delete(self, key: str) -> None:
        self._write()
        self._inner.delete(key)

    def _write(self) -> None:
        if self.writes_left is not None:
            if self.writes_left == 0:
                raise PowerCut
            self.writes_left -= 1
        self._maybe_fail()

    def _maybe_fail(self) -> None:
        if self._random.random() < self._trouble:
            raise EtudeError("503: the store has a bad moment")


__all__ = ["Faulty", "Missing", "PowerCut"]
