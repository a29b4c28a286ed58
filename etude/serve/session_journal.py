"""The journal of a gateway, in the store: everything its sessions were told, so that they continue
when the gateway restarts.

    sessions/{shard}-of-{shards}/{number:010d}.log      frames: a head, an entry

Nothing is acknowledged to a client before it is stored, and entries of several sessions are stored
together. In a directory, a frame is appended to the newest file, which costs one write and survives
the death of the process. A bucket cannot append, so all entries that arrived while the previous
object was being stored become the next object. A new file begins when the previous one is full, or
when a writer starts. A file is deleted when neither it nor an earlier one has an entry of a session
that is still needed.

The end of a file may be cut off: its writer was killed, and nobody was told of that entry. Damage
anywhere else is a hole, and the session of the lost entry cannot be known. So every session that
was open at that point is marked as incomplete, and none of them is trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import msgspec

from etude.core.errors import EtudeError
from etude.serve.http import Unavailable
from etude.serve.segments import RecordedTurn
from etude.store.decoding import decode_msgpack
from etude.store.frames import DamagedFrame, read_frames, to_frame
from etude.store.objects import Objects

FOLDER = "sessions"
MAX_FILE_BYTES = 32 << 20
MAX_IDLE_S = 24 * 3600.0
"""A session of an earlier process that was idle for so long is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponse:
    """A response that the server keeps for its client; `session` is the session's id, or "" or the
    owner of an `Identity` for a response outside of sessions."""

    session: str
    id: str
    previous: str | None
    """The response that it continues."""
    response: dict[str, Any]
    items: tuple[dict[str, Any], ...]
    messages: tuple[dict[str, Any], ...]
    """The messages that follow the conversation of `previous`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgottenResponse:
    session: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgottenSession:
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenSession:
    """A session with a hole, and the reason. It stays until it is forgotten."""

    session: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledSession:
    """The result of a session that others run (`serve.session_desk`)."""

    session: str
    result: bytes
    """JSON, as it was sent: msgpack cannot hold every number that JSON can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawnSession:
    """Mark that the result of a session is not needed any more."""

    session: str


Entry = (
    RecordedTurn
    | KeptResponse
    | ForgottenResponse
    | ForgottenSession
    | BrokenSession
    | SettledSession
    | WithdrawnSession
)
KINDS: dict[str, type[Entry]] = {kind.__name__: kind for kind in get_args(Entry)}


class Envelope(msgspec.Struct, array_like=True):
    kind: str
    t: float
    """Seconds since the epoch."""
    owner: str
    """Owner of the entry, which is needed until its owner is over."""
    entry: msgspec.Raw


class Journal(Protocol):
    """Storage of everything that must outlive the gateway process."""

    def check(self, said: object) -> None:
        """Raise ValueError for data that cannot be stored."""

    def append(self, entry: Entry) -> None: ...

    async def commit(self) -> None: ...


class NoJournal:
    """A journal for a process whose sessions end with it."""

    def check(self, said: object) -> None: ...

    def append(self, entry: Entry) -> None: ...

    async def commit(self) -> None: ...


class SessionJournal:
    """The journal in a store. Only one process may write it at a time."""

    def __init__(
        self,
        objects: Objects,
        shard: str = "0-of-1",
        now: Callable[[], float] = time.time,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._objects = objects
        self._folder = f"{FOLDER}/{shard}"
        self._now = now
        self._max_file_bytes = max_file_bytes
        self._buffer: list[bytes] = []
        self._file: _AppendedFile | None = None  # in a directory
        self._object: tuple[int, bytes] | None = None  # in a bucket: the object being stored
        self._storing: asyncio.Task[None] | None = None
        self._num_appended = self._num_taken = self._num_stored = 0
        # Number of the file or object for the next entry.
        self._number = 0
        # The owners of each file's entries, the oldest file first.
        self._owners: OrderedDict[int, set[str]] = OrderedDict()

    def restore(self, apply: Callable[[Entry], None]) -> None:
        """Pass every entry of earlier processes that is still needed to `apply`. These entries are
        written to a new file and the old files deleted, so the journal starts as small as possible.
        Call it once, before anything else."""
        self._check_shards()
        keys = self._objects.list(self._folder)
        live = _Live(self._now() - MAX_IDLE_S)
        with contextlib.ExitStack() as stack:
            if keys and (path := self._objects.path(keys[-1])) is not None:
                stack.callback(_AppendedFile(str(path)).close)  # nobody else writes it
            for key in keys:
                for envelope in self._read(key, live):
                    live.add(envelope)
            envelopes = live.envelopes()
            for envelope in envelopes:
                apply(decode_msgpack(envelope.entry, KINDS[envelope.kind]))
            self._number = max(map(_number, keys), default=-1) + 1
            self._begin_file(b"".join(map(_frame, envelopes)), {each.owner for each in envelopes})
            for key in keys:
                self._objects.delete(key)

    def check(self, said: object) -> None:
        _packed(said)

    def append(self, entry: Entry) -> None:
        """Take an entry into the buffer. Raises ValueError for one that cannot be stored."""
        owner, packed = _owner(entry), _packed(entry)
        envelope = Envelope(type(entry).__name__, self._now(), owner, msgspec.Raw(packed))
        self._buffer.append(_frame(envelope))
        self._num_appended += 1
        if _is_end(envelope):
            for owners in self._owners.values():
                owners.discard(owner)
        else:
            self._owners[self._number].add(owner)

    async def commit(self) -> None:
        """Returns when everything that was appended is stored."""
        if self._file is not None:
            self._append_to(self._file)
            return
        mark = self._num_appended
        while self._num_stored < mark:
            # Entries that come while an object is being stored go into the next one.
            if self._storing is None:
                self._storing = asyncio.create_task(self._store())
            await asyncio.shield(self._storing)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _append_to(self, file: _AppendedFile) -> None:
        if not self._buffer:
            return
        file.append(b"".join(self._buffer), self._key(self._number))
        self._buffer.clear()
        if file.size > self._max_file_bytes:
            file.close()
            self._number += 1
            self._begin_file()
        self._delete_unneeded()

    async def _store(self) -> None:
        try:
            if self._object is None:
                self._object = self._number, b"".join(self._buffer)
                self._num_taken = self._num_appended
                self._buffer.clear()
                self._number += 1
                self._owners[self._number] = set()
            number, data = self._object
            try:
                await asyncio.to_thread(self._create, number, data)
            except EtudeError as e:
                raise Unavailable(f"the session's turns could not be stored: {e}") from e
            self._object = None
            self._num_stored = self._num_taken
            await asyncio.to_thread(self._delete_unneeded)
        finally:
            self._storing = None

    def _begin_file(self, data: bytes = b"", owners: Collection[str] = ()) -> None:
        self._create(self._number, data)
        self._owners[self._number] = set(owners)
        path = self._objects.path(self._key(self._number))
        if path is not None:
            self._file = _AppendedFile(str(path))
        else:
            self._number += 1
            self._owners[self._number] = set()

    def _create(self, number: int, data: bytes) -> None:
        """Create an object. It may exist already, if only the answer to a first attempt was
        lost."""
        key = self._key(number)
        if not self._objects.create(key, data) and self._objects.get(key) != data:
            raise EtudeError(
                f"{self._objects.url}: another gateway has written {key}; stop the other gateway"
            )

    def _delete_unneeded(self) -> None:
        # Only from the oldest on: a later file may hold the end of a session of an earlier one.
        for number in list(self._owners):
            if number == self._number or self._owners[number]:
                return
            del self._owners[number]
            self._objects.delete(self._key(number))

    def _read(self, key: str, live: _Live) -> Iterator[Envelope]:
        """The entries of a file. Damage breaks every session that is open at that point."""
        for record in read_frames(self._objects.get(key)):
            if isinstance(record, DamagedFrame):
                where = f"{self._objects.url}: {key} is damaged at byte {record.place}"
                live.break_all(f"{where}, so turns may be missing")
            else:
                yield decode_msgpack(record, Envelope)

    def _check_shards(self) -> None:
        folders = {key.split("/")[1] for key in self._objects.list(FOLDER)}
        shards = self._folder.rpartition("-")[2]
        if others := sorted(name for name in folders if name.rpartition("-")[2] != shards):
            raise EtudeError(
                f"{self._objects.url}: {FOLDER}/{others[0]} has sessions of a gateway with a "
                f"different number of shards: start the same number of gateway processes again, "
                f"or delete the folder if its sessions are not needed any more"
            )

    def _key(self, number: int) -> str:
        return f"{self._folder}/{number:010d}.log"


class _AppendedFile:
    """A file that only this process appends to. A failed write leaves it unchanged."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(self._fd)
            raise EtudeError(
                f"another gateway is writing to {path}: stop it, or give each gateway its own shard"
            ) from e

    def append(self, data: bytes, key: str) -> None:
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                raise OSError(f"only {written} of {len(data)} bytes written")
        except OSError as e:
            os.ftruncate(self._fd, self.size)
            raise Unavailable(f"the session's turns could not be stored in {key}: {e}") from e
        self.size += len(data)

    def close(self) -> None:
        os.close(self._fd)


class _Live:
    """The entries that are still needed, by owner."""

    def __init__(self, oldest: float) -> None:
        """`oldest`: owners whose last entry is older than this are over."""
        self._oldest = oldest
        self._by_owner: dict[str, list[Envelope]] = {}

    def add(self, envelope: Envelope) -> None:
        if _is_end(envelope):
            self._by_owner.pop(envelope.owner, None)
        else:
            self._by_owner.setdefault(envelope.owner, []).append(envelope)

    def break_all(self, reason: str) -> None:
        for owner, envelopes in self._by_owner.items():
            if not owner.startswith("/"):  # an entry outside of sessions is either whole or missing
                packed = msgspec.msgpack.encode(BrokenSession(session=owner, reason=reason))
                kind = BrokenSession.__name__
                envelopes.append(Envelope(kind, envelopes[-1].t, owner, msgspec.Raw(packed)))

    def envelopes(self) -> list[Envelope]:
        """The entries by owner, in the order of each owner's first entry."""
        return [
            envelope
            for envelopes in self._by_owner.values()
            if envelopes[-1].t >= self._oldest
            for envelope in envelopes
        ]


def _packed(said: object) -> bytes:
    try:
        return msgspec.msgpack.encode(said)
    except OverflowError as e:
        raise ValueError(f"a number is too large to record ({e})") from e


def _owner(entry: Entry) -> str:
    """The owner of an entry: its session. A response outside of sessions, even one kept for a user
    (`/user/..`), is its own owner. So is a result, which may be on another shard than its
    session."""
    if isinstance(entry, SettledSession | WithdrawnSession):
        return f"/settled/{entry.session}"
    outside = entry.session.startswith("/") or not entry.session
    if isinstance(entry, KeptResponse | ForgottenResponse) and outside:
        return f"{entry.session}/{entry.id}"
    return entry.session


def _is_end(envelope: Envelope) -> bool:
    """True if the entry ends the need for its owner's entries."""
    if envelope.kind == ForgottenResponse.__name__:
        return envelope.owner.startswith("/")
    return envelope.kind in (ForgottenSession.__name__, WithdrawnSession.__name__)


def _frame(envelope: Envelope) -> bytes:
    return to_frame(msgspec.msgpack.encode(envelope))


def _number(key: str) -> int:
    return int(key.rpartition("/")[2].removesuffix(".log"))
