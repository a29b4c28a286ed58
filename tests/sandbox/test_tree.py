"""A working copy, read while somebody may be changing it: the entries that count, and their
limits."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from etude.sandbox import tree
from etude.sandbox.tree import EXECUTABLE, FILE, LINK, Entry, changes, known

PLENTY = 1 << 20


def opener(root: Path) -> tree.Open:
    return lambda path, flags: os.open(root / path, flags)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    root = tmp_path / "copy"
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "a").write_bytes(b"1234")
    (root / "sub" / "run").write_bytes(b"#!")
    (root / "sub" / "run").chmod(0o755)
    (root / "sub" / "link").symlink_to("../a")
    return root


TREE = {
    "a": Entry(FILE, b"1234"),
    "sub/run": Entry(EXECUTABLE, b"#!"),
    "sub/link": Entry(LINK, b"../a"),
}


def changed(root: Path, before: tree.Tree, file_bytes: int = PLENTY) -> dict[str, Entry | None]:
    return changes(opener(root), known(before), file_bytes=file_bytes, max_entries=100)


def copied(root: Path, to: Path, *, max_bytes: int = PLENTY, max_entries: int = 100) -> None:
    with tempfile.TemporaryFile() as between:
        tree.send(opener(root), between.fileno(), max_bytes=max_bytes, max_entries=max_entries)
        os.lseek(between.fileno(), 0, os.SEEK_SET)
        to.mkdir()
        tree.receive(between.fileno(), str(to))


def test_only_what_is_not_as_it_was_is_told(copy: Path) -> None:
    assert changed(copy, TREE) == {}
    assert changed(copy, {}) == TREE
    (copy / "a").chmod(0o755)
    (copy / "sub" / "run").write_bytes(b"##")
    (copy / "sub" / "link").unlink()
    assert changed(copy, TREE) == {
        "a": Entry(EXECUTABLE, b"1234"),
        "sub/run": Entry(EXECUTABLE, b"##"),
        "sub/link": None,
    }


def test_what_is_too_large_is_named_without_its_content(copy: Path) -> None:
    assert changed(copy, {}, file_bytes=3)["a"] == Entry(FILE, None)
    assert changed(copy, {}, file_bytes=4)["a"] == Entry(FILE, b"1234")
    # as large as it was allowed to be: it can still be compared
    assert changed(copy, TREE, file_bytes=3) == {}
    # all files together: in the order of names, earlier files get the remaining bytes
    found = changes(opener(copy), {}, file_bytes=PLENTY, max_entries=100, max_bytes=5)
    assert (found["a"], found["sub/run"]) == (Entry(FILE, b"1234"), Entry(EXECUTABLE, None))


def test_what_is_no_file_is_never_opened(copy: Path) -> None:
    os.mkfifo(copy / "pipe")
    os.mknod(copy / "socket", stat.S_IFSOCK | 0o600)
    found = changed(copy, TREE)
    assert found.keys() == {"pipe", "socket"}
    assert all(entry and entry.content is None for entry in found.values())
    copied(copy, copy.parent / "again")
    assert (copy.parent / "again" / "pipe").is_fifo()
    assert not (copy.parent / "again" / "socket").exists()


@pytest.fixture
def outside(copy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that a link of the copy leads to, on a kernel that follows links although it must
    not: gVisor does so if a directory is asked for."""
    place = copy.parent / "outside"
    place.mkdir()
    (place / "secret").touch()
    (copy / "sub" / "out").symlink_to(place)
    opened = os.open

    def following(path: str, flags: int, *mode: int, dir_fd: int | None = None) -> int:
        followed = flags & ~os.O_NOFOLLOW if flags & os.O_DIRECTORY else flags
        return opened(path, followed, *mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", following)
    return place


def test_no_link_is_followed_to_what_is_read_or_written(copy: Path, outside: Path) -> None:
    link = Entry(LINK, os.fsencode(outside))
    assert changed(copy, TREE) == {"sub/out": link}
    with pytest.raises(ValueError, match="sub/out/x cannot be written: Too many levels"):
        tree.apply(str(copy), {"sub/out/x": (FILE, b"1")})
    with pytest.raises(ValueError, match="sub/out/secret cannot be written: Too many levels"):
        tree.apply(str(copy), {"sub/out/secret": None})
    assert os.listdir(outside) == ["secret"]


def test_a_copy_of_it_has_contents_modes_and_times(copy: Path, tmp_path: Path) -> None:
    os.utime(copy / "a", (1, 12345))
    copied(copy, tmp_path / "again", max_bytes=6, max_entries=5)
    again = tmp_path / "again"
    assert changed(again, TREE) == {} and (again / "sub" / "deep").is_dir()
    assert (again / "a").stat().st_mtime == 12345
    assert stat.S_IMODE((again / "sub" / "run").stat().st_mode) == 0o755


def test_too_much_of_it_is_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds more bytes than it may"):
        copied(copy, tmp_path / "again", max_bytes=5)
    for read in (
        lambda: copied(copy, tmp_path / "again", max_entries=4),
        lambda: changes(opener(copy), {}, file_bytes=PLENTY, max_entries=4),
    ):
        with pytest.raises(ValueError, match="has more than 4 entries"):
            read()


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(5, "I/O error")]
)
def test_a_directory_that_cannot_be_read_is_named_and_one_that_is_gone_is_not(
    copy: Path, error: OSError
) -> None:
    def refusing(path: str, flags: int) -> int:
        if path == "sub":
            raise error
        return os.open(copy / path, flags)

    with pytest.raises(ValueError, match=f"sub cannot be read: {error.strerror}"):
        changes(refusing, {}, file_bytes=PLENTY, max_entries=100)

    def gone(path: str, flags: int) -> int:
        if path == "sub":
            raise FileNotFoundError(2, "No such file or directory")
        return os.open(copy / path, flags)

    found = changes(gone, known(TREE), file_bytes=PLENTY, max_entries=100)
    assert found == {"sub/run": None, "sub/link": None}


@pytest.mark.parametrize("max_entries", [100, 3], ids=["all of it", "too much"])
def test_reading_leaves_no_directory_open(copy: Path, max_entries: int) -> None:
    """A sandbox is read a thousand times."""
    with contextlib.suppress(ValueError):
        changes(opener(copy), {}, file_bytes=PLENTY, max_entries=max_entries)
    opened = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    assert not [place for place in opened if place.startswith(str(copy))]


def test_what_is_gone_by_now_is_left_out_and_what_cannot_be_read_is_named(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the listing of a directory and the look at an entry, or its opening."""
    whole = os.stat, tree._open_file

    def failing(error: OSError, of: Any) -> Any:
        def call(*about: Any, **how: Any) -> Any:
            if "a" in about:
                raise error
            return of(*about, **how)

        return call

    gone, refused = FileNotFoundError(2, "No such file"), PermissionError(13, "Permission denied")
    for place, name, of in ((os, "stat", whole[0]), (tree, "_open_file", whole[1])):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, failing(gone, of))
            copied(copy, tmp_path / f"without {name}")
        assert sorted(os.listdir(tmp_path / f"without {name}")) == ["sub"]
        with monkeypatch.context() as patch:
            patch.setattr(place, name, failing(refused, of))
            with pytest.raises(ValueError, match="^a cannot be read: Permission denied"):
                copied(copy, tmp_path / "never")
    with monkeypatch.context() as patch:
        patch.setattr(tree, "_open_file", failing(refused, whole[1]))
        assert changed(copy, TREE) == {"a": Entry(FILE, None)}


def test_whoever_is_sent_a_copy_may_go_away(copy: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        tree.send(opener(copy), writing, max_bytes=PLENTY, max_entries=100)
    os.close(writing)


def test_a_pipe_in_the_place_of_a_file_is_not_read(copy: Path) -> None:
    os.mkfifo(copy / "pipe")
    directory = os.open(copy, os.O_RDONLY | os.O_DIRECTORY)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="it is not a plain file any more") as refused:
        tree._open_file(directory, "pipe")
    assert refused.value.errno == errno.ENOENT
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(directory)


def test_a_file_that_grew_shorter_is_sent_with_zeros_at_its_end(copy: Path) -> None:
    with tempfile.TemporaryFile() as to, (copy / "a").open("rb") as file:
        tree._send_bytes(to.fileno(), file.fileno(), 1, 6)
        to.seek(0)
        assert to.read() == b"234\0\0\0"


def test_a_copy_that_breaks_off_is_no_copy(copy: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as between:
        tree.send(opener(copy), between.fileno(), max_bytes=PLENTY, max_entries=100)
        between.seek(0)
        whole = between.read()
    inside = whole.index(b"1234")
    for number, cut in enumerate((inside, inside + 3, inside + 4, len(whole) - 1, 0)):
        to = tmp_path / str(number)
        to.mkdir()
        with tempfile.TemporaryFile() as part:
            part.write(whole[:cut])
            part.seek(0)
            with pytest.raises(EOFError, match="the copy of a working copy broke off"):
                tree.receive(part.fileno(), str(to))


def test_what_is_gone_with_its_directory_is_gone(copy: Path) -> None:
    tree.apply(str(copy), {"sub/none/x": None, "new/deep/y": (EXECUTABLE, b"1"), "a": None})
    assert sorted(str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file()) == [
        "new/deep/y",
        "sub/run",
    ]
    assert not (copy / "sub" / "none").exists()
