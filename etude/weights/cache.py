"""A cache of downloaded objects that all processes of a host share: each object is fetched once.

A lock file for each hash makes the others wait for the process that downloads, but not for ever: a
process that was stopped in the middle costs the others a download, not their service. Every object
that is read is checked against its hash, so a damaged or half-written file only costs a download,
and so does a full disk. If there are too many bytes, the oldest files are deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from etude.core.errors import EtudeError
from etude.store.objects import is_bucket
from etude.weights.records import hash_of

LOCK_S = 20.0
"""The longest wait for a download by another process."""
POLL_S = 0.02
UNFINISHED_S = 3600.0
"""A file that has been half-written for so long was left by a process that was killed."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def cache_folder() -> Path:
    """The folder where this user's programs keep data that can be downloaded again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etude"


class HostCache:
    def __init__(
        self, folder: Path, max_bytes: int = 64 << 30, lock_timeout_s: float = LOCK_S
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock_timeout_s = lock_timeout_s
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @classmethod
    def beside(cls, url: str, folder: Path | None = None) -> HostCache | None:
        """The cache that all workers of this user share; None if the store is a directory, which
        needs no copy."""
        if not is_bucket(url):
            return None
        return cls(folder or cache_folder() / "weights")

    def get(self, hash: str, download: Callable[[], bytes]) -> bytes:
        path = self._folder / hash
        with self._explained(), contextlib.ExitStack() as locked:
            with _passing_over_full_disk():
                self._wait_for(locked.enter_context((self._folder / f"{hash}.lock").open("w")))
            with contextlib.suppress(FileNotFoundError):
                data = path.read_bytes()
                if hash_of(data) == hash:
                    return data
            data = download()
            self._keep(path, data)
        self._shrink()
        return data

    def _keep(self, path: Path, data: bytes) -> None:
        """Store the object for other processes. On a full disk the oldest files make room; if that
        is not enough, the object is not cached."""
        try:
            _write(path, data)
        except OSError as e:
            if e.errno not in DISK_FULL:
                raise
            self._shrink(room=len(data))
            with _passing_over_full_disk():
                _write(path, data)

    def _wait_for(self, lock: IO[str]) -> None:
        """Return with the lock, or without it if another process has held it for too long."""
        deadline = time.monotonic() + self._lock_timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise EtudeError(
                f"cannot cache weights in {self._folder} ({e.strerror}): choose another directory"
            ) from e

    def _shrink(self, room: int = 0) -> None:
        """Delete the oldest files beyond the limit. `room`: bytes to free in any case."""
        files = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # other processes shrink it too
                found = path.stat()
                if re.fullmatch("[0-9a-f]{64}", path.name):
                    files.append((found.st_mtime, found.st_size, path))
                elif (
                    re.fullmatch(r"[0-9a-f]{64}\..*\.part", path.name)
                    and found.st_mtime < time.time() - UNFINISHED_S
                ):
                    path.unlink()
        excess = max(room, sum(size for _, size, _ in files) - self._max_bytes)
        for _, size, path in sorted(files)[:-1]:
            if excess > 0:
                path.unlink(missing_ok=True)
                path.with_suffix(".lock").unlink(missing_ok=True)
                excess -= size


@contextlib.contextmanager
def _passing_over_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno not in DISK_FULL:
            raise


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
    try:
        part.write_bytes(data)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
