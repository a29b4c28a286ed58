"""Append-only logs of records, as immutable numbered segments: `{name}/{number:010d}.jsonl`.

One writer, any number of readers. A segment is created, never changed, so a reader sees whole records only, and a
second writer (a controller that was thought dead) is found out at its first append instead of interleaving.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from etude.core.errors import EtudeError
from etude.store.codec import Stamped, from_line, to_line
from etude.store.objects import Objects

R = TypeVar("R")


class Log(Generic[R]):
    """`durable`: `append` returns when the records are stored. Otherwise they are kept until `flush`."""

    def __init__(
        self,
        objects: Objects,
        name: str,
        kinds: Iterable[type[R]],
        *,
        durable: bool,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._objects, self._durable, self._now = objects, durable, now
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._buffer: list[bytes] = []
        self._buffering, self._writing = threading.Lock(), threading.Lock()
        self._number: int | None = None  # of the segment to write next; None until the first write

    def append(self, *records: R) -> None:
        """Records of one call stand in one segment: readers see all of them or none."""
        assert all(self._kinds.get(type(record).__name__) is type(record) for record in records), records
        lines = [to_line(self._now(), record) for record in records]
        with self._buffering:
            self._buffer += lines
        if self._durable:
            self.flush()

    def flush(self) -> None:
        """Everything appended before this call is stored when it returns."""
        # Who waits here while another thread writes finds its records taken along, or goes next with all that
        # gathered meanwhile: a slow store makes segments larger, not the queue longer.
        with self._writing:
            with self._buffering:
                count, data = len(self._buffer), b"".join(self._buffer)
            if not count:
                return
            if self._number is None:
                self._number = self._end()
            if not self._objects.create(self._key(self._number), data):
                raise EtudeError(
                    f"{self._objects.url}: somebody else has written {self._key(self._number)}; "
                    f"stop the other process that works on this run, then start again"
                )
            self._number += 1
            with self._buffering:
                del self._buffer[:count]

    def read(self, start: int = 0) -> tuple[list[Stamped[R]], int]:
        """The records of the segments from number `start` on, and the `start` for what comes after them. Costs one
        look at one key if there is nothing new."""
        if not self._objects.exists(self._key(start)):
            return [], start
        keys = self._objects.list(self.name, after=self._key(start - 1) if start else None)
        # A listing that races with the writer may show a segment and miss the one before it: stop at a gap.
        whole = [key for number, key in enumerate(keys, start) if key == self._key(number)]
        with ThreadPoolExecutor(16) as pool:  # a bucket answers slowly, but many at once
            segments = list(pool.map(self._objects.get, whole))
        return [
            from_line(line, self._kinds, f"{self._objects.url}: {key}")
            for key, data in zip(whole, segments, strict=True)
            for line in data.splitlines()
        ], start + len(whole)

    def records(self) -> list[R]:
        """All records so far, in order, without their times."""
        return [stamped.record for stamped in self.read()[0]]

    def _end(self) -> int:
        keys = self._objects.list(self.name)
        return int(keys[-1].rpartition("/")[2].removesuffix(".jsonl")) + 1 if keys else 0

    def _key(self, number: int) -> str:
        return f"{self.name}/{number:010d}.jsonl"
