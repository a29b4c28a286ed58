"""A sandbox that is a dictionary, for tests and simulations. Commands are answered by a function of
files and argv."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from etude.core.protocols import CommandResult
from etude.sandbox.files import inside

Respond = Callable[[dict[str, str], Sequence[str]], CommandResult]


def silent(files: dict[str, str], argv: Sequence[str]) -> CommandResult:
    """The command that does nothing and succeeds."""
    return CommandResult(0, "")


class FakeSandboxPool:
    def __init__(self, respond: Respond = silent) -> None:
        self._respond = respond

    @contextlib.asynccontextmanager
    async def open(self, files: Mapping[str, str]) -> AsyncIterator[FakeSandbox]:
        sandbox = FakeSandbox(files, self._respond)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def owing(self) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...


class FakeSandbox:
    def __init__(self, files: Mapping[str, str], respond: Respond = silent) -> None:
        self.files = {inside(path): text for path, text in files.items()}
        self.commands: list[tuple[str, ...]] = []
        self._respond = respond

    async def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        self.commands.append(tuple(argv))
        return self._respond(self.files, argv)

    async def read(self, path: str) -> str:
        plain = inside(path)
        if plain not in self.files:
            raise FileNotFoundError(path)
        return self.files[plain]

    async def write(self, path: str, text: str) -> None:
        self.files[inside(path)] = text

    async def fork(self) -> FakeSandbox:
        return FakeSandbox(self.files, self._respond)

    async def close(self) -> None: ...
