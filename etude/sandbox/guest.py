"""The first process of a sandbox. It keeps the working copy, and runs commands in it when the host
asks.

It finishes the walls (mounts of its own over the shared root), then answers one JSON line with one
JSON line, in order:

    {"op": "write", "files": {path: content}}           {"ok": null}
    {"op": "read", "path": path}                        {"ok": content}
    {"op": "run", "argv": [...], "stdin": content, ...} {"ok": [code or null, output]}
    {"op": "pack"} and {"op": "unpack", "tar": content} the whole working copy, out and in
    what cannot be done                                 {"error": [kind, message]}

Contents are in base64.

This process is trusted, what it runs is not, and they never meet: each command is process 1 of a
PID namespace below this one, with a /proc of its own, without capabilities, without the calls that
`syscalls` refuses, and without any descriptor but its three. It cannot name this process, so it
cannot signal, trace or starve it; and when it ends, the kernel ends all that it left running.

`python FILE ...` does not start a Python: the fork of this process already is one. Standard library
only.
"""

from __future__ import annotations

import atexit
import base64
import errno
import gc
import io
import json
import math
import os
import resource
import select
import signal
import socket
import stat
import sys
import tarfile
import time
import traceback
import types
from typing import Any, NoReturn

from etude.core.errors import RolloutFailure
from etude.sandbox import kernel
from etude.sandbox.limits import COPY_BYTES, COPY_FILES, LIMITS, NICENESS, OUTPUT_BYTES, READ_BYTES

GUEST_ID = 1000
ENVIRONMENT = {
    "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
}
WORK = "/work"

_HIDDEN = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC


class Link:
    """Lines from and to the host. The end of the host's side is the end of this process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def waiting(self) -> bool:
        """Whether another whole request has arrived already."""
        return b"\n" in self._buffer

    def receive(self) -> Any:
        while not self.waiting():
            try:
                chunk = self._connection.recv(1 << 16)
            except ConnectionError:  # the host was killed before it had read our last answer
                chunk = b""
            if not chunk:
                os._exit(0)
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def send(self, answer: dict[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(answer).encode() + b"\n")
        except ConnectionError:
            os._exit(0)


def serve(connection: socket.socket) -> NoReturn:
    link = Link(connection)
    try:
        guest = Guest(link)
    except OSError as e:
        link.send({"error": ["RolloutFailure", f"sandbox: {e.strerror}"]})
        os._exit(1)
    link.send({"ok": None})
    gc.freeze()  # a collection in a command would copy every page that it shares with this process
    while True:
        request = link.receive()
        try:
            answer = {"ok": getattr(guest, "op_" + request.pop("op"))(**request)}
        except FileNotFoundError as e:
            answer = {"error": ["FileNotFoundError", str(e)]}
        except ValueError as e:
            answer = {"error": ["ValueError", str(e)]}
        except (OSError, RolloutFailure) as e:
            answer = {"error": ["RolloutFailure", f"sandbox: {e}"]}
        link.send(answer)


class Guest:
    def __init__(self, link: Link) -> None:
        self._link = link
        kernel.mount("proc", "/proc", "proc", _HIDDEN)
        for path in (WORK, "/tmp"):
            options = f"size={COPY_BYTES},nr_inodes={COPY_FILES},mode=0755"
            kernel.mount("tmpfs", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        # No namespaces below for what runs here: they would give it capabilities again, and with
        # them a far larger part of the kernel to attack.
        kernel.put("/proc/sys/user/max_user_namespaces", "0")
        socket.sethostname("localhost")
        os.chdir(WORK)
        self._work = os.open(WORK, os.O_PATH | os.O_DIRECTORY)
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)

    def op_write(self, files: dict[str, str]) -> None:
        for path, content in files.items():
            data = base64.b64decode(content)
            try:
                os.makedirs(os.path.dirname(f"{WORK}/{path}"), exist_ok=True)
                with self._open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                    if file.write(data) < len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as e:
                raise ValueError(f"{path} cannot be written: {e.strerror}") from e

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
        return base64.b64encode(data).decode()

    def _open(self, path: str, flags: int) -> io.FileIO:
        try:
            # Without O_NONBLOCK a named pipe would hold this process for ever.
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

    def op_pack(self) -> str:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.add(WORK, arcname=".")
        return base64.b64encode(buffer.getvalue()).decode()

    def op_unpack(self, tar: str) -> None:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(tar))) as packed:
            # made by `op_pack`, and there is nothing else in here
            packed.extractall(WORK, filter="fully_trusted")

    def op_run(
        self, argv: list[str], stdin: str, timeout_s: float, cwd: str, env: dict[str, str]
    ) -> tuple[int | None, str]:
        directory = self._directory(cwd)
        source, output = os.memfd_create("stdin"), os.memfd_create("output")
        broken, breaks = os.pipe()
        try:
            os.pwrite(source, base64.b64decode(stdin), 0)
            kernel.join_pid_namespace(self._own_pids)
            kernel.unshare(kernel.CLONE_NEWPID)
            child = os.fork()
            if child == 0:
                try:
                    _become(argv, env, directory, (source, output), breaks, timeout_s)
                finally:
                    os._exit(127)
            os.close(breaks)
            code = self._wait(child, time.monotonic() + timeout_s)
            if reason := os.read(broken, 1000):
                raise OSError(reason.decode())
            size = os.fstat(output).st_size
            return code, os.pread(output, OUTPUT_BYTES, max(0, size - OUTPUT_BYTES)).decode(
                errors="replace"
            )
        except OSError as e:
            raise RolloutFailure(f"a command could not be run: {e}") from e
        finally:
            for descriptor in (directory, source, output, broken):
                os.close(descriptor)

    def _directory(self, path: str) -> int:
        try:
            return kernel.open_beneath(self._work, path, os.O_PATH | os.O_DIRECTORY)
        except OSError as e:
            raise ValueError(f"{path} is not a directory of the working copy") from e

    def _wait(self, child: int, deadline: float) -> int | None:
        """The exit status (minus the signal, if one ended it), or None when it was killed: for its
        time, or because the host asks for something else now, which it does only when nobody waits
        for this answer any more."""
        handle = os.pidfd_open(child)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.register(self._link, select.POLLIN)
        left = 0.0 if self._link.waiting() else max(0.0, deadline - time.monotonic())
        ended = any(descriptor == handle for descriptor, _ in poll.poll(math.ceil(left * 1000)))
        os.close(handle)
        if not ended:
            os.kill(child, signal.SIGKILL)
        # Process 1 of a namespace is not reaped before every other process in it is gone.
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code if ended else None


def _mode(flags: int) -> str:
    return "w" if flags & os.O_WRONLY else "r"


def _become(
    argv: list[str],
    env: dict[str, str],
    directory: int,
    streams: tuple[int, int],
    breaks: int,
    timeout_s: float,
) -> NoReturn:
    """Turn this fork into the command."""
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("proc", "/proc", "proc", _HIDDEN)
        kernel.put("/proc/self/oom_score_adj", "1000")  # when memory runs out, this goes first
        for limit, value in {**LIMITS, resource.RLIMIT_CPU: math.ceil(timeout_s) + 1}.items():
            resource.setrlimit(limit, (value, value))
        os.nice(NICENESS)
        kernel.drop_capabilities()
        os.fchdir(directory)
        os.dup2(streams[0], 0)
        os.dup2(streams[1], 1)
        os.dup2(streams[1], 2)
        kernel.filter_calls()
    except OSError as e:
        os.write(breaks, str(e).encode())
        os._exit(1)
    os.closerange(3, 1 << 20)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if argv[0] in ("python", "python3"):
        # Variables may change how a Python starts, and this one has started.
        if len(argv) > 1 and not argv[1].startswith("-") and not env:
            _run_script(argv[1:])
        argv = [sys.executable, "-B", *argv[1:]]
    try:
        os.execvpe(argv[0], argv, {**ENVIRONMENT, **env})
    except OSError as e:
        os.write(2, f"{argv[0]}: {e.strerror}\n".encode())
    os._exit(127)


def _run_script(argv: list[str]) -> NoReturn:
    """What `python SCRIPT ...` does, from the first line of the script to the exit status."""
    script = argv[0]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.argv = argv
    sys.path[:] = [os.path.dirname(os.path.abspath(script)), *sys.path]
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=os.path.abspath(script), __builtins__=__builtins__)
    sys.modules["__main__"] = main
    code = 0
    try:
        with open(script, "rb") as file:
            program = compile(file.read(), script, "exec")
        exec(program, main.__dict__)
    except SystemExit as e:
        code = _exit_status(e.code)
    # the interpreter's own last resort, which this function stands in for
    except BaseException as e:
        frame = e.__traceback__
        while frame and frame.tb_frame.f_code.co_filename == __file__:
            frame = frame.tb_next
        traceback.print_exception(e.with_traceback(frame))
        code = 1
    if threading := sys.modules.get("threading"):
        threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


def _exit_status(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1
