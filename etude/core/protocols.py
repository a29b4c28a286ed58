"""Protocols between the packages. Each has at least two implementations, one of them a shipped
fake, and no caller ever asks which one it has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from etude.core.types import Json, Manifest, Sample, Task


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One sampling request to a policy, with all the randomness of its answer: any policy with the
    same weights, asked the same, answers the same."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: any token may be drawn."""
    stop: tuple[int, ...] = ()
    """Tokens that end the answer, and are the last of it."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end the answer: its last token is the one that completes such a text."""
    grammar: str | None = None
    """What the answer must follow, in the notation of llguidance."""
    top_logprobs: int = 0
    experts_from: int | None = None
    """The first position whose routed experts are wanted, if any are: whoever asks may know those
    before it."""
    prediction: tuple[int, ...] | None = None
    """What the answer may look like: where that is right the answer comes faster. It is the same
    answer in any case."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """More texts that the answer may repeat parts of, used in the same way."""

    @property
    def speculates(self) -> bool:
        return self.prediction is not None or bool(self.drafts)


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token on its way, before the sample that it belongs to is whole."""

    token: int
    logprob: float
    version: int
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place with their log-probs, as many as were asked for."""


class Policy(Protocol):
    """A model that can be sampled from, token ids in and token ids out, and that can move to newer
    weights."""

    async def sample(self, ask: Ask) -> Sample:
        """Raises ValueError for what can never be answered."""

    def stream(self, ask: Ask) -> AsyncIterator[Token | Sample]:
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
    async def wait(self, after: int) -> Manifest:
        """The newest published version, as soon as it is newer than `after`."""
