"""A sandbox that is a dictionary, for tests and simulations. Commands are answered by a function of
files and argv."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from etude.core.errors import EtudeError
from etude.core.sandbox import CommandResult, Process, SandboxSpec
from etude.sandbox.files import inside, inside_directory, to_bytes
from etude.sandbox.spec import check_env, check_spec

Files = dict[str, str | bytes]
Respond = Callable[[Files, Sequence[str]], CommandResult]


def silent(files: Files, argv: Sequence[str]) -> CommandResult:
    """The command that does nothing and succeeds."""
    return CommandResult(0, "")


class FakeSandboxPool:
    def __init__(self, respond: Respond = silent) -> None:
        self._respond = respond

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[FakeSandbox]:
        check_spec(spec, backend="fake", gives=())
        sandbox = FakeSandbox(spec.files, self._respond)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def owing(self) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...


class FakeSandbox:
    def __init__(self, files: Mapping[str, str | bytes], respond: Respond = silent) -> None:
        self.files: Files = {inside(path): content for path, content in files.items()}
        self.commands: list[tuple[str, ...]] = []
        self._respond = respond

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: str | bytes = "",
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        inside_directory(cwd)
        check_env(env or {})
        self.commands.append(tuple(argv))
        return self._respond(self.files, argv)

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        pty: bool = False,
    ) -> Process:
        raise EtudeError("fake sandboxes have no background processes")

    async def read(self, path: str) -> str:
        return (await self.read_bytes(path)).decode()

    async def read_bytes(self, path: str) -> bytes:
        plain = inside(path)
        if plain not in self.files:
            raise FileNotFoundError(path)
        return to_bytes(self.files[plain])

    async def write(self, path: str, content: str | bytes) -> None:
        self.files[inside(path)] = content

    async def diff(self) -> str:
        raise EtudeError("fake sandboxes do not know what has changed")

    async def fork(self) -> FakeSandbox:
        return FakeSandbox(self.files, self._respond)

    async def close(self) -> None: ...
