"""The two guarantees of the store: an object appears atomically, and `create` has one winner."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from etude.core.errors import EtudeError
from etude.store.objects import LIST_PAGE, PART_BYTES, Missing, Objects, StoreUsage


@pytest.fixture(params=["memory", "directory"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    return Objects.open("memory:" if request.param == "memory" else f"file:{tmp_path / 'store'}")


def test_put_get_list_delete(objects: Objects) -> None:
    objects.put("a/2", b"two")
    objects.put("a/1", b"one")
    objects.put("ab/3", b"three")
    objects.put("a/1", b"one again")
    assert objects.get("a/1") == b"one again"
    assert objects.list("a") == ["a/1", "a/2"]
    assert objects.list("a", after="a/1") == ["a/2"]
    assert objects.list("nothing") == []
    objects.delete("a/1")
    objects.delete("a/1")
    assert not objects.exists("a/1") and objects.exists("a/2")


def test_what_a_killed_writer_left_is_swept_away(tmp_path: Path) -> None:
    writing = f"""
import os, signal, threading
from pathlib import Path
from etude.store.objects import Objects
def kill_in_the_middle():
    while not list(Path({str(tmp_path)!r}).rglob("*#*")):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill_in_the_middle, daemon=True).start()
Objects.open({str(tmp_path)!r}).put("a/key", bytes(1 << 28))
"""
    killed = subprocess.run([sys.executable, "-c", writing], check=False)
    assert killed.returncode == -signal.SIGKILL
    store = Objects.open(str(tmp_path))
    store.put("a/other", b"whole")
    store.put("a/other#mine", b"whole too")
    assert (
        store.list("a") == ["a/other", "a/other#mine"]
        and len(list((tmp_path / "a").iterdir())) == 3
    ), "it is hidden, and there"
    store.sweep("a")
    store.sweep("nothing")
    left = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert left == ["other", "other#mine"]
    Objects.open("memory:").sweep("a")


def test_folders(objects: Objects) -> None:
    assert objects.folders("events") == []
    for key in ("events/b/1", "events/a/1", "events/a/2", "events/c", "eventsd/x/1"):
        objects.put(key, b"x")
    assert objects.folders("events") == ["a", "b"]


def test_what_is_missing_is_named(objects: Objects) -> None:
    with pytest.raises(Missing, match=r"read a/1 in .*: it does not exist"):
        objects.get("a/1")


def test_create_has_one_winner(objects: Objects) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda writer: objects.create("key", b"%d" % writer), range(50)))
    assert won.count(True) == 1
    assert objects.get("key") == b"%d" % won.index(True)


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("runs/a", "file:runs/a", f"file://{tmp_path}/runs/a", str(tmp_path / "runs" / "a")):
        Objects.open(url).put("key", url.encode())
        assert (tmp_path / "runs" / "a" / "key").read_bytes() == url.encode()
    with pytest.raises(EtudeError, match="'ftp://host/x' is not a store: give a path"):
        Objects.open("ftp://host/x")


def test_a_reader_leaves_nothing_behind_a_mistyped_path(tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="typo does not exist: check the path"):
        Objects.open(str(tmp_path / "typo"), create=False)
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EtudeError, match=r"cannot open file:.*/file: "):
        Objects.open(f"file:{tmp_path}/file")


@contextmanager
def no_file_grows_beyond(size_bytes: int) -> Iterator[None]:
    """To the writer this looks like a full disk: the write fails in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size_bytes", [100_000, 12_000_000])
def test_a_full_disk_leaves_the_old_object_and_nothing_else(
    tmp_path: Path, size_bytes: int
) -> None:
    objects = Objects.open(f"file:{tmp_path}")
    objects.put("a/old", b"old")
    message = None
    with no_file_grows_beyond(50_000):
        for write in (objects.put, objects.create):
            for key in ("a/old", "a/new"):
                try:
                    write(key, b"x" * size_bytes)
                except EtudeError as e:
                    message = str(e)
    assert (
        message is not None
        and "free some space" in message
        and str(tmp_path) in message
        and "\n" not in message
    )
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["old"]
    assert objects.get("a/old") == b"old"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_no_right_to_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(EtudeError, match="write permission"):
        Objects.open(f"file:{tmp_path}").put("key", b"")


WRITER = """
import sys
from etude.store.objects import Objects
objects = Objects.open(sys.argv[1])
print("started", flush=True)
for n in range(10**9):
    objects.put("a/same", bytes([n % 256]) * 8_000_000)
    objects.create(f"b/{n:06d}", b"x" * 200_000)
"""


def test_a_killed_writer_leaves_whole_objects(tmp_path: Path) -> None:
    """SIGKILL in the middle of a write, several times; every listed object is complete."""
    objects = Objects.open(str(tmp_path))
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"started\n"
            while len(objects.list("b")) < 5:
                assert writer.poll() is None, "the writer crashed"
            writer.kill()
        assert len(set(objects.get("a/same"))) == 1 and len(objects.get("a/same")) == 8_000_000
        for key in objects.list("b"):
            assert objects.get(key) == b"x" * 200_000
            objects.delete(key)
    assert objects.list("a") == ["a/same"]


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EFBIG, "free some space"),
        (errno.EPERM, "give this user write permission there"),
        (errno.EACCES, "give this user write permission there"),
        (errno.EROFS, "give this user write permission there"),
        (errno.EIO, "check the address"),
    ],
)
def test_what_to_do_depends_on_what_the_system_says(
    objects: Objects, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def refuse(*told: object, **more: object) -> None:
        raise OSError(f"Unable to write: {os.strerror(number)} (os error {number})\nDebug {{}}")

    monkeypatch.setattr("etude.store.objects.obstore.put", refuse)
    with pytest.raises(EtudeError, match=f"os error {number}\\); {advice}") as raised:
        objects.put("a", b"")
    assert "Debug" not in str(raised.value)


def test_requests_and_bytes_are_counted() -> None:
    objects = Objects(MemoryStore(), "s3://fake")
    objects.put("a/1", bytes(10))
    objects.put("a/2", bytes(PART_BYTES + 1))
    assert not objects.create("a/1", bytes(3))
    objects.get("a/1")
    with pytest.raises(Missing):
        objects.get("a/3")
    objects.exists("a/3")
    objects.list("a")
    objects.folders("")
    written = 10 + PART_BYTES + 1 + 3
    assert objects.usage == StoreUsage(
        reads=3, writes=1 + 4 + 1, lists=2, read_bytes=10, written_bytes=written
    )
    for number in range(LIST_PAGE):
        objects.put(f"many/{number}", b"")
    objects.list("many")
    assert objects.usage.lists == 4, "a long listing is several requests"


def test_a_bucket_is_asked_less_often() -> None:
    assert Objects(MemoryStore(), "s3://fake").poll_s > Objects.open("memory:").poll_s
