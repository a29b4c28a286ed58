"""The terminal: commands that seem to share one shell, and background jobs.

Each command is in fact a process of its own, which inherits the directory, variables and functions
of the previous command. So a command that hangs, breaks its shell or reads all its input harms only
itself.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
from collections.abc import Mapping

from etude.core.errors import RolloutFailure
from etude.core.sandbox import Process, Sandbox
from etude.harness.code.tool import Tool, ToolError, Workspace, boolean, integer, string

KEPT_BYTES = 256 << 10
"""Per output; half of it from the beginning, half from the end."""
_MAX_COMMAND = 100_000
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN = {"SHLVL", "_", "PWD", "OLDPWD"}


class Job:
    """A process whose output is collected while it runs."""

    def __init__(self, process: Process, end: str = "") -> None:
        """`end`: a mark in the output; the text after it is only for `Shell.left`."""
        self._process = process
        self._end = end.encode()
        self._output = bytearray()
        self._dropped = 0
        self._seen = 0
        self._failure: RolloutFailure | None = None
        self.exit_code: int | None = None
        # This task ends on its own, with the process or its sandbox.
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while data := await self._process.read():
                self._output += data
                if (over := len(self._output) - KEPT_BYTES) > 0:
                    del self._output[KEPT_BYTES // 2 : KEPT_BYTES // 2 + over]
                    self._dropped += over
            self.exit_code = await self._process.wait()
        except RolloutFailure as e:  # raised in `ended`; at the end of a session nobody calls it
            self._failure = e

    async def ended(self, wait_s: float) -> bool:
        """Wait for the process to end, at most for the given time; returns True if it has ended."""
        await asyncio.wait([self._reading], timeout=wait_s)
        if self._failure is not None:
            raise self._failure
        return self._reading.done()

    async def write(self, data: bytes) -> None:
        await self._process.write(data)

    async def kill(self) -> None:
        await self._process.kill()
        await self._reading

    def said(self) -> tuple[str, str]:
        """The output, and the text after the end mark, if the mark was written."""
        output, left = self._split()
        return output.decode(errors="replace"), left.decode(errors="replace")

    def news(self) -> str:
        """The output since the last call, except for dropped bytes."""
        output, _ = self._split()
        half = KEPT_BYTES // 2  # nothing is ever dropped from the first half
        start = self._seen if self._seen <= half else max(self._seen - self._dropped, half)
        new = output[start:]
        self._seen = len(output) + self._dropped
        return new.decode(errors="replace")

    def _split(self) -> tuple[bytes, bytes]:
        if not self._end:
            return bytes(self._output), b""
        output, _, left = bytes(self._output).partition(self._end)
        is_cut = self._dropped and len(output) < KEPT_BYTES // 2
        return output, b"" if is_cut else left


class Shell:
    """The state that one command passes on to the next: directory, variables, functions."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._mark = f"etude-{secrets.token_hex(8)}"
        self._env: Mapping[str, str] = {}
        self._known: frozenset[str] = frozenset()
        self._directory = ""
        self._functions = ""

    async def start(self, command: str, *, remember: bool) -> Job:
        """Start a command. `remember`: have it write its state at the end, for `left`."""
        env = dict(self._env)
        lines = [f"cd -- {shlex.quote(self._directory)}"] if self._directory else []
        lines += [f"unset {name}" for name in sorted(self._known - env.keys())]
        if (path := env.pop("PATH", None)) is not None:  # it may contain no shell
            lines.append(f"export PATH={shlex.quote(path)}")
        lines += [self._functions] if self._functions else []
        if remember:
            lines.append(
                f'trap \'e=$?; trap - EXIT; printf "\\n%s\\0" {self._mark}; pwd; printf "\\0";'
                f' declare -f 2>/dev/null; printf "\\0"; /usr/bin/env -0 2>/dev/null;'
                f" exit $e' EXIT"
            )
        lines.append(f"eval {shlex.quote(command)} </dev/null")
        script = "\n".join(lines).encode()
        # The script is not passed as an argument, since one argument may have at most 128 KiB.
        argv = ["sh", "-c", 'exec "$(command -v bash || echo sh)" -c \'eval "$(cat)"\'']
        job = Job(await self._sandbox.start(argv, env=env), f"\n{self._mark}\0")
        await job.write(script)
        await job.write(b"")
        return job

    def left(self, job: Job) -> str:
        """The output of a command that has ended. The state that it left is restored for the next
        one."""
        output, state = job.said()
        if not state:
            return output
        directory, functions, *pairs = state.split("\0")
        env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if env:  # empty if a variable is so long that no program can start, `env` included
            self._env = {k: v for k, v in env.items() if _VARIABLE.fullmatch(k) and k not in _OWN}
            self._known |= self._env.keys()
        self._directory, self._functions = directory.strip("\n"), functions.strip("\n")
        return output


class Terminal(Tool):
    description = (
        "Run a command in a shell in the working copy. Directory, variables and functions stay for "
        "the next command; its standard input is empty. What takes longer than its time goes on "
        "as a job in the background, as does what is started with background."
    )
    parameters = {
        "command": string("The command. Leave it out to poll or kill a job."),
        "timeout_s": integer("Wait for so long, in seconds."),
        "background": boolean("Do not wait for it, such as for a server."),
        "job": integer("The number of a job whose new output is asked for."),
        "kill": boolean("End that job."),
    }

    def __init__(self, workspace: Workspace) -> None:
        super().__init__(workspace)
        self._shell = Shell(self.workspace.sandbox)
        self._jobs: dict[int, Job] = {}

    async def call(
        self,
        command: str = "",
        timeout_s: int | None = None,
        background: bool = False,
        job: int | None = None,
        kill: bool = False,
    ) -> str:
        wait_s = min(timeout_s or self.config.command_timeout_s, self.config.command_timeout_s)
        if job is not None and not command:
            return await self._poll(job, kill, float(timeout_s and wait_s or 0))
        if not command.strip() or job is not None:
            raise ToolError("give a command, or the job that is meant")
        if len(command) > _MAX_COMMAND:
            raise ToolError(f"a command has at most {_MAX_COMMAND} characters: write a file first")
        if "\0" in command:
            raise ToolError("a command has no NUL characters: write a file first")
        started = await self._shell.start(command, remember=not background)
        if not background and await started.ended(wait_s):
            return _told(self._shell.left(started), started.exit_code)
        number = len(self._jobs) + 1
        self._jobs[number] = started
        if background:
            return f"job {number} was started: ask for its output with job={number}"
        return (
            f"{started.news()}\nstill running after {wait_s:g} s: it goes on as job {number}; ask "
            f"for its output with job={number}, or end it with kill"
        )

    async def _poll(self, number: int, kill: bool, wait_s: float) -> str:
        if number not in self._jobs:
            some = ", ".join(map(str, self._jobs)) or "none"
            raise ToolError(f"there is no job {number}: those that there are: {some}")
        job = self._jobs[number]
        has_ended = await job.ended(wait_s)
        if kill and not has_ended:
            await job.kill()
            return f"{job.news()}\njob {number} was killed".lstrip("\n")
        state = f"ended with exit code {job.exit_code}" if has_ended else "still running"
        return f"{job.news()}\njob {number}: {state}".lstrip("\n")


def _told(output: str, code: int | None) -> str:
    """The output, and the exit code unless it is 0."""
    output = output.rstrip("\n")
    if code == 0:
        return output or "(no output)"
    return f"{output}\nexit code {code}".lstrip("\n")
