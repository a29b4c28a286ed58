"""Sandboxes in containers, run by the command of an engine: podman, or docker, which takes the same
arguments.

A container holds one sandbox in namespaces, and the process that serves it (`nested`) over its
standard input and output. The engine provides what an ordinary user does not have everywhere:
limits on memory and processors, and images. It leaves the container only the right to make
namespaces: no network, no capabilities, nothing writable but memory, and a user ID that no other
container has.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import re
import secrets
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import NamedTuple

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import Limits, SandboxSpec, Tier
from etude.sandbox import kernel
from etude.sandbox.bundle import (
    SOURCE,
    base_python,
    copy_program,
    system_directories,
    system_links,
)
from etude.sandbox.called import CalledSandbox
from etude.sandbox.guest import GUEST_ID
from etude.sandbox.limits import MAX_PROCESSES
from etude.sandbox.lines import Lines
from etude.sandbox.link import REPLY_TIMEOUT_S
from etude.sandbox.machines import Machines
from etude.sandbox.mounts import Mount, check_walled
from etude.sandbox.nested_caller import (
    NestedCaller,
    limits_within,
    machine_bytes,
    machine_name,
    open_nested,
    python_arguments,
)
from etude.sandbox.owners import is_abandoned, owner_mark
from etude.sandbox.spec import check_machine
from etude.sandbox.zygote import OWN_IDS

CLIENTS = ("podman", "docker")
"""Engines in order of preference: the first that is installed and answers is used."""
INSTALL = "apt install podman"
_LABEL = "etude.owner"
_ROOT = "localhost/etude-root"
_WALLS = (
    "--network=none",
    "--read-only",
    "--tmpfs=/tmp:rw,nosuid,nodev,size=1m,mode=1777",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
    # Low enough for an engine that is itself in a container: it cannot raise its own limits.
    "--ulimit=nofile=4096:4096",
    "--ulimit=nproc=4096:4096",
    "--hostname=localhost",
    "--log-driver=none",  # our pipe gets the output, and nothing else
)
_NAMESPACES = tuple(
    f"--security-opt={each}"
    for each in (
        "seccomp=unconfined",
        "apparmor=unconfined",
        "label=disable",
        "systempaths=unconfined",
    )
)
"""Settings that let a process in a container make namespaces. Our own filter, which refuses more
than the engine's, is installed before every command instead."""
_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs")
_ORDINARY = ('"rootless": true', "name=rootless", "name=userns")
"""Phrases in the `info` of podman and docker that mean that their root is not the machine's
root."""
_OWN_PROCESSES = 32
_LEAST_PYTHON = (3, 11)


class _Image(NamedTuple):
    """The image of a container, its Python and its variables."""

    name: str
    python: str
    env: dict[str, str]


class ContainerSandboxPool:
    """A `core.sandbox.SandboxPool`."""

    def __init__(
        self,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
        mounts: Sequence[Mount] = (),
        clients: Sequence[str] = CLIENTS,
    ) -> None:
        """Raises EtudeError if no engine answers, or if its containers cannot hold a sandbox."""
        self.client, info = find_engine(clients)
        check_walled(mounts)
        _sweep(self.client)
        self.reply_timeout_s = reply_timeout_s
        self._mounts = mounts
        self.machines: Machines[NestedCaller, None] = Machines("container")
        self._users = _users(info)
        self._images: dict[str, _Image] = {}
        try:
            copy_program(self.machines.home / "program")
            self._root = _Image(_import_root(self.client), base_python(), {})
            self._bounded = self._holds_bounds()
        except EtudeError:
            shutil.rmtree(self.machines.home, ignore_errors=True)
            raise

    def _holds_bounds(self) -> bool:
        """True if containers are held to limits on memory and processors together. An engine may
        accept such a limit and ignore it, so this is checked from inside a container."""
        self._bounded = True
        with contextlib.suppress(EtudeError):
            if self._probe() <= machine_bytes(Limits()):
                return True
        self._bounded = False
        self._probe()  # the engine accepts no limits, or there is another reason
        return False

    def _probe(self) -> float:
        """Open a sandbox in a container that ends at once. Return the memory that it may hold."""
        argv = self.argv(machine_name(), SandboxSpec(), probe=True)
        try:
            tried = subprocess.run(argv, input=b"", capture_output=True, timeout=REPLY_TIMEOUT_S)
        except subprocess.TimeoutExpired as e:
            raise EtudeError(
                f"{self.client}: a test container did not end within {e.timeout:.0f} s"
            ) from e
        if not tried.stdout:  # the exit status may be lost on its way from a remote engine
            said = tried.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
            raise EtudeError(f"{self.client}: a container cannot run sandboxes here: {said[-1]}")
        return float(json.loads(tried.stdout)["memory_bytes"] or math.inf)

    @property
    def tier(self) -> Tier:
        """A container consists of namespaces, too: two walls of the same kind."""
        return "namespaces" if kernel.can_filter_calls() else "process"

    def check(self, spec: SandboxSpec) -> None:
        limits = ("memory_bytes", "disk_bytes", "processes", *(("cpus",) if self._bounded else ()))
        check_machine(spec, backend="container", limits=limits, gives={"image"})
        self._image(spec.image)

    def _image(self, name: str) -> _Image:
        """An image that the engine has; nothing is fetched. EtudeError if it cannot hold a
        sandbox."""
        if not name:
            return self._root
        if name not in self._images:
            look = [self.client, "image", "inspect", "--format", "{{json .Config.Env}}", name]
            code, said = _ran(look)
            if code != 0:
                raise EtudeError(
                    f"{self.client} has no image {name!r}: run `{self.client} pull {name}` or "
                    f"`{self.client} build`, and use the name that `{self.client} images` shows"
                )
            version = f"import sys; sys.exit(sys.version_info < {_LEAST_PYTHON})"
            plain = [self.client, "run", "--rm", *_WALLS, "--entrypoint=python3"]
            if (tried := _ran([*plain, name, "-c", version]))[0] != 0:
                raise EtudeError(
                    f"image {name!r} has no Python 3.11 or newer, which sandboxes need: "
                    f"{tried[1] or 'it has an older one'}"
                )
            env = dict(each.partition("=")[::2] for each in json.loads(said) or [])
            self._images[name] = _Image(name, "python3", env)
        return self._images[name]

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[CalledSandbox]:
        self.check(spec)
        return open_nested(self, spec)

    def machine(self, spec: SandboxSpec) -> NestedCaller:
        return _Container(self, spec)

    def inner(self, spec: SandboxSpec) -> SandboxSpec:
        limits = limits_within(spec.limits) if self._bounded else spec.limits
        env = {**self._image(spec.image).env, **spec.env}
        return replace(spec, image="", limits=limits, env=env)

    def argv(self, name: str, spec: SandboxSpec, *, probe: bool = False) -> list[str]:
        """Command line of a container that runs until its input ends."""
        image, user = self._image(spec.image), next(self._users)
        shown = [Mount(each, each) for each in (*system_directories(), *_ETC)]
        binds = [
            Mount(str(self.machines.home / "program"), SOURCE),
            *([] if spec.image else shown),
            *self._mounts,
        ]
        places = [(each.target, each.target) for each in self._mounts]
        return [
            *(self.client, "run", "--rm", "--interactive", "--pull=never", f"--name={name}"),
            *(f"--label={_LABEL}={owner_mark()}", f"--user={user}:{user}"),
            *_WALLS,
            *_NAMESPACES,
            *(_bounds(spec.limits) if self._bounded else ()),
            *(word for each in binds if os.path.exists(each.source) for word in _bind(each)),
            *(f"--entrypoint={image.python}", image.name),
            *python_arguments(SOURCE, mounts=places, image=bool(spec.image), probe=probe),
        ]

    def owing(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        await self.machines.close()


class _Container(NestedCaller):
    """One container, and the process of the client that is attached to it."""

    def __init__(self, pool: ContainerSandboxPool, spec: SandboxSpec) -> None:
        super().__init__(pool, spec)
        self._client = pool.client
        self._name = machine_name()
        self._argv = pool.argv(self._name, spec)
        self._errors = pool.machines.place("errors")
        self._process: asyncio.subprocess.Process | None = None

    async def connect(self) -> Lines:
        with self._errors.open("wb") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                limit=1 << 30,
                start_new_session=True,
                cwd=self._errors.parent,  # where podman's monitor leaves a file
            )
        assert self._process.stdout is not None and self._process.stdin is not None
        return Lines(self._process.stdout, self._process.stdin)

    async def start(self) -> None:
        try:
            await super().start()
        except RolloutFailure as e:
            said = self._errors.read_text(errors="replace").strip()
            raise RolloutFailure(f"{e}; {self._client} said: {said[-500:] or 'nothing'}") from e

    async def end(self) -> None:
        if self._process is not None:
            try:
                async with asyncio.timeout(REPLY_TIMEOUT_S / 6):
                    await self._process.wait()
            except TimeoutError:
                await asyncio.to_thread(_remove, self._client, [self._name])
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        self._errors.unlink(missing_ok=True)


def find_engine(names: Sequence[str] = CLIENTS) -> tuple[str, str]:
    """The command of an engine that answers, and its `info`. Raises EtudeError with the answer of
    each engine that refused."""
    refused = []
    for name in names:
        if shutil.which(name) is None:
            continue
        code, said = _ran([name, "info", "--format", "{{json .}}"])
        if code == 0:
            return name, said
        refused.append(f"{name}: {said.splitlines()[-1] if said else 'no output'}")
    if refused:
        raise EtudeError(
            f"isolation container needs a running container engine; {'; '.join(refused)}"
        )
    raise EtudeError(
        f"isolation container needs {' or '.join(names)}, which is not installed: {INSTALL}"
    )


def _import_root(client: str) -> str:
    """The image of sandboxes that name none: directories on which the programs of this machine are
    mounted. It takes no space, is always the same, and is kept."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, mode in (("tmp", 0o1777), ("work", 0o755)):
            directory = tarfile.TarInfo(name)
            directory.type = tarfile.DIRTYPE
            directory.mode = mode
            archive.addfile(directory)
        for name, target in system_links().items():
            link = tarfile.TarInfo(name)
            link.type = tarfile.SYMTYPE
            link.linkname = target
            archive.addfile(link)
    name = f"{_ROOT}:{hashlib.sha256(data.getvalue()).hexdigest()[:12]}"
    if _ran([client, "image", "inspect", name])[0] != 0:
        code, said = _ran([client, "import", "-", name], data.getvalue())
        if code != 0:
            raise EtudeError(f"{client} could not import the image: {said}")
    return name


def _users(info: str) -> Iterator[int]:
    """A user ID for each container that no other process of this machine has, since the kernel
    counts pipes, watches and more by user. A rootless engine has too few of them."""
    if any(word in info for word in _ORDINARY):
        return itertools.repeat(GUEST_ID)
    start = secrets.randbelow(len(OWN_IDS))
    return (OWN_IDS[(start + number) % len(OWN_IDS)] for number in itertools.count())


def _bounds(limits: Limits) -> list[str]:
    memory = machine_bytes(limits)
    processes = (limits.processes or MAX_PROCESSES) + _OWN_PROCESSES
    bounds = [f"--memory={memory}", f"--memory-swap={memory}", f"--pids-limit={processes}"]
    return bounds + ([f"--cpus={limits.cpus:.3f}"] if limits.cpus is not None else [])


def _bind(mount: Mount) -> list[str]:
    return ["--mount", f"type=bind,src={mount.source},dst={mount.target},ro"]


def _ran(argv: Sequence[str], data: bytes = b"") -> tuple[int, str]:
    """The exit status, and stdout on success or stderr otherwise."""
    try:
        ran = subprocess.run(argv, input=data, capture_output=True, timeout=REPLY_TIMEOUT_S)
    except subprocess.TimeoutExpired as e:
        return 1, f"{argv[0]} did not answer within {e.timeout:.0f} s"
    said = ran.stderr if ran.returncode else ran.stdout
    return ran.returncode, said.decode(errors="replace").strip()


def _remove(client: str, names: Sequence[str]) -> None:
    _ran([client, "unpause", *names])  # a paused container cannot end
    _ran([client, "kill", *names])  # at once; `rm` alone sends SIGTERM first, and waits
    _ran([client, "rm", "--force", *names])


def _sweep(client: str) -> None:
    """Remove the paused containers of pools whose process was killed; all others have ended with
    their input."""
    shown = ["--format", "{{.ID}} {{.Labels}}"]
    _, said = _ran([client, "ps", "--all", f"--filter=label={_LABEL}", *shown])
    # engines print labels differently
    found = re.findall(rf"^(\w+) .*\b{re.escape(_LABEL)}[=:]([\w-]+)", said, re.MULTILINE)
    if left := [name for name, mark in found if is_abandoned(mark)]:
        _remove(client, left)
