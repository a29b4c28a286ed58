"""Tools that run the code: tests and the debugger."""

from __future__ import annotations

import asyncio
import re
import shlex

from etude.core.sandbox import Process
from etude.harness.code.terminal import KEPT_BYTES, Job
from etude.harness.code.tool import Tool, ToolError, Workspace, boolean, string, strings

_PROMPT = re.compile(r"\(Pdb\+*\) $")
_START_S = 30.0


class RunTests(Tool):
    description = "Run the tests, all of them or some."
    parameters = {
        "tests": strings(
            "Files, folders or names such as tests/test_cart.py::test_total; more options of the "
            "test runner may be among them."
        )
    }

    async def call(self, tests: list[str] | None = None) -> str:
        argv = await self.workspace.by_path([*self.config.test_command, *(tests or ())])
        ran = await self.workspace.run_tests(argv)
        if ran.exit_code == 0:
            return ran.output.strip() or "passed"
        self.workspace.failed_tests += 1
        end = f"exit code {ran.exit_code}"
        if ran.exit_code is None:
            timeout_s = self.config.test_timeout_s
            end = f"killed after {timeout_s:g} s: run fewer tests, or find what hangs"
        offer = ""
        if self.workspace.failed_tests == self.config.debug_after and "debug" in self.config.tools:
            offer = f"\nthe debugger may be used now: {self.config.name_of('debug')}"
        return f"{ran.output.rstrip()}\n{end}{offer}".lstrip("\n")


class Debug(Tool):
    description = (
        "Step through a program with pdb. `start` begins: what follows `python -m pdb`, such as "
        "'-m pytest -x tests/test_cart.py' or 'script.py 3'. Then each `command` is one of pdb's "
        "(b FILE:LINE, c, n, s, p EXPRESSION, w, q)."
    )
    parameters = {
        "start": string("Begin with this program and its arguments; ends an earlier one."),
        "command": string("A command of pdb, or several in lines."),
        "stop": boolean("End the program."),
    }

    def __init__(self, workspace: Workspace) -> None:
        super().__init__(workspace)
        self._pdb: _Pdb | None = None

    def describe(self) -> str:
        after = self.config.debug_after
        later = f" It may be used after {after} failed runs of the tests." if after else ""
        return self.description + later

    async def call(self, start: str = "", command: str = "", stop: bool = False) -> str:
        missing = self.config.debug_after - self.workspace.failed_tests
        if missing > 0:
            raise ToolError(f"the debugger may be used after {missing} more failed runs of tests")
        if start or stop:
            await self._end()
        if stop:
            return "ended"
        said = []
        if start:
            argv = await self.workspace.by_path(["python", "-m", "pdb", *shlex.split(start)])
            env = {"PYTHONUNBUFFERED": "1", "TERM": "dumb", "PYTHON_COLORS": "0"}
            process = await self.workspace.sandbox.start(argv, pty=True, env=env)
            self._pdb = _Pdb(process, self.config.command_timeout_s)
            said.append(await self._pdb.answer(_START_S))
        if self._pdb is None:
            raise ToolError("nothing is being debugged: say what to start")
        for line in command.splitlines():
            said.append(await self._pdb.ask(line))
        return "\n".join(said) or "(no output)"

    async def _end(self) -> None:
        if self._pdb is not None:
            await self._pdb.kill()
            self._pdb = None


class _Pdb:
    """pdb on a terminal: returns its output up to its next prompt."""

    def __init__(self, process: Process, timeout_s: float) -> None:
        self._job = Job(process)
        self._timeout_s = timeout_s

    async def ask(self, line: str) -> str:
        await self._job.write(f"{line}\n".encode())
        echo, _, said = (await self.answer(self._timeout_s)).partition("\n")
        return said if echo.strip() == line.strip() else f"{echo}\n{said}".rstrip()

    async def answer(self, timeout_s: float) -> str:
        said = ""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not _PROMPT.search(said):
            ended = await self._job.ended(0.02)
            said = _ends(said + self._job.news().replace("\r\n", "\n"))
            if ended:
                return f"{said.rstrip()}\n(the program has ended)"
            if loop.time() > deadline:
                return f"{said.rstrip()}\n(it still runs: give a command once it stops)"
        return _PROMPT.sub("", said).rstrip()

    async def kill(self) -> None:
        await self._job.kill()


def _ends(said: str) -> str:
    """The beginning and the end of a long text, as for any output: a program may print without
    end."""
    half = KEPT_BYTES // 2
    return said if len(said) <= KEPT_BYTES else said[:half] + said[-half:]
