"""One sandbox in namespaces: the host's side.

It answers over a socket that only this process holds (`link`; `guest` describes the lines).
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import math
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from etude.core.errors import RolloutFailure
from etude.core.sandbox import (
    CommandResult,
    Patch,
    Process,
    SandboxSpec,
    close_on_failure,
)
from etude.sandbox.diff import unified_diff
from etude.sandbox.egress import Egress, Hosts, Outside
from etude.sandbox.files import inside, inside_directory, to_bytes
from etude.sandbox.kept import Keeper, KeptProcess
from etude.sandbox.link import REPLY_TIMEOUT_S, HasDescriptor, Link, decoded, encoded
from etude.sandbox.services import start_services
from etude.sandbox.spec import check_env
from etude.sandbox.streams import Streams
from etude.sandbox.tree import FILE, Entry, Known, Tree, known


class Owner(Protocol):
    """The pool of a sandbox, as far as the sandbox needs it."""

    reply_timeout_s: float
    outside: Outside

    @property
    def zygote_pid(self) -> int: ...

    async def start(
        self, spec: SandboxSpec, before: Tree, like: NamespaceSandbox | None = None
    ) -> NamespaceSandbox: ...

    def forget(self, sandbox: NamespaceSandbox) -> None: ...

    def ended(self, sandbox: NamespaceSandbox) -> None: ...


class NamespaceSandbox:
    """A `core.sandbox.Sandbox`, by the socket of its first process."""

    def __init__(
        self,
        pool: Owner,
        link: Link,
        number: int,
        spec: SandboxSpec,
        before: Tree,
    ) -> None:
        """`before`: the tree that the working copy is compared with."""
        self._pool = pool
        self._link = link
        self.number = number
        self.zygote_pid = pool.zygote_pid
        self._spec = spec
        self._before = before
        self._known: dict[str, Known] | None = None
        self._processes: dict[int, Keeper] = {}
        self._services: list[asyncio.Task[None]] = []
        self._egress: Egress | None = None
        self._process_numbers = itertools.count(1)
        self.due = math.inf
        """The time at which the current request should have been answered."""
        self._late_s = 0.0
        self._turn = asyncio.Lock()  # a request that arrives during a command ends the command

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
        check_env(env or {})
        code, output, reported = await self._ask(
            timeout_s,
            op="run",
            argv=list(argv),
            stdin=_encode(stdin),
            timeout_s=timeout_s,
            cwd=inside_directory(cwd),
            env={**self._spec.env, **(env or {})},
            report=report,
        )
        return CommandResult(code, output, base64.b64decode(reported))

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        pty: bool = False,
    ) -> Process:
        check_env(env or {})
        variables = {**({"TERM": "xterm"} if pty else {}), **self._spec.env, **(env or {})}
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                await self._ask(
                    op="start",
                    descriptor=theirs,
                    argv=list(argv),
                    cwd=inside_directory(cwd),
                    env=variables,
                    pty=pty,
                )
            descriptors = socket.recv_fds(ours, 1, 2)[1]
        except BaseException:
            ours.close()
            raise
        return await self._keep(ours, descriptors)

    async def _keep(self, control: socket.socket, descriptors: list[int]) -> KeptProcess:
        output = descriptors[0]
        source = descriptors[1] if len(descriptors) > 1 else os.dup(output)
        streams = Streams(output, source, terminal=len(descriptors) == 1)
        number = next(self._process_numbers)

        def ended() -> None:
            streams.finish()
            self._processes.pop(number, None)

        keeper = self._processes[number] = Keeper(ended)
        # does not block for a connected socket
        await asyncio.get_running_loop().create_unix_connection(lambda: keeper, sock=control)
        return KeptProcess(keeper, streams, self._pool.reply_timeout_s, self._answered_late)

    def keepers_owing(self) -> dict[str, float]:
        return {
            f"sandbox {self.number} process {number}": owed_s
            for number, keeper in self._processes.items()
            if (owed_s := keeper.owed_s()) > 0.0
        }

    def _answered_late(self, seconds: float) -> None:
        self._late_s = max(self._late_s, seconds)

    async def read(self, path: str) -> str:
        return (await self.read_bytes(path)).decode()

    async def read_bytes(self, path: str) -> bytes:
        return base64.b64decode(await self._ask(op="read", path=inside(path)))

    async def write(self, path: str, content: str | bytes) -> None:
        await self.fill({inside(path): Entry(FILE, to_bytes(content))})

    async def fill(self, files: Tree) -> None:
        """Write files. Their contents are passed in memory: encoding them as JSON would cost
        several times as much as writing them."""
        contents = os.memfd_create("files")
        with open(contents, "wb") as packed:
            packed.writelines(entry.content or b"" for entry in files.values())
            packed.flush()
            told = [(path, each.mode, len(each.content or b"")) for path, each in files.items()]
            await self._ask(op="write", descriptor=packed, files=told)

    async def date(self, times: Mapping[str, int]) -> None:
        await self._ask(op="date", times=dict(times))

    async def serve(self) -> None:
        """Start the services, and open the way to the hosts of the task."""
        outside = Hosts.parse(self._spec.network)
        services = self._spec.services
        names = {host: outside.address(host) for host in outside.places}
        names |= {service.name: "127.0.0.1" for service in services}
        if names:
            await self._ask(op="name", hosts=names)
        if outside.places:
            await self._let_out(outside)
        if services:
            self._services = await start_services(self, services)

    async def _let_out(self, outside: Hosts) -> None:
        places = outside.listeners()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                where = [(address, port) for _, address, port in places]
                await self._ask(op="listen", descriptor=theirs, places=where)
            descriptors = socket.recv_fds(ours, 1, len(places))[1]
        self._egress = Egress(self.number, self._pool.outside)
        for (host, _, port), descriptor in zip(places, descriptors, strict=True):
            await self._egress.listen(host, port, socket.socket(fileno=descriptor))

    async def diff(self) -> str:
        before = await self._known_before()
        answer = await self._ask(op="changes", before=before)
        changed = {
            path: each and Entry(*each)
            for path, each in decoded(answer).items()
            if not self._is_history(path)
        }
        return await asyncio.to_thread(unified_diff, self._before, changed)

    async def patch(
        self, *, only: Collection[str] = ("*",), without: Collection[str] = ()
    ) -> Patch:
        self._close_processes()
        before = await self._known_before()
        answer = await self._ask(op="patch", before=before, only=[*only], without=[*without])
        return {
            path: each and (each[0], each[1] or b"")
            for path, each in decoded(answer).items()
            if not self._is_history(path)
        }

    async def _known_before(self) -> dict[str, Known]:
        if self._known is None:
            self._known = await asyncio.to_thread(known, self._before)
        return self._known

    def _is_history(self, path: str) -> bool:
        """True for files in .git, which are not part of a change, as in git itself."""
        return path.startswith(".git/") and ".git/HEAD" in self._before

    async def apply(self, patch: Patch) -> None:
        plain = {inside(path): entry for path, entry in patch.items()}
        await self._ask(op="apply", patch=encoded(plain))

    async def fork(self) -> NamespaceSandbox:
        sandbox = await self.branch(self._spec, self._before, always=False)
        async with close_on_failure(sandbox):
            await sandbox.serve()
        return sandbox

    async def branch(self, spec: SandboxSpec, before: Tree, *, always: bool) -> NamespaceSandbox:
        """Start another sandbox with this working copy, which the caller closes. The copy is shared
        if the kernel can and it is worthwhile or `always`; otherwise it is copied."""
        ours, theirs = socket.socketpair()
        freezing = asyncio.create_task(self._ask(op="freeze", descriptor=ours, always=always))
        try:
            sandbox = await self._pool.start(spec, before, like=self)
            async with close_on_failure(sandbox):
                # with another zygote, the user is another one, too
                if await freezing and sandbox.zygote_pid == self.zygote_pid:
                    await sandbox._ask(op="adopt", descriptor=theirs)
                else:
                    await self._copy_to(sandbox)
        finally:
            freezing.cancel()
            ours.close()
            theirs.close()
        return sandbox

    async def _copy_to(self, sandbox: NamespaceSandbox) -> None:
        ours, theirs = socket.socketpair()
        done = await asyncio.gather(
            self.send(ours), sandbox.receive(theirs), return_exceptions=True
        )
        failures = [each for each in done if isinstance(each, BaseException)]
        # each of the two fails with the other; an error of the working copy is the cause
        for failure in sorted(failures, key=lambda e: not isinstance(e, ValueError)):
            raise failure

    async def send(self, over: socket.socket) -> None:
        """Send the working copy, in the format of `tree.send`."""
        await self._copy("send", over)

    async def receive(self, over: socket.socket) -> None:
        """Receive a working copy, into one that is still empty."""
        await self._copy("receive", over)

    async def _copy(self, op: str, over: socket.socket) -> None:
        with over:  # when this one has failed, the other one must see its end
            await self._ask(op=op, descriptor=over)

    async def close(self) -> None:
        self._pool.forget(self)
        self._close_processes()
        self._close_way_out()
        await self._link.close()
        self._pool.ended(self)

    def abandon(self) -> None:
        """Close it without waiting for its end."""
        self._pool.forget(self)
        self._close_processes()
        self._close_way_out()
        self._link.abort()

    def _close_way_out(self) -> None:
        if self._egress:
            self._egress.close()

    def _close_processes(self) -> None:
        for reading in self._services:
            reading.cancel()
        for keeper in list(self._processes.values()):
            keeper.close()

    async def _ask(
        self, working_s: float = 0.0, descriptor: HasDescriptor | None = None, **request: Any
    ) -> Any:
        clock = asyncio.get_running_loop().time
        async with self._turn:
            self._check()
            self.due = clock() + working_s
            try:
                if descriptor is not None:
                    await self._link.send_descriptor(descriptor)
                    descriptor.close()  # otherwise the other side would not see its end
                patience_s = max(REPLY_TIMEOUT_S, self._pool.reply_timeout_s)
                answer = await self._link.answer(self._link.send(request), working_s + patience_s)
            finally:
                self._late_s = max(self._late_s, clock() - self.due)
                self.due = math.inf
            self._check()
            return answer

    def _check(self) -> None:
        """Raise if the sandbox answered too late: it may have been stopped, and its answer, or that
        its command ran out of time, may be due to that."""
        if self._late_s >= self._pool.reply_timeout_s:
            raise RolloutFailure(f"sandbox: its answer came {self._late_s:.0f} s late")


def _encode(content: str | bytes) -> str:
    return base64.b64encode(to_bytes(content)).decode()
