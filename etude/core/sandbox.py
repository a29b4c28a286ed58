"""Sandboxes: what a task requires of one, and what an agent and a grader can do in it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Literal, Protocol, get_args

Tier = Literal["process", "namespaces", "gvisor", "vm"]
"""The isolation of a sandbox from the machine: none, namespaces of its kernel, a kernel in a
program, or a virtual machine with its own kernel."""
TIERS: tuple[Tier, ...] = get_args(Tier)
"""All tiers, from the weakest to the strongest."""
VENVS = "/opt/venvs"
"""The directory where sandboxes show the virtual environments of a folder of tasks."""
REMEMBERED_SPECS = 128
"""The number of specs whose digests are cached: all attempts at a task need those of the same
spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The resources that one sandbox may use. None: the backend's default."""

    cpus: float | None = None
    memory_bytes: int | None = None
    """Memory of each process; also of all together, where the machine can enforce that."""
    disk_bytes: int | None = None
    """Size of the working copy; temporary files may take as much again."""
    processes: int | None = None
    """Processes at the same time, of all commands together."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if (value := getattr(self, each.name)) is not None and value <= 0:
                raise ValueError(f"limits.{each.name} is {value}: it must be above 0")

    def over(self, others: Limits) -> Limits:
        """These limits, with the others' values where none is set."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(others, **{name: value for name, value in told.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A git repository at one commit, checked out as the working copy, without its history."""

    url: str
    """A path or a file:// URL."""
    commit: str
    """The full id, because names move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A server for the agent to use, such as a database, reached by its name within the sandbox. It
    is up before the agent starts; a fork starts its own."""

    name: str
    """Letters, digits and hyphens."""
    argv: tuple[str, ...]
    port: int
    image: str = ""
    """Image by name and digest; empty: a program of the sandbox itself."""
    env: Mapping[str, str] = field(default_factory=dict)
    check: tuple[str, ...] = ()
    """A command that exits with status 0 once the service is up; none: the service is up when its
    port answers."""
    ready_s: float = 30.0
    """Time that the service may take to start."""

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Za-z0-9-]+", self.name):
            raise ValueError(
                f"service {self.name!r}: a name can have only letters, digits and hyphens"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """The machine that a task is done in. A backend that cannot provide all of it refuses, and
    names the missing part; it never provides something weaker."""

    image: str = ""
    """Image by name and digest; empty: the Python of the host, read-only."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Path -> content, written into the working copy last, over the repository."""
    repository: Repository | None = None
    workdir: str = ""
    """Another path at which commands find the working copy, such as /app; empty: /work alone."""
    services: tuple[Service, ...] = ()
    network: tuple[str, ...] = ()
    """Hosts that it may reach; none by default."""
    limits: Limits = Limits()
    user: str = ""
    """The user whose rights commands have; empty: an ordinary user of the backend's choice."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to PATH, HOME and LANG; none of the host's own variables are
    visible."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command. `exit_code` is None if the command was killed at its time limit."""

    exit_code: int | None
    output: str
    """Output of stdout and stderr together; bytes that are not UTF-8 appear as replacement
    characters."""
    report: bytes = b""
    """The data written to the report, if one was requested."""


Patch = Mapping[str, tuple[int, bytes] | None]
"""The changes in a working copy: path -> mode, as git writes it (0o100644, 0o100755, and 0o120000
for links), and content, for a link its target; None: the file was deleted."""


def spec_digest(spec: SandboxSpec) -> str:
    """SHA-256 of a spec: equal specs have equal digests."""
    rest = replace(spec, files={}, env=dict(sorted(spec.env.items())))
    return _spec_digest(tuple(sorted(spec.files.items())), repr(rest))


@lru_cache(REMEMBERED_SPECS)
def _spec_digest(files: tuple[tuple[str, str | bytes], ...], rest: str) -> str:
    digest = hashlib.sha256()
    for path, content in files:
        data = content.encode() if isinstance(content, str) else content
        digest.update(repr((path, len(data))).encode())
        digest.update(data)
    digest.update(rest.encode())
    return digest.hexdigest()


def patch_digest(patch: Patch) -> str:
    """SHA-256 of a patch: equal patches, and only they, have equal digests."""
    digest = hashlib.sha256()
    for path, entry in sorted(patch.items()):
        mode, content = entry or (0, b"")
        digest.update(repr((path, mode, len(content))).encode())
        digest.update(content)
    return digest.hexdigest()


class Process(Protocol):
    """A process in a sandbox. It lives until it ends, is killed, or its sandbox is closed. Waiting
    for it raises RolloutFailure when the sandbox is closed, dead or silent."""

    async def read(self) -> bytes:
        """Return the output since the last call, as soon as there is any; empty at its end. Unread
        output blocks the process."""

    async def write(self, data: bytes) -> None:
        """Write to its standard input. Empty data closes that; data that the process no longer
        reads is dropped."""

    async def wait(self) -> int:
        """Return its exit code, once it has ended; the negative signal number, if a signal ended
        it."""

    async def kill(self) -> None:
        """Kill it and all processes that it started. May be called twice."""


class Sandbox(Protocol):
    """A working copy in a machine of its own, with no network unless its spec allows it. Everything
    the agent does happens here."""

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
        """Run a command to its end. Processes that it leaves behind in the background are killed
        with it; use `start` for those that should live on. ValueError for a `cwd` that is not a
        directory of the working copy. With `report` the command finds in ETUDE_REPORT the path of a
        pipe that nothing else writes to."""

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        pty: bool = False,
    ) -> Process:
        """Start a command that runs alongside the next ones. With `pty` it has a terminal."""

    async def read(self, path: str) -> str:
        """Return the text of a file. FileNotFoundError; ValueError for a path that leaves the
        working copy or a file that is not text."""

    async def read_bytes(self, path: str) -> bytes: ...

    async def write(self, path: str, content: str | bytes) -> None: ...

    async def diff(self) -> str:
        """Return the changes in the working copy since it was opened, as a unified diff. In a fork:
        since the original sandbox was opened."""

    async def patch(
        self, *, only: Collection[str] = ("*",), without: Collection[str] = ()
    ) -> Patch:
        """Kill every process in it and return all changes that `diff` shows, in full, for the paths
        that match a pattern of `only` and none of `without` (a star matches slashes). ValueError if
        that is too much data. Directories and special files are not included."""

    async def apply(self, patch: Patch) -> None:
        """Apply a patch to the working copy. Links are replaced, never followed."""

    async def fork(self) -> Sandbox:
        """Return another sandbox whose working copy starts in this one's current state. Processes
        stay here, and continue there as well if the backend can copy them."""

    async def close(self) -> None:
        """Kill every process in it and remove its files. May be called twice."""


class SandboxPool(Protocol):
    """A pool to open sandboxes from."""

    @property
    def tier(self) -> Tier:
        """The isolation that its sandboxes have on this machine."""

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """Open a fresh sandbox that follows the spec; it is closed on every way out."""

    def check(self, spec: SandboxSpec) -> None:
        """Raise EtudeError for a spec that `open` would refuse, regardless of the machine's current
        load."""

    def owing(self) -> dict[str, float]:
        """The processes behind the sandboxes that owe an answer, and for how many seconds each."""

    async def close(self) -> None: ...


@asynccontextmanager
async def close_on_failure(sandbox: Sandbox) -> AsyncIterator[None]:
    """Close a sandbox that is being set up, unless the block completes."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(sandbox.close)
        yield
        stack.pop_all()
