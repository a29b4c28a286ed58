"""The files of a working copy, read from where an agent may be changing them at the same time.

Nothing in it is trusted: links are read, never followed; pipes and sockets are never opened for
long enough to wait; names need not be UTF-8 (they are strings as `os.fsdecode` makes them); what
vanishes meanwhile has not been there. Standard library only: this runs on both sides of the wall.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

FILE, EXECUTABLE, LINK = 0o100644, 0o100755, 0o120000
"""Modes, as git writes them. What is none of these keeps the mode that the system gives it."""
CHANGES_BYTES = 4 << 20
"""So much content of changed files is looked at, all together."""

_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.EINVAL}
"""What opening says to something that is not there any more, or is something else by now."""

Open = Callable[[str, int], int]
"""Opens a path of the working copy with these flags, without leaving it."""


class Entry(NamedTuple):
    """One file or link. `content` is where a link leads; None: too large to look at, unreadable, or
    neither a file nor a link."""

    mode: int
    content: bytes | None


Tree = Mapping[str, Entry]
Known = tuple[int, int, str]
"""Mode, size and SHA-256 of an entry."""


def known(tree: Tree) -> dict[str, Known]:
    """Enough of a tree to find out what has changed since."""
    return {
        path: (mode, len(content), hashlib.sha256(content).hexdigest())
        for path, (mode, content) in tree.items()
        if content is not None
    }


def changes(
    opener: Open, before: Mapping[str, Known], *, file_bytes: int, max_entries: int
) -> dict[str, Entry | None]:
    """What is not as it was: path -> how it is now, or None where nothing is any more."""
    left = CHANGES_BYTES
    gone = set(before)
    changed: dict[str, Entry | None] = {}
    for path, directory, status in _walk(opener, max_entries):
        if stat.S_ISDIR(status.st_mode):
            continue
        gone.discard(path)
        was = before.get(path)
        entry = _look(directory, path, status, max(min(file_bytes, left), was[1] if was else 0))
        if was and entry.content is not None and (entry.mode, *_digest(entry.content)) == was:
            continue
        if entry.content is not None and len(entry.content) > min(file_bytes, left):
            entry = Entry(entry.mode, None)
        left -= len(entry.content or b"")
        changed[path] = entry
    return changed | dict.fromkeys(gone)


def _digest(content: bytes) -> tuple[int, str]:
    return len(content), hashlib.sha256(content).hexdigest()


def _look(directory: int, path: str, status: os.stat_result, limit: int) -> Entry:
    name = os.path.basename(path)
    mode = status.st_mode
    if stat.S_ISREG(mode):
        mode = EXECUTABLE if mode & 0o100 else FILE
    elif stat.S_ISLNK(mode):
        mode = LINK
    try:
        if mode == LINK:
            return Entry(mode, os.fsencode(os.readlink(name, dir_fd=directory)))
        if mode in (FILE, EXECUTABLE) and status.st_size <= limit:
            with _open_file(directory, name) as file:
                content = file.read(limit + 1)
            return Entry(mode, content if len(content) <= limit else None)
    except OSError:  # it is something else by now, or may not be read
        pass
    return Entry(mode, None)


def _open_file(directory: int, name: str) -> io.BufferedReader:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENOENT, "it is not a plain file any more")
    return open(descriptor, "rb")


def _walk(opener: Open, max_entries: int) -> Iterator[tuple[str, int, os.stat_result]]:
    """All below, each with a descriptor of its directory. ValueError if there is too much of it."""
    count = 0
    pending = ["."]
    while pending:
        path = pending.pop()
        try:
            directory = opener(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as e:
            if e.errno in _GONE:
                continue
            if e.errno == errno.ENAMETOOLONG:
                raise ValueError("directories of the working copy are nested too deep") from e
            raise ValueError(f"{path} cannot be read: {e.strerror}") from e
        try:
            for name in sorted(os.listdir(directory)):
                if (count := count + 1) > max_entries:
                    raise ValueError(f"the working copy has more than {max_entries} entries")
                try:
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                inner = name if path == "." else f"{path}/{name}"
                yield inner, directory, status
                if stat.S_ISDIR(status.st_mode):
                    pending.append(inner)
        finally:
            os.close(directory)


def pack(opener: Open, *, max_bytes: int, max_entries: int) -> bytes:
    """The whole of it with modes and times. ValueError if it holds more than so many bytes, as a
    file full of holes may without using any."""
    buffer = io.BytesIO()
    left = max_bytes
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, directory, status in _walk(opener, max_entries):
            info = tarfile.TarInfo(path)
            info.mode = stat.S_IMODE(status.st_mode)
            info.mtime = status.st_mtime
            content = b""
            try:
                if stat.S_ISREG(status.st_mode):
                    with _open_file(directory, os.path.basename(path)) as file:
                        content = file.read(left + 1)
                elif stat.S_ISLNK(status.st_mode):
                    info.type = tarfile.SYMTYPE
                    info.linkname = os.readlink(os.path.basename(path), dir_fd=directory)
                elif stat.S_ISDIR(status.st_mode):
                    info.type = tarfile.DIRTYPE
                elif stat.S_ISFIFO(status.st_mode):
                    info.type = tarfile.FIFOTYPE
                else:
                    continue
            except OSError as e:
                if e.errno in _GONE:
                    continue
                raise ValueError(f"{path} cannot be read: {e.strerror}") from e
            if (left := left - len(content)) < 0:
                raise ValueError(f"the working copy holds more than {max_bytes} bytes")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def unpack(packed: bytes, root: str) -> None:
    """Into an empty directory."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        # made by `pack`, whose paths are those of real entries, and nothing runs in there yet
        tar.extractall(root, filter="fully_trusted")
