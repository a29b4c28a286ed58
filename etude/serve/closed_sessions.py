"""Record of the sessions that are over, in the store, so that their tokens stay invalid after the
gateway restarts.

    closed-sessions/{shard}-of-{shards}/{number:010d}      marks: a time and a session

A mark, of some fifty bytes, is kept for as long as a token of its session may live: two days. The
newest object is rewritten with each mark, in a directory and in a bucket alike, until it is full.
The marks of several sessions that end at once are stored together.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec

from etude.core.errors import EtudeError
from etude.serve.http import Unavailable
from etude.serve.tokens import MAX_SESSION_S
from etude.store.decoding import decode_msgpack
from etude.store.objects import Missing, Objects

FOLDER = "closed-sessions"
MAX_MARKS = 1024
"""Per object."""


class ClosedMark(msgspec.Struct, frozen=True, array_like=True):
    t: float
    """Seconds since the epoch."""
    session: str


class ClosedSessions:
    """The marks of one gateway process."""

    def __init__(
        self,
        objects: Objects,
        shard: str = "0-of-1",
        now: Callable[[], float] = time.time,
        max_marks: int = MAX_MARKS,
    ) -> None:
        self._objects = objects
        self._folder = f"{FOLDER}/{shard}"
        self._now = now
        self._max_marks = max_marks
        self._storing: asyncio.Task[None] | None = None
        self._num_added = self._num_stored = 0
        # The newest object, which is not full yet.
        self._number = 0
        self._marks: list[ClosedMark] = []
        # Objects that are full or belong to an earlier process, the oldest first, each with the
        # time of its last mark.
        self._full: dict[str, float] = {}

    def restore(self) -> list[ClosedMark]:
        """The marks of earlier processes, of all shards, that are still needed. Call it once,
        before anything else."""
        found: list[ClosedMark] = []
        for key in filter(_is_ours, self._objects.list(FOLDER)):
            with contextlib.suppress(Missing):  # another shard has just deleted it
                marks = decode_msgpack(self._objects.get_sealed(key), list[ClosedMark])
                found += marks
                if not self._is_of_another(key):
                    self._full[key] = marks[-1].t
            if key.startswith(f"{self._folder}/"):
                self._number = int(key.rpartition("/")[2]) + 1
        self._delete_unneeded()
        return sorted((mark for mark in found if mark.t >= self._oldest), key=lambda mark: mark.t)

    async def add(self, session: str) -> None:
        """Mark a session as closed; returns once the mark is stored."""
        self._marks.append(ClosedMark(self._now(), session))
        self._num_added += 1
        mine = self._num_added
        while self._num_stored < mine:
            if self._storing is None:
                self._storing = asyncio.create_task(self._store())
            await asyncio.shield(self._storing)

    async def _store(self) -> None:
        try:
            key = self._key
            marks = list(self._marks)
            added = self._num_added
            try:
                await asyncio.to_thread(
                    self._objects.put_sealed, key, msgspec.msgpack.encode(marks)
                )
            except EtudeError as e:
                raise Unavailable(f"the end of a session cannot be stored: {e}") from e
            self._num_stored = added
            if len(marks) >= self._max_marks:
                del self._marks[: len(marks)]
                self._full[key] = marks[-1].t
                self._number += 1
                await asyncio.to_thread(self._delete_unneeded)
        finally:
            self._storing = None

    def _delete_unneeded(self) -> None:
        for key in [key for key, t in self._full.items() if t < self._oldest]:
            self._objects.delete(key)
            del self._full[key]

    def _is_of_another(self, key: str) -> bool:
        """True if another shard of the current set, which may be running, writes and deletes the
        object."""
        shards = self._folder.rpartition("-of-")[2]
        folder = key.rpartition("/")[0]
        return folder.endswith(f"-of-{shards}") and folder != self._folder

    @property
    def _key(self) -> str:
        return f"{self._folder}/{self._number:010d}"

    @property
    def _oldest(self) -> float:
        return self._now() - MAX_SESSION_S


def _is_ours(key: str) -> bool:
    return key.rpartition("/")[2].isdecimal()
