"""Sandboxes: what a task asks for, and what an agent and a grader can do in one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Literal, Protocol, get_args

Tier = Literal["process", "namespaces", "gvisor", "vm"]
"""How much stands between what runs in a sandbox and the machine: nothing, namespaces of its
kernel, a kernel in a program, or a kernel of its own."""
TIERS: tuple[Tier, ...] = get_args(Tier)
"""From the weakest to the strongest."""
VENVS = "/opt/venvs"
"""Where sandboxes show the virtual environments of a folder of tasks."""
REMEMBERED_SPECS = 128
"""Digests of so many specs are remembered: each attempt at a task asks for those of the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one sandbox may use. None: as much as its backend gives by default."""

    cpus: float | None = None
    memory_bytes: int | None = None
    """Of each process; of all together as well, where the machine can hold that."""
    disk_bytes: int | None = None
    """Of the working copy; temporary files may take as much again."""
    processes: int | None = None
    """At the same time, in all commands together."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if (value := getattr(self, each.name)) is not None and value <= 0:
                raise ValueError(f"limits.{each.name} is {value}: it must be above 0")

    def over(self, others: Limits) -> Limits:
        """These, and the others' where nothing is said."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(others, **{name: value for name, value in told.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A git repository at one commit, checked out as the working copy, without its history."""

    url: str
    """A path or a file:// URL."""
    commit: str
    """Its full id: names move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A server beside the agent, such as a database, reached by its name within the sandbox. It is
    up before the agent is, in a fork as well, which starts its own."""

    name: str
    """Letters, digits and hyphens."""
    argv: tuple[str, ...]
    port: int
    image: str = ""
    """By name and digest; empty: a program of the sandbox's own."""
    env: Mapping[str, str] = field(default_factory=dict)
    check: tuple[str, ...] = ()
    """A command that ends with status 0 once the service is up; none: that its port answers."""
    ready_s: float = 30.0
    """So long it may take until it is up."""

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Za-z0-9-]+", self.name):
            raise ValueError(f"service {self.name!r}: a name has letters, digits and hyphens only")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """The machine that a task is done in. A backend that cannot give all of it refuses, and says
    which part; it never gives something weaker."""

    image: str = ""
    """By name and digest; empty: the Python of the host, read-only."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Path -> content, put into the working copy last, over the repository."""
    repository: Repository | None = None
    workdir: str = ""
    """Another name that commands find the working copy by, such as /app; empty: /work alone."""
    services: tuple[Service, ...] = ()
    network: tuple[str, ...] = ()
    """Hosts that it may reach; none by default."""
    limits: Limits = Limits()
    user: str = ""
    """Whose rights commands have; empty: an ordinary user of the backend's choice."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Beside PATH, HOME and LANG; nothing of the host's own gets in."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command. `exit_code` is None if it was killed for running past its time."""

    exit_code: int | None
    output: str
    """Of stdout and stderr together; bytes that are not UTF-8 appear as replacement characters."""
    report: bytes = b""
    """What was written to the report, if there was to be one."""


Patch = Mapping[str, tuple[int, bytes] | None]
"""What was changed in a working copy: path -> mode, as git writes it (0o100644, 0o100755 and for
links 0o120000), and content, which is where a link leads; None: it was deleted."""


def spec_digest(spec: SandboxSpec) -> str:
    """SHA-256 of a spec: equal ones have equal digests."""
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
    """SHA-256 of a patch: equal patches, and they alone, have equal digests."""
    digest = hashlib.sha256()
    for path, entry in sorted(patch.items()):
        mode, content = entry or (0, b"")
        digest.update(repr((path, mode, len(content))).encode())
        digest.update(content)
    return digest.hexdigest()


class Process(Protocol):
    """A process in a sandbox. It lives until it ends, is killed, or its sandbox is closed. Whoever
    waits for it gets RolloutFailure when the sandbox is closed, dead or silent."""

    async def read(self) -> bytes:
        """The output that came since the last call, as soon as there is any; empty at its end. What
        nobody reads holds the process up."""

    async def write(self, data: bytes) -> None:
        """To its standard input. Empty data ends that; what nothing reads any more is dropped."""

    async def wait(self) -> int:
        """Its exit code, once it has ended; minus the signal, if one ended it."""

    async def kill(self) -> None:
        """Kills it and all processes that it started. May be called twice."""


class Sandbox(Protocol):
    """A working copy in a machine of its own, with no network unless its spec says so. Everything
    the agent does happens in here."""

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
        """Runs a command to its end. Processes that it leaves behind in the background are killed
        with it; `start` is for those that are to live on. ValueError for a `cwd` that is not a
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
        """Starts a command that goes on beside the next ones. With `pty` it has a terminal."""

    async def read(self, path: str) -> str:
        """Raises FileNotFoundError, or ValueError for a path that leaves the working copy or a file
        that is not text."""

    async def read_bytes(self, path: str) -> bytes: ...

    async def write(self, path: str, content: str | bytes) -> None: ...

    async def diff(self) -> str:
        """What changed in the working copy since it was opened, as a unified diff. In a fork: since
        the sandbox was opened that it comes from."""

    async def patch(
        self, *, only: Collection[str] = ("*",), without: Collection[str] = ()
    ) -> Patch:
        """Kills every process in it and gives all that changed, as `diff` tells it, but whole, of
        the paths that match a pattern of `only` and none of `without` (a star matches slashes).
        ValueError if that is too much. Directories and special files are no part of it."""

    async def apply(self, patch: Patch) -> None:
        """Changes the working copy so. Links are replaced, never followed."""

    async def fork(self) -> Sandbox:
        """Another sandbox whose working copy starts as this one's is now. Processes stay here, and
        go on there as well where a backend can copy them."""

    async def close(self) -> None:
        """Kills every process in it and removes its files. May be called twice."""


class SandboxPool(Protocol):
    """A pool that sandboxes are opened from."""

    @property
    def tier(self) -> Tier:
        """What its sandboxes hold on this machine."""

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh sandbox as the spec says; closed on every way out."""

    def check(self, spec: SandboxSpec) -> None:
        """Raises EtudeError for a spec that `open` would refuse, whatever the machine is at."""

    def owing(self) -> dict[str, float]:
        """The processes behind the sandboxes that owe an answer, and for how many seconds each."""

    async def close(self) -> None: ...


@asynccontextmanager
async def close_on_failure(sandbox: Sandbox) -> AsyncIterator[None]:
    """Close a sandbox that is being set up, unless the block comes to its end."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(sandbox.close)
        yield
        stack.pop_all()
