"""The first process of a sandbox that is a machine of its own: it holds the working copy, and runs
commands in it for the host.

The machine is the wall, so inside it a sandbox is a directory and processes (`process`). One more
wall separates this process, which is trusted, from the commands, which are not: each command has a
user and a PID namespace of its own, in which it is an ordinary user without capabilities. It has no
name for this process, and when it ends, everything that it started ends with it.

Standard input carries lines of JSON, {"id": n, "operation": .., "told": {..}} or {"cancel": n}.
Each of the former is answered by a line on standard output, {"id": n, "ok": ..} or {"id": n,
"error": [kind, message]}, in any order. The machine ends when its input does. Standard library
only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.core.sandbox import CommandResult, Sandbox
from etude.sandbox import kernel
from etude.sandbox.command import PROGRAMS, environment
from etude.sandbox.link import decoded
from etude.sandbox.places import WORK
from etude.sandbox.process import ProcessSandbox
from etude.sandbox.served import TOLD, ServedSandbox, failure
from etude.sandbox.tree import Entry, Tree

_LINE_BYTES = 1 << 30
_HOSTS = "/run/hosts"
_ORDINARY = (
    "unshare", "--user", "--map-user=1000", "--map-group=1000", "--mount-proc", "--pid", "--fork",
    "--kill-child", "--",
)  # fmt: skip
_NOT_EXECUTED = "unshare: failed to execute "


class MachineSandbox(ProcessSandbox):
    """The working copy of a machine, and the commands in it."""

    def __init__(self, env: Mapping[str, str], before: Tree) -> None:
        super().__init__(set(), env, before, root=Path(WORK))

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        return {**super()._environment(env), **environment(), **self._env, **(env or {})}

    def _with_python(self, argv: Sequence[str]) -> list[str]:
        ours = argv[0] in ("python", "python3") and not PROGRAMS
        return [*([sys.executable, "-s", "-B"] if ours else [argv[0]]), *argv[1:]]

    def _launched(self, argv: Sequence[str]) -> list[str]:
        return [*_ORDINARY, *self._with_python(argv)]

    def _launched_beside(self, argv: Sequence[str], pty: bool) -> list[str]:
        return [*_ORDINARY, *(["setsid", "--ctty"] if pty else []), *self._with_python(argv)]

    async def run(self, argv: Sequence[str], *, timeout_s: float, **told: Any) -> CommandResult:
        """Run a command. A program that cannot be executed is reported under its own name, as in
        other sandboxes."""
        ran = await super().run(argv, timeout_s=timeout_s, **told)
        if ran.exit_code in (126, 127) and ran.output.startswith(_NOT_EXECUTED):
            why = ran.output.removeprefix(_NOT_EXECUTED)
            return CommandResult(127, why, ran.report)
        return ran

    async def _kill_all(self) -> None:
        for process in list(self._processes):
            process.close()
            await process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # process 1 sees only processes of this sandbox


class Machine:
    """Server of lines in, lines out. Subclasses for other kinds of machines override what is opened
    in here."""

    def __init__(self) -> None:
        self._served: ServedSandbox | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader(limit=_LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            try:
                message = json.loads(line)
            except ValueError:  # a line cut off by a checkpoint; what follows is the fork's
                continue
            if "cancel" in message:
                if task := self._tasks.get(message["cancel"]):
                    task.cancel()
            else:
                self._tasks[message["id"]] = asyncio.create_task(self._answer(**message))

    async def _answer(self, id: int, operation: str, told: dict[str, Any]) -> None:
        try:
            answer: dict[str, Any] = {"id": id, "ok": await self._do(operation, told)}
        except TOLD as e:
            answer = {"id": id, "error": failure(e)}
        finally:
            del self._tasks[id]
        _say(answer)

    async def _do(self, operation: str, told: dict[str, Any]) -> Any:
        if operation == "hello":
            return self.hello(told)
        if operation == "open":
            self._served = ServedSandbox(await self.open(told))
            return None
        assert self._served is not None
        return await self._served.answer(operation, told)

    def hello(self, told: dict[str, Any]) -> None:
        """Answer the first request, also after a restoration."""

    async def open(self, told: dict[str, Any]) -> Sandbox:
        before = {path: Entry(*each) for path, each in decoded(told["tree"]).items() if each}
        sandbox = MachineSandbox(told["env"], before)
        sandbox.fill(before)
        if services := told["services"]:
            hosts = Path("/etc/hosts").read_text()
            Path(_HOSTS).write_text(hosts + "".join(f"127.0.0.1 {name}\n" for name in services))
            kernel.bind(_HOSTS, "/etc/hosts")
        return sandbox


def _say(answer: dict[str, Any]) -> None:
    data = memoryview(json.dumps(answer).encode() + b"\n")
    while data:
        try:
            data = data[os.write(1, data) :]
        except BlockingIOError:  # one non-blocking descriptor for both directions
            select.select([], [1], [])


def main(source: str, programs: Sequence[str]) -> None:
    """Serve the machine. `source`: mount point of this program, which is unmounted so that nothing
    else sees it. `programs`: directories of mounts that are searched before all others."""
    PROGRAMS[:] = programs
    sys.path.remove(source)
    os.chdir("/")
    ctypes.CDLL(None).umount2(source.encode(), 2)
    asyncio.run(Machine().serve())
    os._exit(0)
