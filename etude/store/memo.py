"""Cached results in a folder that several processes share."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from etude.core.memo import Memo
from etude.store.decoding import decode_msgpack

T = TypeVar("T")


class FolderMemo(Memo[T]):
    """Results in a folder, one file each, under keys that contain everything a result depends on:
    other and later processes find them there. Keys must have the same `repr` in all processes.
    Nothing is ever deleted."""

    def __init__(self, size: int, folder: Path, type_: type[T]) -> None:
        """`size`: results that are kept in memory, too."""
        super().__init__(size)
        self._folder = folder
        self._type = type_
        folder.mkdir(parents=True, exist_ok=True)

    async def get(
        self,
        key: Hashable,
        compute: Callable[[], Awaitable[T]],
        keep: Callable[[T], bool] = lambda result: True,
    ) -> T:
        return await super().get(key, partial(self._find, key, compute, keep), keep)

    async def _find(
        self, key: Hashable, compute: Callable[[], Awaitable[T]], keep: Callable[[T], bool]
    ) -> T:
        path = self._folder / hashlib.sha256(repr(key).encode()).hexdigest()
        try:
            return decode_msgpack(path.read_bytes(), self._type)
        except (FileNotFoundError, msgspec.DecodeError):  # missing, or cut off by a full disk
            result = await compute()
        if keep(result):
            self._write(path, result)
        return result

    def _write(self, path: Path, result: T) -> None:
        """Write atomically, even with concurrent writers."""
        descriptor, name = tempfile.mkstemp(dir=self._folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.msgpack.encode(result))
        os.replace(name, path)
