"""Protocols between the packages. Each has at least two implementations, one of them a shipped
fake, and no caller ever asks which one it has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from etude.core.sampling import Request, Sample, Token
from etude.core.types import Json, Manifest, Task


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command. `exit_code` is None if it was killed for running past its time."""

    exit_code: int | None
    output: str


class Sandbox(Protocol):
    """A working copy in a machine of its own, with no network. Everything the agent does happens in
    here."""

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, stdin: str = ""
    ) -> CommandResult: ...

    async def read(self, path: str) -> str:
        """Raises FileNotFoundError, or ValueError for a path that leaves the working copy."""

    async def write(self, path: str, text: str) -> None: ...

    async def fork(self) -> Sandbox:
        """Another sandbox whose working copy starts as this one's is now."""

    async def close(self) -> None:
        """Kills every process in it and removes its files. May be called twice."""


class SandboxPool(Protocol):
    """A pool that sandboxes are opened from."""

    def open(self, files: Mapping[str, str]) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh sandbox that holds just these files; closed on every way out."""

    def owing(self) -> dict[str, float]:
        """The processes behind the sandboxes that owe an answer, and for how many seconds each."""

    async def close(self) -> None: ...


class Policy(Protocol):
    """A model that can be sampled from, token ids in and token ids out, and that can move to newer
    weights."""

    async def sample(self, request: Request) -> Sample:
        """Raises ValueError for what can never be answered."""

    def stream(self, request: Request) -> AsyncIterator[Token | Sample]:
        """The tokens one by one, then the sample that they make, once."""

    async def load(self, version: int) -> None:
        """Returns when every token sampled from now on comes from `version` or newer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A session as the harness saw it."""

    messages: list[dict[str, Json]]
    finished: bool
    """False if the agent ran out of turns or time of its own."""


class Agent(Protocol):
    """A harness. It reaches the model only through an OpenAI-compatible URL, so anyone's harness is
    one."""

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, seed: int
    ) -> Transcript: ...


class Environment(Protocol):
    """An environment: its tasks, the sandbox of each, and the scores of attempts."""

    def tasks(self, split: str) -> Sequence[Task]: ...

    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]: ...

    async def score(self, task: Task, sandbox: Sandbox) -> dict[str, float]:
        """Named, finite scores; `reward` is the one that is trained on."""


class WeightStore(Protocol):
    async def newest(self) -> Manifest | None: ...

    async def wait(self, after: int) -> Manifest:
        """The newest published version, as soon as it is newer than `after`."""
