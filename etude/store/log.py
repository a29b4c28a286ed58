"""Append-only logs of records, as immutable numbered segments: `{name}/{number:010d}.jsonl`.

One writer, any number of readers. A segment is created, never changed, so a reader sees only
complete records, and a second writer (a controller that was thought dead) is detected at its first
append instead of interleaving. The last line of a segment is the digest of the others.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from etude.core.errors import EtudeError
from etude.store.codec import Damaged, Stamped, from_line, seal, to_line, unseal
from etude.store.objects import Objects

R = TypeVar("R")


class Log(Generic[R]):
    """One log. `durable`: `append` returns when the records are stored; otherwise they are buffered
    until `flush`. `skipped` is called for a damaged segment, and the others are read; without it,
    damage is an error."""

    def __init__(
        self,
        objects: Objects,
        name: str,
        kinds: Iterable[type[R]],
        *,
        durable: bool,
        skipped: Callable[[Damaged], None] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._objects = objects
        self._durable = durable
        self._skipped = skipped
        self._now = now
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._buffer: list[bytes] = []
        # the segment to write next; kept until it is known to be stored
        self._segment: bytes | None = None
        self._buffering = threading.Lock()
        self._writing = threading.Lock()
        self._number: int | None = None  # of the segment to write next; None until the first write

    def append(self, *records: R) -> None:
        """Append records. Records of one call are in one segment: readers see all of them or
        none."""
        assert all(self._kinds.get(type(record).__name__) is type(record) for record in records), (
            records
        )
        lines = [to_line(self._now(), record) for record in records]
        with self._buffering:
            self._buffer += lines
        if self._durable:
            self.flush()

    def flush(self) -> None:
        """Store everything appended before this call."""
        # When a thread that waits here gets the lock, its records are already stored, or it stores
        # all records gathered meanwhile: a slow store makes segments larger, not the queue longer.
        with self._writing:
            while self._take():
                if self._number is None:
                    self.check_whole()
                    self._number = self.end()
                self._write(self._key(self._number))
                self._number, self._segment = self._number + 1, None

    def _take(self) -> bytes | None:
        """The segment to write. One that was tried before comes first, unchanged: it may be stored,
        and only the reply was lost."""
        with self._buffering:
            if self._segment is None and self._buffer:
                self._segment = seal(b"".join(self._buffer))
                self._buffer.clear()
        return self._segment

    def _write(self, key: str) -> None:
        assert self._segment is not None
        if not self._objects.create(key, self._segment) and self._objects.get(key) != self._segment:
            raise EtudeError(
                f"{self._objects.url}: another process has written {key}; stop the other "
                f"process of this run, then start again"
            )

    def read(self, start: int = 0) -> tuple[list[Stamped[R]], int]:
        """The records of the segments from number `start` on, and the `start` for the following
        ones. Costs a single existence check if there is nothing new."""
        end = self.end(start)
        with ThreadPoolExecutor(16) as pool:  # a bucket is slow, but handles many at once
            segments = list(pool.map(self._read, range(start, end)))
        return [record for segment in segments for record in segment], end

    def records(self) -> list[R]:
        """All records so far, in order, without their times; an error if some of them are lost."""
        self.check_whole()
        return [stamped.record for stamped in self.read()[0]]

    def resume(self) -> list[R]:
        """All records so far. This writer continues right after them; its next append detects
        another writer that has done so."""
        self.check_whole()
        records, self._number = self.read()
        return [stamped.record for stamped in records]

    def check_whole(self) -> None:
        """Raise the error of `lost`, if there is one."""
        if (lost := self.lost()) is not None:
            raise lost

    def lost(self) -> Damaged | None:
        """The error for a missing segment, after which nothing is read; None if none is missing."""
        key = find_gap(self._objects, self.name, self._key)
        if key is None:
            return None
        otherwise = "" if self._durable else f", or delete the folder {self.name}/"
        return Damaged(
            f"{self._objects.url}: {key} is missing, but later segments exist: restore it from "
            f"a backup{otherwise}"
        )

    def end(self, start: int = 0) -> int:
        """The number of the first missing segment from `start` on."""
        return first_free(self._objects, self.name, self._key, start)

    def _read(self, number: int) -> list[Stamped[R]]:
        key = self._key(number)
        where = f"{self._objects.url}: {key}"
        try:
            lines = unseal(self._objects.get(key), where).splitlines()
            return [from_line(line, self._kinds, where) for line in lines]
        except Damaged as damage:
            if self._skipped is None:
                raise
            self._skipped(damage)
            return []

    def _key(self, number: int) -> str:
        return f"{self.name}/{number:010d}.jsonl"


def first_free(objects: Objects, folder: str, key: Callable[[int], str], start: int = 0) -> int:
    """The first number from `start` on whose key is free. Only the keys before it are in use."""
    # A listing may be stale, have gaps and show objects of others: it only saves requests.
    if not objects.exists(key(start)):
        return start
    listed = set(objects.list(folder, after=key(start)))
    start += 1
    while key(start) in listed or objects.exists(key(start)):
        start += 1
    return start


def find_gap(objects: Objects, folder: str, key: Callable[[int], str]) -> str | None:
    """The first key that is free although a later one is in use: its object is lost."""
    # List first: objects written meanwhile, in order, make no gap.
    listed = objects.list(folder)
    free = key(first_free(objects, folder, key))
    return free if any(each > free and _is_numbered(each, key) for each in listed) else None


def _is_numbered(name: str, key: Callable[[int], str]) -> bool:
    digits = re.match(r"\d+", name.rpartition("/")[2])
    return digits is not None and key(int(digits[0])) == name
