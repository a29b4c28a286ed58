"""Objects under keys, in a directory or in a bucket.

An object appears atomically, and `create` decides between two writers of the same key. No other
code accesses storage, so crash safety relies only on these two guarantees.

In a directory, a written object survives the death of every process, but a power failure may lose
the last seconds; a bucket keeps every object that it has acknowledged.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import LocalStore, MemoryStore, ObjectStore, from_url

from etude.core.errors import EtudeError
from etude.store.codec import seal, unseal

BUCKETS = {"s3://": "AWS", "gs://": "GOOGLE", "az://": "AZURE"}
"""Prefixes of bucket URLs, with the prefix of the variables that configure each."""
CLIENT = {"connect_timeout": "5s", "read_timeout": "30s", "timeout": "180s"}
"""A store that sends nothing for `read_timeout` is retried once and then given up; a slow one has
longer. Each of these, and any other field of obstore's `ClientConfig`, can be set by a variable:
AWS_READ_TIMEOUT=10s."""
RETRY_S = 60.0
"""The time for which a failed request is retried."""
LIST_PAGE = 1000
"""Keys in the reply to one listing request."""
PART_BYTES = 5 << 20
"""A larger object is written in several requests."""
_MISSING = (FileNotFoundError, NotFoundError)
T = TypeVar("T")


class Missing(EtudeError, LookupError):
    """There is no object under this key."""


class Unreachable(EtudeError):
    """The store does not answer, even after retries."""


@dataclass(slots=True)
class StoreUsage:
    """Requests and bytes since the store was opened. A bucket's owner pays for each."""

    reads: int = 0
    """GET and HEAD."""
    writes: int = 0
    lists: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class Objects:
    """One store; error messages name it by `url`."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store = store
        self.url = url
        self.usage = StoreUsage()
        self._counting = threading.Lock()

    @property
    def is_bucket(self) -> bool:
        return is_bucket(self.url)

    @property
    def poll_s(self) -> float:
        """Time between two checks for something new: a bucket charges for each of them."""
        return 0.5 if self.is_bucket else 0.05

    def _count(self, **more: int) -> None:
        with self._counting:
            for name, count in more.items():
                setattr(self.usage, name, getattr(self.usage, name) + count)

    def _count_write(self, data: bytes) -> None:
        parts = 2 + -(-len(data) // PART_BYTES) if len(data) > PART_BYTES else 1
        self._count(writes=parts, written_bytes=len(data))

    @classmethod
    def open(cls, url: str, *, create: bool = True) -> Objects:
        """Open `file:PATH` or a plain path, `s3://`, `gs://`, `az://`, or `memory:`, which is new
        and empty at each call.

        A missing directory is created, or refused if `create` is False: a reader should not leave
        an empty directory at a mistyped path.
        """
        if url == "memory:":
            return cls(MemoryStore(), url)
        if is_bucket(url):
            with _explained(f"open {url}"):
                retry: Any = {"retry_timeout": timedelta(seconds=RETRY_S)}
                return cls(
                    from_url(url, client_options=_client(BUCKETS[url[:5]]), retry_config=retry), url
                )
        path = (
            url.removeprefix("file://") if url.startswith("file://") else url.removeprefix("file:")
        )
        if "://" in path or not path:
            raise EtudeError(
                f"{url!r} is not a store: give a path, file:PATH, or a bucket "
                f"({', '.join(BUCKETS)})"
            )
        if not create and not Path(path).is_dir():
            what = "is not a directory" if Path(path).exists() else "does not exist"
            raise EtudeError(f"{path} {what}: check the path, or start a run that writes to it")
        with _explained(f"open {url}"):
            return cls(LocalStore(Path(path).absolute(), mkdir=True), url)

    def put(self, key: str, data: bytes) -> None:
        """Write or replace the object."""
        self._count_write(data)
        with _explained(f"write {key} in {self.url}"):
            obstore.put(self._store, key, data)

    def create(self, key: str, data: bytes) -> bool:
        """Write the object if the key is free; False if it is taken. Of two callers, exactly one
        gets True."""
        self._count(writes=1, written_bytes=len(data))
        with _explained(f"write {key} in {self.url}"):
            try:
                obstore.put(self._store, key, data, mode="create")
            except AlreadyExistsError:
                return False
        return True

    def get(self, key: str) -> bytes:
        """Raises `Missing` if there is no object."""
        with _explained(f"read {key} in {self.url}"):
            self._count(reads=1)
            data = bytes(obstore.get(self._store, key).bytes())
            self._count(read_bytes=len(data))
            return data

    def put_sealed(self, key: str, data: bytes) -> None:
        """Write with a digest, which `get_sealed` checks: for objects that are not named by their
        hash."""
        self.put(key, seal(data))

    def get_sealed(self, key: str) -> bytes:
        """Raises `Missing` if there is no object, `Damaged` if it is not what was written."""
        return unseal(self.get(key), f"{self.url}: {key}")

    def exists(self, key: str) -> bool:
        self._count(reads=1)
        with _explained(f"read {key} in {self.url}"):
            try:
                obstore.head(self._store, key)
            except _MISSING:
                return False
        return True

    def folders(self, prefix: str) -> list[str]:
        """The names of the folders directly under the folder `prefix`, sorted. Their contents are
        not listed."""
        with _explained(f"list {prefix} in {self.url}"):
            found = obstore.list_with_delimiter(self._store, prefix)["common_prefixes"]
        self._count(lists=1 + len(found) // LIST_PAGE)
        return sorted(folder.rpartition("/")[2] for folder in found)

    def list(self, prefix: str, *, after: str | None = None) -> list[str]:
        """Keys under the folder `prefix`, sorted, from the first one greater than `after`."""
        with _explained(f"list {prefix} in {self.url}"):
            found = sorted(
                meta["path"]
                for page in obstore.list(self._store, prefix, offset=after)
                for meta in page
            )
        self._count(lists=1 + len(found) // LIST_PAGE)
        return found

    def stamps(self, prefix: str) -> dict[str, str]:
        """A stamp for each key under the folder `prefix`, which changes when the object is
        replaced."""
        with _explained(f"list {prefix} in {self.url}"):
            found = {
                meta["path"]: f"{meta['e_tag']} {meta['last_modified']} {meta['size']}"
                for page in obstore.list(self._store, prefix)
                for meta in page
            }
        self._count(lists=1 + len(found) // LIST_PAGE)
        return found

    def times(self) -> dict[str, float]:
        """The time when each object was last written, by the store's clock, in seconds since the
        epoch."""
        with _explained(f"list {self.url}"):
            found = {
                meta["path"]: meta["last_modified"].timestamp()
                for page in obstore.list(self._store)
                for meta in page
            }
        self._count(lists=1 + len(found) // LIST_PAGE)
        return found

    def size(self, prefix: str) -> int:
        """Bytes of all objects under the folder `prefix`."""
        with _explained(f"list {prefix} in {self.url}"):
            sizes = [meta["size"] for page in obstore.list(self._store, prefix) for meta in page]
        self._count(lists=1 + len(sizes) // LIST_PAGE)
        return sum(sizes)

    def sweep(self, prefix: str, *, min_age_s: float = 0.0) -> None:
        """Remove half-written files that killed writers have left under the folder `prefix`, and
        empty folders; no writer may be active there, except for less than `min_age_s`. In a
        directory such a file is next to the object's own, and `list` does not show it; a bucket has
        none."""
        if not isinstance(self._store, LocalStore) or self._store.prefix is None:
            return
        with _explained(f"clean {prefix} in {self.url}"):
            folder, before = Path(self._store.prefix) / prefix, time.time() - min_age_s
            quiet = [path for path in [folder, *folder.rglob("*")] if _is_quiet(path, before)]
            for path in folder.rglob("*#*"):
                with contextlib.suppress(FileNotFoundError):
                    if re.search(r"#\d+$", path.name) and path.stat().st_mtime <= before:
                        path.unlink()
            for path in sorted(quiet, reverse=True):
                with contextlib.suppress(OSError):  # it is not empty, or gone
                    path.rmdir()

    def path(self, key: str) -> Path | None:
        """The file of an object, for callers that append to it; None in a bucket."""
        if not isinstance(self._store, LocalStore) or self._store.prefix is None:
            return None
        return Path(self._store.prefix) / key

    def delete(self, key: str) -> None:
        """Delete the object, if there is one."""
        with _explained(f"delete {key} in {self.url}"), contextlib.suppress(*_MISSING):
            obstore.delete(self._store, key)


class ReadOnce(Generic[T]):
    """The objects of a folder, each read once, and again when it was replaced: looking up known
    objects costs only a listing. `read` may raise `Missing`."""

    def __init__(self, objects: Objects, folder: str, read: Callable[[str], T]) -> None:
        self._objects = objects
        self._folder = folder
        self._read = read
        self._known: dict[str, tuple[str, T]] = {}

    def items(self) -> dict[str, T]:
        """The values by key, sorted."""
        known, self._known = self._known, {}
        for key, stamp in sorted(self._objects.stamps(self._folder).items()):
            if key in known and known[key][0] == stamp:
                self._known[key] = known[key]
            else:
                with contextlib.suppress(Missing):  # deleted since
                    self._known[key] = stamp, self._read(key)
        return {key: value for key, (_, value) in self._known.items()}


def is_bucket(url: str) -> bool:
    """True if the store is remote; otherwise it is a directory."""
    return url.startswith(tuple(BUCKETS))


def _is_quiet(path: Path, before: float) -> bool:
    """True for a folder whose entries have not changed since."""
    try:
        return path.is_dir() and path.stat().st_mtime <= before
    except FileNotFoundError:
        return False


def _client(prefix: str) -> Any:
    """Client options from the environment. The library ignores its environment variables as soon as
    it is given any option, so they are read here."""
    names = (
        "allow_http",
        "allow_invalid_certificates",
        "proxy_url",
        "proxy_ca_certificate",
        "proxy_excludes",
        *CLIENT,
    )
    found = {name: os.environ.get(f"{prefix}_{name.upper()}") for name in names}
    return CLIENT | {name: value for name, value in found.items() if value is not None}


@contextlib.contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Convert errors of the storage library to one sentence for the user."""
    try:
        yield
    except _MISSING as e:
        raise Missing(f"cannot {doing}: it does not exist") from e
    except (BaseError, OSError, ValueError) as e:  # ValueError: invalid keys
        what = str(e).partition("\n")[0]  # the rest is the library's debug output
        if "error sending request" in what:
            raise Unreachable(
                f"cannot {doing}: the store does not answer ({what}); {_advice(what)}"
            ) from e
        raise EtudeError(f"cannot {doing}: {what}; {_advice(what)}") from e


def _advice(what: str) -> str:
    # The library passes the operating system's error only as text.
    if any(f"os error {code})" in what for code in (27, 28, 122)):
        return "free some space or choose another place, then start again: no partial file was left"
    if any(f"os error {code})" in what for code in (1, 13, 30)):
        return "give this user write permission there, or choose another place"
    return "check the address, the credentials and the network"
