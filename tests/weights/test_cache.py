"""Where a host keeps what its workers have downloaded: for their user alone, and no more than so
many bytes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from etude.core.errors import EtudeError
from etude.weights.cache import HostCache
from etude.weights.manifest import hash_of


def test_nobody_else_reads_or_changes_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        HostCache(tmp_path / "there" / "cache")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "there" / "cache").stat().st_mode) == 0o700


def test_what_was_changed_is_downloaded_again(tmp_path: Path) -> None:
    cache, name = HostCache(tmp_path), hash_of(b"right")
    assert [cache.get(name, lambda: b"right"), cache.get(name, lambda: b"not asked")] == [
        b"right",
        b"right",
    ]
    (tmp_path / name).write_bytes(b"wrong")
    assert cache.get(name, lambda: b"right") == b"right"
    assert (tmp_path / name).read_bytes() == b"right"
    assert not list(tmp_path.glob("*.part"))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        EtudeError, match="weights cannot be cached in .*file/cache .*: choose another place"
    ):
        HostCache(tmp_path / "file" / "cache")
