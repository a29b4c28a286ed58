"""A sandbox that is a dictionary, for tests and simulations. A function of files and argv answers
commands. Without one, commands raise, because a made-up success would reward every attempt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

from etude.core.errors import RolloutFailure
from etude.core.sandbox import CommandResult, Patch, SandboxSpec, Tier
from etude.sandbox.diff import unified_diff
from etude.sandbox.files import inside, inside_directory, to_bytes
from etude.sandbox.limits import COPY_BYTES, COPY_FILES
from etude.sandbox.spec import check_env, check_spec, opening_tree
from etude.sandbox.tree import FILE, Entry, Tree, matches

Files = dict[str, str | bytes]
Respond = Callable[[Files, Sequence[str]], CommandResult]


def refuse(files: Files, argv: Sequence[str]) -> CommandResult:
    raise NotImplementedError(
        f"a fake sandbox cannot run {argv[0]!r}: give it a function that returns the result for "
        f"files and argv, or use a real one (etude.sandbox.pool.open_sandbox_pool)"
    )


class FakeSandboxPool:
    """A `core.sandbox.SandboxPool`. Nothing runs in its sandboxes, so all limits hold."""

    tier: Tier = "vm"

    def __init__(self, respond: Respond = refuse) -> None:
        self._respond = respond

    def check(self, spec: SandboxSpec) -> None:
        limits = ("cpus", "memory_bytes", "disk_bytes", "processes")
        check_spec(spec, backend="fake", gives={"repository", "user", "workdir"}, limits=limits)

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[FakeSandbox]:
        self.check(spec)
        size = spec.limits.disk_bytes or COPY_BYTES
        before = await opening_tree(spec, max_bytes=size, max_entries=COPY_FILES)
        files = {path: entry.content or b"" for path, entry in before.items()}
        sandbox = FakeSandbox({**files, **spec.files}, self._respond)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def owing(self) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...


class FakeSandbox:
    """A `core.sandbox.Sandbox`. Its files have neither modes nor links."""

    def __init__(self, files: Mapping[str, str | bytes], respond: Respond = refuse) -> None:
        self.files: Files = {inside(path): content for path, content in files.items()}
        self.commands: list[tuple[str, ...]] = []
        self._respond = respond
        self._before = _tree(self.files)
        self._processes: list[FakeProcess] = []

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
        return self._answer(argv, cwd, env)

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        pty: bool = False,
    ) -> FakeProcess:
        """Start a process with its output available at once. With an exit code of None it runs
        until it is killed."""
        process = FakeProcess(self._answer(argv, cwd, env))
        self._processes.append(process)
        return process

    def _answer(
        self, argv: Sequence[str], cwd: str, env: Mapping[str, str] | None
    ) -> CommandResult:
        check_env(env or {})
        directory = inside_directory(cwd)
        if directory != "." and not any(path.startswith(f"{directory}/") for path in self.files):
            raise ValueError(f"{cwd} is not a directory of the working copy")
        self.commands.append(tuple(argv))
        return self._respond(self.files, argv)

    async def read(self, path: str) -> str:
        return (await self.read_bytes(path)).decode()

    async def read_bytes(self, path: str) -> bytes:
        plain = inside(path)
        if plain not in self.files:
            raise FileNotFoundError(path)
        return to_bytes(self.files[plain])

    async def write(self, path: str, content: str | bytes) -> None:
        to_bytes(content)  # text that cannot be encoded cannot be in a file
        self.files[inside(path)] = content

    async def diff(self) -> str:
        return unified_diff(self._before, self._changes())

    def _changes(self) -> dict[str, Entry | None]:
        now = _tree(self.files)
        changed: dict[str, Entry | None] = {
            path: entry for path, entry in now.items() if self._before.get(path) != entry
        }
        return changed | dict.fromkeys(self._before.keys() - now.keys())

    async def patch(
        self, *, only: Collection[str] = ("*",), without: Collection[str] = ()
    ) -> Patch:
        await self.close()
        return {
            path: entry and (entry.mode, entry.content or b"")
            for path, entry in self._changes().items()
            if matches(path, only, without)
        }

    async def apply(self, patch: Patch) -> None:
        for path, entry in patch.items():
            if entry is None:
                self.files.pop(inside(path), None)
            else:
                self.files[inside(path)] = entry[1]

    async def fork(self) -> FakeSandbox:
        forked = FakeSandbox(self.files, self._respond)
        forked._before = self._before
        return forked

    async def close(self) -> None:
        for process in self._processes:
            process.close()


class FakeProcess:
    """A `core.sandbox.Process` whose output is complete from the start, and which records its
    input."""

    def __init__(self, answer: CommandResult) -> None:
        self.written = b""
        self._output = answer.output.encode()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if answer.exit_code is not None:
            self._ended.set_result(answer.exit_code)

    async def read(self) -> bytes:
        output, self._output = self._output, b""
        if not output:
            await self.wait()
        return output

    async def write(self, data: bytes) -> None:
        self.written += data

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    async def kill(self) -> None:
        if not self._ended.done():
            self._ended.set_result(-9)

    def close(self) -> None:
        if not self._ended.done():
            self._ended.set_exception(RolloutFailure("sandbox: it is closed"))
            self._ended.exception()  # marks it as retrieved, since perhaps nobody waits for it


def _tree(files: Files) -> Tree:
    return {path: Entry(FILE, to_bytes(content)) for path, content in files.items()}
