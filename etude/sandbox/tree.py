"""The files of a working copy, read while an agent may be changing them.

Nothing in it is trusted. Links are read, never followed; opening a pipe or socket never blocks;
names need not be UTF-8 (they are strings as `os.fsdecode` makes them); a file that vanishes
meanwhile is treated as absent. Standard library only: this runs on both sides of the wall.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

FILE, EXECUTABLE, LINK = 0o100644, 0o100755, 0o120000
"""Modes, as git writes them. Entries of other kinds keep the mode that the system gives them."""
CHANGES_BYTES = 4 << 20
"""Total content of changed files that a diff shows."""

_CHUNK = 1 << 20
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.EINVAL}
"""Errors of opening a path that does not exist any more, or that is something else by now."""

Open = Callable[[str, int], int]
"""Opens a path of the working copy with these flags, without leaving it."""


class Entry(NamedTuple):
    """One file or link. `content` of a link is its target; None: too large to read, unreadable, or
    neither a file nor a link."""

    mode: int
    content: bytes | None


Tree = Mapping[str, Entry]
Known = tuple[int, int, str]
"""Mode, size and SHA-256 of an entry."""


def known(tree: Tree) -> dict[str, Known]:
    """Enough of a tree to find out later what has changed."""
    return {
        path: (mode, len(content), hashlib.sha256(content).hexdigest())
        for path, (mode, content) in tree.items()
        if content is not None
    }


def matches(path: str, only: Collection[str], without: Collection[str]) -> bool:
    """True if a path matches a pattern of `only`, and none of `without`. A star matches slashes."""
    return any(fnmatchcase(path, each) for each in only) and not any(
        fnmatchcase(path, each) for each in without
    )


def patch(
    opener: Open,
    before: Mapping[str, Known],
    *,
    max_bytes: int,
    max_entries: int,
    only: Collection[str] = ("*",),
    without: Collection[str] = (),
) -> dict[str, tuple[int, bytes] | None]:
    """All changes of matching paths, with their full content. ValueError if they are too large.
    Special files are left out."""
    found: dict[str, tuple[int, bytes] | None] = {}
    changed = changes(
        opener,
        before,
        file_bytes=max_bytes,
        max_bytes=max_bytes,
        max_entries=max_entries,
        wanted=lambda path: matches(path, only, without),
    )
    for path, entry in changed.items():
        if entry is None or entry.content is not None:
            found[path] = entry and (entry.mode, entry.content or b"")
        elif entry.mode in (FILE, EXECUTABLE):
            raise ValueError(f"{path} cannot be taken over: more than {max_bytes} bytes changed")
    return found


def changes(
    opener: Open,
    before: Mapping[str, Known],
    *,
    file_bytes: int,
    max_entries: int,
    max_bytes: int = CHANGES_BYTES,
    wanted: Callable[[str], bool] = lambda path: True,
) -> dict[str, Entry | None]:
    """The entries that differ from `before`: path -> current entry, or None if it was deleted."""
    left = max_bytes
    gone = set(before)
    changed: dict[str, Entry | None] = {}
    for path, directory, status in _walk(opener, max_entries):
        if stat.S_ISDIR(status.st_mode):
            continue
        gone.discard(path)
        if not wanted(path):
            continue
        was = before.get(path)
        entry = _look(directory, path, status, max(min(file_bytes, left), was[1] if was else 0))
        if was and entry.content is not None and (entry.mode, *_digest(entry.content)) == was:
            continue
        if entry.content is not None and len(entry.content) > min(file_bytes, left):
            entry = Entry(entry.mode, None)
        left -= len(entry.content or b"")
        changed[path] = entry
    return changed | dict.fromkeys(filter(wanted, gone))


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
    except OSError:  # it is something else by now, or not readable
        pass
    return Entry(mode, None)


def _open_file(directory: int, name: str) -> io.BufferedReader:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENOENT, "it is not a plain file any more")
    return open(descriptor, "rb")


def _walk(opener: Open, max_entries: int) -> Iterator[tuple[str, int, os.stat_result]]:
    """Everything below, each with a descriptor of its directory. ValueError if there are too many
    entries."""
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
                except OSError as e:  # file system attributes that the agent has set there
                    raise ValueError(f"{name} cannot be read: {e.strerror}") from e
                inner = name if path == "." else f"{path}/{name}"
                yield inner, directory, status
                if stat.S_ISDIR(status.st_mode):
                    pending.append(inner)
        finally:
            os.close(directory)


def make_parents(root: str, path: str) -> None:
    """Make the directories that lead to a path below `root`, in a loop: `os.makedirs` recurses, and
    a thousand nested ones would crash the process."""
    parent = os.path.dirname(path)
    if not parent or os.path.isdir(f"{root}/{parent}"):
        return
    place = root
    for part in parent.split("/"):
        place = f"{place}/{part}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(place)


def apply(root: str, changed: Mapping[str, tuple[int, bytes] | None]) -> None:
    """Apply the changes that `patch` found in another working copy to this one, in which nothing
    runs."""
    base = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        # deletions first: a directory may have become a file, and a file a directory
        for path, entry in sorted(changed.items(), key=lambda item: item[1] is not None):
            try:
                _apply_entry(base, path, entry)
            except OSError as e:
                raise ValueError(f"{path} cannot be written: {e.strerror}") from e
    finally:
        os.close(base)


def _apply_entry(base: int, path: str, entry: tuple[int, bytes] | None) -> None:
    *parents, name = path.split("/")
    directory = os.dup(base)
    try:
        for part in parents:
            try:
                inner = _enter(directory, part)
            except FileNotFoundError:
                if entry is None:
                    return
                os.mkdir(part, 0o755, dir_fd=directory)
                inner = _enter(directory, part)
            os.close(directory)
            directory = inner
        _remove(directory, name)
        if entry is not None:
            _put(directory, name, *entry)
    finally:
        os.close(directory)


def _enter(directory: int, name: str) -> int:
    # O_NOFOLLOW is not enough everywhere: with O_DIRECTORY, gVisor follows the link all the same
    if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)


def _remove(directory: int, name: str) -> None:
    """Remove a file, or a directory that contains nothing but directories."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        found = [name]
        for path in found:
            inner = _enter(directory, path)
            try:
                for each in os.listdir(inner):
                    if not stat.S_ISDIR(os.stat(each, dir_fd=inner, follow_symlinks=False).st_mode):
                        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY)) from None
                    found.append(f"{path}/{each}")
            finally:
                os.close(inner)
        for path in reversed(found):
            os.rmdir(path, dir_fd=directory)


def _put(directory: int, name: str, mode: int, content: bytes) -> None:
    if mode == LINK:
        os.symlink(os.fsdecode(content), name, dir_fd=directory)
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    file = os.open(name, flags, 0o600, dir_fd=directory)
    try:
        os.fchmod(file, 0o755 if mode == EXECUTABLE else 0o644)
        left = memoryview(content)
        while left:
            left = left[os.write(file, left) :]
    finally:
        os.close(file)


def send(opener: Open, to: int, *, max_bytes: int, max_entries: int) -> None:
    """Write the whole working copy, with modes and times, into a socket or pipe: for each entry a
    line of JSON and its bytes, with holes left out; then an empty line. ValueError if it has more
    than `max_bytes`."""
    with open(to, "wb", closefd=False) as out:
        for path, directory, status in _walk(opener, max_entries):
            try:
                max_bytes -= _send_entry(out, path, directory, status, max_bytes)
            except ConnectionError:
                raise
            except OSError as e:
                if e.errno in _GONE:
                    continue
                raise ValueError(f"{path} cannot be read: {e.strerror}") from e
        out.write(b"\n")


def _send_entry(
    out: io.BufferedWriter, path: str, directory: int, status: os.stat_result, left: int
) -> int:
    """Send one entry. Return the number of its bytes."""
    name = os.path.basename(path)
    head = {"path": path, "mode": status.st_mode, "time": status.st_mtime_ns}
    if stat.S_ISLNK(status.st_mode):
        head["link"] = os.readlink(name, dir_fd=directory)
    if not stat.S_ISREG(status.st_mode):
        if not stat.S_ISSOCK(status.st_mode):
            out.write(json.dumps(head).encode() + b"\n")
        return 0
    with _open_file(directory, name) as file:
        size = os.fstat(file.fileno()).st_size
        extents = list(_extents(file.fileno(), size))
        if (total := sum(length for _, length in extents)) > left:
            raise ValueError("the working copy holds more bytes than it may")
        out.write(json.dumps({**head, "size": size, "extents": extents}).encode() + b"\n")
        out.flush()
        for offset, length in extents:
            _send_bytes(out.fileno(), file.fileno(), offset, length)
    return total


def _extents(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Offset and length of the parts of a file that are not holes."""
    at = 0
    while at < size:
        try:
            start = os.lseek(file, at, os.SEEK_DATA)
        except OSError:  # a hole up to the end
            return
        at = min(os.lseek(file, start, os.SEEK_HOLE), size)
        yield start, at - start


def _send_bytes(to: int, file: int, offset: int, length: int) -> None:
    while length:
        sent = os.sendfile(to, file, offset, min(length, _CHUNK))
        if sent == 0:  # the file has become shorter meanwhile
            sent = os.write(to, bytes(min(length, _CHUNK)))
        offset += sent
        length -= sent


def receive(source: int, root: str) -> None:
    """Read the output of `send` into an empty directory in which nothing runs yet. EOFError if it
    ends too early."""
    base = os.open(root, os.O_PATH | os.O_DIRECTORY)
    directories = []
    with open(source, "rb", closefd=False) as stream:
        while (line := stream.readline()) != b"\n":
            if not line:
                raise EOFError("the copy of a working copy broke off")
            head = json.loads(line)
            path, mode = head["path"], head["mode"]
            if stat.S_ISDIR(mode):
                os.mkdir(path, 0o700, dir_fd=base)
                directories.append(head)
            elif stat.S_ISLNK(mode):
                os.symlink(head["link"], path, dir_fd=base)
            elif stat.S_ISFIFO(mode):
                os.mkfifo(path, stat.S_IMODE(mode), dir_fd=base)
            elif stat.S_ISREG(mode):
                _receive_file(stream, head, base)
    for head in reversed(directories):  # last, since adding files changes their times
        _restore(head["path"], head, base)
    os.close(base)


def _receive_file(stream: io.BufferedReader, head: dict[str, Any], base: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    file = os.open(head["path"], flags, 0o600, dir_fd=base)
    try:
        os.ftruncate(file, head["size"])
        for offset, length in head["extents"]:
            while length:
                if not (data := stream.read(min(length, _CHUNK))):
                    raise EOFError("the copy of a working copy broke off")
                offset += os.pwrite(file, data, offset)
                length -= len(data)
    finally:
        os.close(file)
    _restore(head["path"], head, base)


def _restore(path: str, head: dict[str, Any], base: int) -> None:
    os.chmod(path, stat.S_IMODE(head["mode"]), dir_fd=base)
    os.utime(path, ns=(head["time"], head["time"]), dir_fd=base)
