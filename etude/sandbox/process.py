"""Sandboxes without isolation: `isolation = "process"`.

A sandbox is a temporary directory with ordinary processes of the same user. They can read this
machine, reach the network, and leave processes behind on purpose. Use it only for code that you
trust, on machines whose kernel refuses namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import stat
import sys
import tempfile
import termios
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import CommandResult, Patch, SandboxSpec, Tier, close_on_failure
from etude.sandbox import tree
from etude.sandbox.diff import unified_diff
from etude.sandbox.files import inside, inside_directory, to_bytes
from etude.sandbox.limits import (
    OUTPUT_BYTES,
    PATCH_BYTES,
    READ_BYTES,
    REPORT_BYTES,
    TERMINAL_SIZE,
)
from etude.sandbox.mounts import Mount, search_path
from etude.sandbox.spec import check_env, check_spec, opening_tree
from etude.sandbox.streams import Streams
from etude.sandbox.tree import FILE, LINK, Entry, Tree

_COPY_BYTES = 1 << 30
_COPY_FILES = 100_000
"""The largest working copy that is opened, forked or compared."""
_LOOKS = 500
"""Number of checks that killed processes are gone."""
_SHIM = """
import ctypes, fcntl, os, signal, sys, termios
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its host
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):
    signal.signal(number, signal.SIG_DFL)  # a host in the background ignores them
if sys.argv[2] == "pty":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
try:
    os.execvp(sys.argv[3], sys.argv[3:])
except OSError as e:
    print(f"{sys.argv[3]}: {e.strerror}", file=sys.stderr, flush=True)
os._exit(127)
"""
"""Program that a background process runs first: Python 3.11 cannot do this between fork and
exec."""


class ProcessSandboxPool:
    """A `core.sandbox.SandboxPool`."""

    tier: Tier = "process"

    def __init__(self, mounts: Sequence[Mount] = ()) -> None:
        for each in mounts:
            if each.source != each.target:
                raise EtudeError(
                    f"process sandboxes cannot show directories at another path: remove "
                    f":{each.target} from sandbox.mounts"
                )
        self._sandboxes: set[ProcessSandbox] = set()
        self._programs = search_path(mounts)

    def check(self, spec: SandboxSpec) -> None:
        check_spec(spec, backend="process", gives={"repository"})

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[ProcessSandbox]:
        self.check(spec)
        before = await opening_tree(spec, max_bytes=_COPY_BYTES, max_entries=_COPY_FILES)
        sandbox = ProcessSandbox(self._sandboxes, spec.env, before, self._programs)
        try:
            sandbox.fill(before)
            yield sandbox
        finally:
            await sandbox.close()

    def owing(self) -> dict[str, float]:
        """Nothing: there is no process between us and the commands."""
        return {}

    async def close(self) -> None:
        for sandbox in list(self._sandboxes):
            await sandbox.close()


class ProcessSandbox:
    """A `core.sandbox.Sandbox` in a temporary directory."""

    def __init__(
        self,
        opened: set[ProcessSandbox],
        env: Mapping[str, str],
        before: Tree,
        programs: Sequence[str] = (),
        root: Path | None = None,
    ) -> None:
        """`opened`: the set that contains it while it is open. `before`: the tree that the working
        copy is compared with. `programs`: directories that are searched before all others. `root`:
        the working copy; None: a new directory."""
        self._root = root or Path(tempfile.mkdtemp(prefix="etude-")).resolve()
        self._opened = opened
        self._opened.add(self)
        self._env = env
        self._before = before
        self._programs = programs
        self._processes: set[OrdinaryProcess] = set()
        self._closed = False

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: str | bytes = "",
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        report: bool = False,
    ) -> CommandResult:
        environment, directory = self._environment(env), self._directory(cwd)
        with (
            tempfile.TemporaryFile() as source,
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as reported,
        ):
            source.write(to_bytes(stdin))
            source.seek(0)
            if report:
                environment["ETUDE_REPORT"] = f"/dev/fd/{reported.fileno()}"
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._launched(argv),
                    cwd=directory,
                    env=environment,
                    stdin=source,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=[reported.fileno()] if report else [],
                )
            except OSError as e:
                return CommandResult(127, f"{argv[0]}: {e.strerror}\n")
            try:
                async with asyncio.timeout(timeout_s):
                    code: int | None = await process.wait()
            except TimeoutError:
                code = None
            finally:
                _kill(process.pid)
                await process.wait()
            told = _last(output, OUTPUT_BYTES).decode(errors="replace")
            return CommandResult(code, told, _last(reported, REPORT_BYTES))

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        pty: bool = False,
    ) -> OrdinaryProcess:
        if self._closed:
            raise RolloutFailure("sandbox: it is closed")
        environment, directory = self._environment(env), self._directory(cwd)
        if pty:
            environment = {"TERM": "xterm", **environment}
            ours, source = os.openpty()
            fcntl.ioctl(source, termios.TIOCSWINSZ, TERMINAL_SIZE)
            output = os.dup(source)
            theirs = (ours, os.dup(ours))
        else:
            source, into = os.pipe()
            out_of, output = os.pipe()
            theirs = (out_of, into)
        streams = Streams(*theirs, terminal=pty)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._launched_beside(argv, pty),
                cwd=directory,
                env=environment,
                stdin=source,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except BaseException:
            streams.close()
            raise
        finally:
            os.close(source)
            os.close(output)
        started = OrdinaryProcess(process, streams, self._processes.discard)
        self._processes.add(started)
        return started

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        check_env(env or {})
        path = ":".join([*self._programs, os.defpath])
        plain = {"PATH": path, "HOME": str(self._root), "LANG": "C.UTF-8"}
        if self._programs:
            plain["PYTHONDONTWRITEBYTECODE"] = "1"
        return {**plain, **self._env, **(env or {})}

    def _launched(self, argv: Sequence[str]) -> list[str]:
        """The command line that is executed for this one."""
        return self._with_python(argv)

    def _launched_beside(self, argv: Sequence[str], pty: bool) -> list[str]:
        """The command line for a process in the background."""
        shim = [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), "pty" if pty else ""]
        return [*shim, *self._with_python(argv)]

    def _with_python(self, argv: Sequence[str]) -> list[str]:
        """Replace `python` by our own, unless a mount may have one."""
        ours = argv[0] in ("python", "python3") and not self._programs
        return [*([sys.executable, "-s", "-B"] if ours else [argv[0]]), *argv[1:]]

    async def read(self, path: str) -> str:
        return (await self.read_bytes(path)).decode()

    async def read_bytes(self, path: str) -> bytes:
        try:
            descriptor = os.open(self._inside(inside(path)), os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as e:
            raise FileNotFoundError(path) from e
        except OSError as e:
            raise ValueError(f"{path} cannot be read: {e.strerror}") from e
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ValueError(f"{path} is not a plain file")
        with open(descriptor, "rb") as file:
            data = file.read(READ_BYTES + 1)
        if len(data) > READ_BYTES:
            raise ValueError(f"{path} is larger than {READ_BYTES} bytes")
        return data

    async def write(self, path: str, content: str | bytes) -> None:
        self.fill({inside(path): Entry(FILE, to_bytes(content))})

    def fill(self, files: Tree) -> None:
        for path, (mode, content) in files.items():
            assert content is not None
            try:
                if mode == LINK:
                    tree.make_parents(str(self._root), path)
                    os.symlink(content, os.fsencode(self._root / path))
                    continue
                target = self._inside(path)
                tree.make_parents(str(self._root), str(target.relative_to(self._root)))
                _write(target, content)
                if mode != FILE:
                    target.chmod(stat.S_IMODE(mode))
            except OSError as e:
                raise ValueError(f"{path} cannot be written: {e.strerror}") from e

    def _inside(self, path: str) -> Path:
        try:
            target = (self._root / path).resolve()
        except (OSError, RuntimeError) as e:  # links in a circle
            raise ValueError(f"{path} cannot be read: {e}") from e
        if not target.is_relative_to(self._root):
            raise ValueError(f"{path} leaves the working copy")
        return target

    def _directory(self, path: str) -> Path:
        directory = self._inside(inside_directory(path))
        if not directory.is_dir():
            raise ValueError(f"{path} is not a directory of the working copy")
        return directory

    def _open(self, path: str, flags: int) -> int:
        return os.open(self._root / path, flags)

    async def diff(self) -> str:
        return await asyncio.to_thread(self._diff)

    def _diff(self) -> str:
        changed = tree.changes(
            self._open, tree.known(self._before), file_bytes=READ_BYTES, max_entries=_COPY_FILES
        )
        return unified_diff(self._before, changed)

    async def patch(
        self, *, only: Collection[str] = ("*",), without: Collection[str] = ()
    ) -> Patch:
        await self._kill_all()
        return await asyncio.to_thread(
            tree.patch,
            self._open,
            tree.known(self._before),
            max_bytes=PATCH_BYTES,
            max_entries=_COPY_FILES,
            only=only,
            without=without,
        )

    async def apply(self, patch: Patch) -> None:
        plain = {inside(path): entry for path, entry in patch.items()}
        await asyncio.to_thread(tree.apply, str(self._root), plain)

    async def fork(self) -> ProcessSandbox:
        forked = ProcessSandbox(self._opened, self._env, self._before, self._programs)
        async with close_on_failure(forked):
            await asyncio.to_thread(self._copy_to, str(forked._root))
        return forked

    def _copy_to(self, root: str) -> None:
        source, to = os.pipe()
        with ThreadPoolExecutor(1) as beside, open(to, "wb") as into:
            received = beside.submit(_receive, source, root)
            limits = {"max_bytes": _COPY_BYTES, "max_entries": _COPY_FILES}
            try:
                tree.send(self._open, into.fileno(), **limits)
            finally:
                into.close()
                received.exception()
        received.result()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._opened.discard(self)
        await self._kill_all()
        # not `shutil.rmtree`, which fails on a thousand nested directories
        removing = await asyncio.create_subprocess_exec("rm", "-rf", "--", str(self._root))
        await removing.wait()

    async def _kill_all(self) -> None:
        for process in list(self._processes):
            process.close()
            await process.kill()
        for _ in range(_LOOKS):
            if not (strays := _strays(self._root)):
                break
            for pid in strays:
                _kill(pid)
            await asyncio.sleep(0.01)


def _write(target: Path, content: bytes) -> None:
    # without O_NONBLOCK a named pipe would block this process for ever
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    descriptor = os.open(target, flags, 0o644)
    with open(descriptor, "wb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file")
        file.write(content)


def _last(file: IO[bytes], limit: int) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
    return file.read()


def _receive(source: int, root: str) -> None:
    with open(source, "rb") as stream:
        tree.receive(stream.fileno(), root)


class OrdinaryProcess:
    """A `core.sandbox.Process`, with its descendants as far as they can be found."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: Streams,
        forget: Callable[[OrdinaryProcess], None],
    ) -> None:
        self._process = process
        self._streams = streams
        self._forget = forget
        self._ended = asyncio.ensure_future(self._end())
        self._closed = False

    async def _end(self) -> int:
        code = await self._process.wait()
        _kill(self._process.pid)  # processes that it leaves behind in its group
        self._streams.finish()
        self._forget(self)
        return code

    async def read(self) -> bytes:
        while (data := self._streams.take()) is None:
            await self._streams.readable()
        self._check()
        return data

    async def write(self, data: bytes) -> None:
        self._check()
        await self._streams.write(data)

    async def wait(self) -> int:
        code = await asyncio.shield(self._ended)
        self._check()
        return code

    async def kill(self) -> None:
        if not self._ended.done():
            for pid in [self._process.pid, *_below(self._process.pid)]:
                _kill(pid)
            await asyncio.shield(self._ended)

    def close(self) -> None:
        """Make calls fail from now on; the process ends with its sandbox."""
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise RolloutFailure("sandbox: it is closed")


def _kill(pid: int) -> None:
    """Kill a process, and its group if it leads one."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    """The descendants of this process by living parents."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text(errors="replace").rpartition(")")[2].split()
            parents[int(status.parent.name)] = int(fields[1])
    found, new = set[int](), {pid}
    while new := {child for child, parent in parents.items() if parent in new} - found:
        found |= new
    return list(found)


def _strays(root: Path) -> list[int]:
    """The processes that have this working copy as their home, or their working directory in it."""
    home = os.fsencode(f"HOME={root}")
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            at_home = home in (entry / "environ").read_bytes().split(b"\0")
            if at_home or Path(os.readlink(entry / "cwd")).is_relative_to(root):
                found.append(int(entry.name))
    return found
