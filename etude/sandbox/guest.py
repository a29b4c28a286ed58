"""The first process of a sandbox. It holds the working copy, and runs commands in it for the host.

It raises the walls (its own mounts over the shared root), then answers each line of JSON with one
line of JSON, in order:

  {"op": "write", "files": [[path, mode, size], ...]}  {"ok": null}
  {"op": "read", "path": path}                         {"ok": content}
  {"op": "run", "argv": [...], "stdin": content, ...}  {"ok": [code or null, output, report]}
  {"op": "start", "argv": [...], "pty": bool, ...}     {"ok": null}
  {"op": "changes", "before": {path: [...]}}           {"ok": {path: [mode, content] or null}}
  {"op": "patch", "before": {path: [...]}, ...}        the same, whole, with all processes killed
  {"op": "apply", "patch": {path: [mode, content]}}    {"ok": null}
  {"op": "send"} and {"op": "receive"}                 the whole working copy, out and in
  {"op": "freeze"} and {"op": "adopt"}                 the same, shared instead of copied
  {"op": "date", "times": {path: nanoseconds}}         {"ok": null}
  {"op": "name", "hosts": {name: address}}             {"ok": null}
  {"op": "listen", "places": [[address, port]]}        {"ok": null}
  anything that cannot be done                         {"error": [kind, message]}

Contents are in base64, except for "write", which comes with a file in memory that holds all
contents in sequence. "start" comes with a socket for that process: it carries the host's ends of
the process's streams back, and then belongs to a `keeper`. The socket of "listen" carries the
listening sockets. "send" and "receive", like "freeze" and "adopt", come with the two ends of a
socket between two sandboxes: a copy never passes the host.

This process and the keepers are trusted, the commands are not, and the two never meet (see
`command`). Standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import gc
import io
import json
import math
import os
import resource
import select
import shutil
import signal
import socket
import stat
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from etude.sandbox import kernel, landlock, tree
from etude.sandbox.command import HIDDEN, REPORT_PATH, Command, spawn
from etude.sandbox.keeper import keep, raise_if_broken, reaped
from etude.sandbox.layers import MAX_LAYERS, Layers
from etude.sandbox.limits import (
    COPY_BYTES,
    COPY_FILES,
    LIMITS,
    MAX_PROCESSES,
    OUTPUT_BYTES,
    PATCH_BYTES,
    PROCESS_BYTES,
    QUOTAS,
    READ_BYTES,
    REPORT_BYTES,
    largest_file,
)
from etude.sandbox.output import Tail, open_pipes, open_terminal
from etude.sandbox.places import WORK

GUEST_ID = 1000
COVERED: list[tuple[str, str]] = []
"""Mounts with a target below /tmp, with the path at which the zygote keeps them."""
HOSTNAME = "localhost"
HOME = ""
"""Home directory of an image's user, made of /etc/skel; empty: /tmp is the home."""
_ASIDE = "/tmp"
"""Mount point for a moment, before any command runs."""
_LOOKS, _LOOK_S = 10, 0.005
"""Number of checks, and seconds between them, that all processes have ended before a large copy is
made instead."""


class Link:
    """Lines from and to the host. This process ends when the host closes its side."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def waiting(self) -> bool:
        """True if another complete request has arrived already."""
        return b"\n" in self._buffer

    def receive(self) -> Any:
        parts = [self._buffer]  # joined once: a working copy may come in thousands of parts
        while b"\n" not in parts[-1]:
            try:
                chunk, descriptors, _, _ = socket.recv_fds(self._connection, 1 << 16, 1)
            except ConnectionError:  # the host was killed before it read our last answer
                chunk, descriptors = b"", []
            if not chunk:
                end()
            parts.append(chunk)
            self._descriptors += descriptors
        line, self._buffer = b"".join(parts).split(b"\n", 1)
        return json.loads(line)

    def take_socket(self) -> socket.socket:
        """The socket that came with the current request; those of later ones may have arrived,
        too."""
        return socket.socket(fileno=self._descriptors.pop(0))

    def take_file(self) -> io.FileIO:
        return io.FileIO(self._descriptors.pop(0))

    def send(self, answer: dict[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(answer).encode() + b"\n")
        except ConnectionError:
            end()


def end() -> NoReturn:
    """Kill all processes of the sandbox, then exit: when the host notices, nothing is left running.
    The kernel would kill them as well, but only after it has closed our socket."""
    if os.getpid() == 1:
        _kill_all()
    os._exit(0)


def _kill_all() -> None:
    """Kill every other process. Called by process 1, which sees those of this sandbox only."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)


def raise_walls() -> None:
    """Raise the walls that are the same for every sandbox."""
    kernel.mount("proc", "/proc", "proc", HIDDEN)
    for name, value in QUOTAS.items():
        if os.path.exists(f"/proc/sys/{name}"):
            kernel.put(f"/proc/sys/{name}", value)
    socket.sethostname(HOSTNAME)
    kernel.raise_loopback()


def serve(connection: socket.socket, *bounds: int) -> NoReturn:
    """Answer requests until the host closes the connection. `bounds`: the limits that `Guest`
    takes."""
    link = Link(connection)
    try:
        guest = Guest(link, *bounds)
    except OSError as e:
        link.send({"error": ["RolloutFailure", f"sandbox: {e.strerror}"]})
        os._exit(1)
    link.send({"ok": None})
    gc.freeze()  # a collection in a command would copy every page that it shares with this process
    while True:
        request = link.receive()
        _reap()
        try:
            answer = {"ok": getattr(guest, "op_" + request.pop("op"))(**request)}
        except FileNotFoundError as e:
            answer = {"error": ["FileNotFoundError", str(e)]}
        except ValueError as e:
            answer = {"error": ["ValueError", str(e)]}
        except (OSError, EOFError) as e:
            answer = {"error": ["RolloutFailure", f"sandbox: {e}"]}
        link.send(answer)


def _reap() -> None:
    """Reap keepers that have ended, and the orphans of a killed one: they become children of the
    first process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _alone() -> bool:
    """True if nothing else runs in this sandbox. The keeper of a process that has just ended may
    still be running for a moment."""
    for _ in range(_LOOKS):
        _reap()
        if [name for name in os.listdir("/proc") if name.isdigit()] == ["1"]:
            return True
        time.sleep(_LOOK_S)
    return False


class Guest:
    """The working copy, and the commands in it."""

    def __init__(
        self,
        link: Link,
        disk_bytes: int = COPY_BYTES,
        disk_files: int = COPY_FILES,
        processes: int = MAX_PROCESSES,
        process_bytes: int = PROCESS_BYTES,
    ) -> None:
        self._link = link
        self._copy_bytes = disk_bytes
        self._copy_files = disk_files
        self._limits = LIMITS | {
            resource.RLIMIT_NPROC: processes,
            resource.RLIMIT_AS: process_bytes,
            resource.RLIMIT_FSIZE: largest_file(disk_bytes),
        }
        self._writable = (WORK, "/tmp", *([HOME] if HOME else []))
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        for path in self._writable:
            kernel.mount("tmpfs", path, "tmpfs", flags, self._copy_options())
        if HOME and os.path.isdir("/etc/skel"):
            shutil.copytree("/etc/skel", HOME, symlinks=True, dirs_exist_ok=True)
        for source, target in COVERED:
            os.makedirs(target, exist_ok=True)
            kernel.bind(source, target)
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
        self._layers = Layers(WORK)
        self._enter()

    def _enter(self) -> None:
        """Open the working copy that is mounted now."""
        os.chdir(WORK)
        self._work = os.open(WORK, os.O_PATH | os.O_DIRECTORY)
        self._rules = landlock.rules(self._writable, "/dev")

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        """Close everything of the current working copy while another one is mounted over it."""
        os.chdir("/")
        for descriptor in (self._work, self._rules):
            if descriptor is not None:
                os.close(descriptor)
        try:
            yield
        finally:
            self._enter()

    def _copy_options(self) -> str:
        return f"size={self._copy_bytes},nr_inodes={self._copy_files},mode=0755"

    def op_name(self, hosts: dict[str, str]) -> None:
        """Bind a hosts file with these names over the one that all sandboxes share."""
        with open("/etc/hosts") as file:
            named = file.read() + "".join(f"{place} {name}\n" for name, place in hosts.items())
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("tmpfs", _ASIDE, "tmpfs", flags, "size=64k,mode=0755")
        kernel.put(f"{_ASIDE}/hosts", named)
        kernel.bind(f"{_ASIDE}/hosts", "/etc/hosts")
        kernel.protect("/etc/hosts")
        kernel.unmount(_ASIDE)

    def op_listen(self, places: list[tuple[str, int]]) -> None:
        """Open listening sockets at these places in the sandbox, and send them to the host."""
        with self._link.take_socket() as to:
            listeners = [socket.create_server((place, port)) for place, port in places]
            socket.send_fds(to, [b"\0"], [each.fileno() for each in listeners])
            for each in listeners:
                each.close()

    def op_write(self, files: list[tuple[str, int, int]]) -> None:
        with self._link.take_file() as contents:
            at = 0
            for path, mode, size in files:
                self._put(path, mode, os.pread(contents.fileno(), size, at))
                at += size

    def _put(self, path: str, mode: int, data: bytes) -> None:
        try:
            tree.make_parents(WORK, path)
            if mode == tree.LINK:
                os.symlink(data, os.fsencode(f"{WORK}/{path}"))
            else:
                self._write(path, mode, data)
        except OSError as e:
            raise ValueError(f"{path} cannot be written: {e.strerror}") from e

    def op_date(self, times: dict[str, int]) -> None:
        """Set the modification times of files in a working copy in which nothing has run yet."""
        for path, when in times.items():
            with contextlib.suppress(FileNotFoundError):
                os.utime(path, ns=(when, when), dir_fd=self._work, follow_symlinks=False)

    def _write(self, path: str, mode: int, data: bytes) -> None:
        with self._open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            if mode == tree.EXECUTABLE:
                os.fchmod(file.fileno(), 0o755)
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def op_read(self, path: str) -> str:
        try:
            with self._open(path, os.O_RDONLY) as file:
                data = file.read(READ_BYTES + 1)
        except FileNotFoundError:
            raise
        except OSError as e:
            raise ValueError(f"{path} cannot be read: {e.strerror}") from e
        if len(data) > READ_BYTES:
            raise ValueError(f"{path} is larger than {READ_BYTES} bytes")
        return _encode(data)

    def _open(self, path: str, flags: int) -> io.FileIO:
        try:
            # Without O_NONBLOCK a named pipe would block this process for ever.
            file = io.FileIO(
                kernel.open_beneath(self._work, path, flags | os.O_NONBLOCK, 0o644), _mode(flags)
            )
        except OSError as e:
            if e.errno in (errno.EXDEV, errno.ELOOP):
                raise ValueError(f"{path} leaves the working copy") from e
            raise
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise ValueError(f"{path} is not a plain file")
        return file

    def _directory(self, path: str) -> int:
        try:
            return kernel.open_beneath(self._work, path, os.O_PATH | os.O_DIRECTORY)
        except OSError as e:
            raise ValueError(f"{path} is not a directory of the working copy") from e

    def _opener(self, path: str, flags: int) -> int:
        return kernel.open_beneath(self._work, path, flags)

    def op_changes(self, before: dict[str, list[Any]]) -> dict[str, Any]:
        known = {path: tuple(each) for path, each in before.items()}
        changed = tree.changes(
            self._opener, known, file_bytes=READ_BYTES, max_entries=self._copy_files
        )
        return {
            path: entry and [entry.mode, None if entry.content is None else _encode(entry.content)]
            for path, entry in changed.items()
        }

    def op_patch(
        self, before: dict[str, list[Any]], only: list[str], without: list[str]
    ) -> dict[str, Any]:
        _kill_all()
        known = {path: tuple(each) for path, each in before.items()}
        found = tree.patch(
            self._opener,
            known,
            max_bytes=PATCH_BYTES,
            max_entries=self._copy_files,
            only=only,
            without=without,
        )
        return {path: each and [each[0], _encode(each[1])] for path, each in found.items()}

    def op_apply(self, patch: dict[str, list[Any] | None]) -> None:
        changed = {
            path: (each[0], base64.b64decode(each[1])) if each else None
            for path, each in patch.items()
        }
        tree.apply(WORK, changed)

    def op_freeze(self, always: bool) -> bool:
        """Share the current working copy, if that is worthwhile (or `always`) and no process runs
        in it. False if it has to be copied."""
        with self._link.take_socket() as to:
            copy = os.statvfs(self._work)
            used = (copy.f_blocks - copy.f_bfree) * copy.f_frsize
            worth_it = always or used > COPY_BYTES or len(self._layers)
            if not worth_it or self._layers.full() or not _alone():
                return False
            with self._outside():
                try:
                    layers = self._layers.freeze(self._copy_options())
                except OSError:  # an old kernel, without overlays for ordinary users
                    return False
            socket.send_fds(to, [b"\0"], layers)
            for layer in layers:
                os.close(layer)
            return True

    def op_adopt(self) -> None:
        with self._link.take_socket() as source:
            _, layers, _, _ = socket.recv_fds(source, 1, MAX_LAYERS + 1)
        with self._outside():
            self._layers.adopt(layers, self._copy_options())

    def op_send(self) -> None:
        # the reader tells why it stopped early
        with self._link.take_socket() as to, contextlib.suppress(ConnectionError):
            tree.send(
                self._opener,
                to.fileno(),
                max_bytes=self._copy_bytes,
                max_entries=self._copy_files,
            )

    def op_receive(self) -> None:
        with self._link.take_socket() as source:
            try:
                tree.receive(source.fileno(), WORK)
            except OSError as e:
                raise ValueError(f"the working copy cannot be copied: {e.strerror}") from e

    def op_run(
        self,
        argv: list[str],
        stdin: str,
        timeout_s: float,
        cwd: str,
        env: dict[str, str],
        report: bool,
    ) -> tuple[int | None, str, str]:
        opened = [self._directory(cwd), os.memfd_create("stdin"), *os.pipe()]
        directory, source, out_of, output = opened
        tails = [Tail(out_of, OUTPUT_BYTES)]
        reporting = None
        if report:
            report_of, reporting = os.pipe()
            opened += [report_of, reporting]
            tails += [Tail(report_of, REPORT_BYTES)]
            env = {**env, "ETUDE_REPORT": REPORT_PATH}
        limits = {**self._limits, resource.RLIMIT_CPU: math.ceil(timeout_s) + 1}
        command = Command(
            argv, env, directory, source, output, False, limits, self._rules, reporting
        )
        try:
            os.pwrite(source, base64.b64decode(stdin), 0)
            child, broken = spawn(command, self._own_pids)
            code = self._wait(child, tails, time.monotonic() + timeout_s)
            raise_if_broken(broken)
            told, *reported = [tail.rest() for tail in tails]
            return code, told.decode(errors="replace"), _encode(b"".join(reported))
        except OSError as e:
            raise OSError(f"a command could not be run: {e}") from e
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _wait(self, child: int, tails: list[Tail], deadline: float) -> int | None:
        """The exit status (minus the signal, if one ended it). None if the command was killed:
        because its time was up, or because the host sent another request, which it does only when
        nobody waits for this answer any more."""
        handle = os.pidfd_open(child)
        poll = select.poll()
        for descriptor in (handle, self._link.fileno(), *(tail.fileno() for tail in tails)):
            poll.register(descriptor, select.POLLIN)
        ready = {tail.fileno() for tail in tails}
        while ready <= {tail.fileno() for tail in tails}:
            for tail in tails:
                tail.read()
            left = 0.0 if self._link.waiting() else max(0.0, deadline - time.monotonic())
            ready = {descriptor for descriptor, _ in poll.poll(math.ceil(left * 1000))}
            if left == 0.0:
                break
        os.close(handle)
        ended = handle in ready
        code = reaped(child, kill=not ended)
        return code if ended else None

    def op_start(self, argv: list[str], cwd: str, env: dict[str, str], pty: bool) -> None:
        with self._link.take_socket() as control:
            opened = [self._directory(cwd)]
            try:
                opened += open_terminal() if pty else open_pipes()
                directory, source, output, *theirs = opened
                socket.send_fds(control, [b"\0"], theirs)
                kernel.join_pid_namespace(self._own_pids)
                if os.fork() == 0:
                    self._link.close()
                    for descriptor in theirs:
                        os.close(descriptor)
                    command = Command(
                        argv, env, directory, source, output, pty, self._limits, self._rules, None
                    )
                    keep(control, command, self._own_pids)
            finally:
                for descriptor in set(opened):
                    os.close(descriptor)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _mode(flags: int) -> str:
    return "w" if flags & os.O_WRONLY else "r"
