"""The host's cache of downloaded objects: accessible to its user alone, and limited in size."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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


def test_the_oldest_go_when_there_is_too_much(tmp_path: Path) -> None:
    cache = HostCache(tmp_path, max_bytes=25)
    texts = [f"{number:010}".encode() for number in range(4)]
    for age, text in enumerate(texts):
        cache.get(hash_of(text), lambda text=text: text)  # type: ignore[misc]
        os.utime(tmp_path / hash_of(text), (age, age))
    left = {hash_of(text) for text in texts[-2:]}
    assert {path.name for path in tmp_path.iterdir()} == left | {f"{name}.lock" for name in left}
    large = b"more than all the room that there is"
    cache.get(hash_of(large), lambda: large)
    assert (tmp_path / hash_of(large)).read_bytes() == large, "the newest stays in any case"


def test_on_a_full_disk_the_oldest_make_room_and_what_does_not_fit_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def write_on_25_bytes(path: Path, data: bytes) -> int:
        room = 25 - sum(file.stat().st_size for file in tmp_path.iterdir())
        if write(path, data[:room]) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)

    monkeypatch.setattr(Path, "write_bytes", write_on_25_bytes)
    cache = HostCache(tmp_path)
    texts = [f"{number:010}".encode() for number in range(4)]
    for age, text in enumerate(texts):
        assert cache.get(hash_of(text), lambda text=text: text) == text  # type: ignore[misc]
        os.utime(tmp_path / hash_of(text), (age, age))
    large = b"more than all the room that there is"
    assert cache.get(hash_of(large), lambda: large) == large
    kept = {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"}
    assert kept == {hash_of(texts[-1])}


def test_a_disk_that_takes_no_more_files_has_no_locks_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def open_existing(path: Path, mode: str = "r", *options: Any, **named: Any) -> Any:
        if "w" in mode and not path.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, mode, *options, **named)

    monkeypatch.setattr(Path, "open", open_existing)
    assert HostCache(tmp_path).get(hash_of(b"data"), lambda: b"data") == b"data"
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_half_written_goes_after_a_while(tmp_path: Path) -> None:
    old, young = (tmp_path / f"{hash_of(text)}.1.2.part" for text in (b"old", b"young"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    HostCache(tmp_path).get(hash_of(b"more"), lambda: b"more")
    assert not old.exists() and young.exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        EtudeError, match="cannot cache weights in .*file/cache .*: choose another directory"
    ):
        HostCache(tmp_path / "file" / "cache")


def test_one_that_is_stopped_in_mid_download_does_not_block_its_host(tmp_path: Path) -> None:
    name = hash_of(b"right")
    with (tmp_path / f"{name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cache = HostCache(tmp_path, lock_timeout_s=0.05)
        assert cache.get(name, lambda: b"right") == b"right"
        assert cache.get(name, lambda: b"not asked") == b"right"
    assert not list(tmp_path.glob("*.part"))


def test_one_download_serves_all_who_wait_for_it(tmp_path: Path) -> None:
    name, begun, downloads = hash_of(b"right"), threading.Event(), []

    def download() -> bytes:
        downloads.append(1)
        begun.set()
        time.sleep(0.05)
        return b"right"

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(HostCache(tmp_path).get, name, download)
        begun.wait()
        rest = [pool.submit(HostCache(tmp_path).get, name, download) for _ in range(3)]
        assert {each.result() for each in (first, *rest)} == {b"right"}
    assert len(downloads) == 1


def test_only_what_was_downloaded_is_taken_out(tmp_path: Path) -> None:
    """Other files in the folder, and deletions by other processes, do no harm."""
    cache = HostCache(tmp_path, max_bytes=15)
    notes = tmp_path / "notes.txt"
    notes.write_text("more than all the room that there is")
    os.utime(notes, (0, 0))
    texts = [f"{number:010}".encode() for number in range(3)]
    for age, text in enumerate(texts, start=1):
        cache.get(hash_of(text), lambda text=text: text)  # type: ignore[misc]
        os.utime(tmp_path / hash_of(text), (age, age))
        (tmp_path / f"{hash_of(text)}.lock").unlink()
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", hash_of(texts[-1])}
