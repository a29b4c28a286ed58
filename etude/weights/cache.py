"""Objects that one process of a host has downloaded are there for all others: each is fetched once.

A lock file for each hash makes the others wait for the one that downloads. What is read is checked again by its hash,
so a damaged or half-written file costs a download and nothing else. The oldest files go when there are too many bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from etude.weights.manifest import hash_of


class HostCache:
    def __init__(self, folder: Path, max_bytes: int = 64 << 30) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def get(self, hash: str, download: Callable[[], bytes]) -> bytes:
        path = self._folder / hash
        with (self._folder / f"{hash}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                data = path.read_bytes()
                if hash_of(data) == hash:
                    return data
            data = download()
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_bytes(data)
            part.rename(path)
        self._shrink()
        return data

    def _shrink(self) -> None:
        files = sorted((p for p in self._folder.iterdir() if not p.suffix), key=lambda p: p.stat().st_mtime)
        size = sum(p.stat().st_size for p in files)
        while size > self._max_bytes and len(files) > 1:
            size -= files[0].stat().st_size
            for path in (files[0], files[0].with_suffix(".lock")):
                path.unlink(missing_ok=True)
            files.pop(0)
