"""Protocols between the packages. Each has at least two implementations, one of them a shipped
fake, and no caller ever asks which one it has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from etude.core.sampling import Request, Sample, Token
from etude.core.sandbox import Sandbox
from etude.core.types import Attempt, Manifest, Score, Task, Transcript


class Policy(Protocol):
    """A model that can be sampled from, token ids in and token ids out, and that can move to newer
    weights."""

    async def sample(self, request: Request) -> Sample:
        """Raises ValueError for what can never be answered."""

    def stream(self, request: Request) -> AsyncIterator[Token | Sample]:
        """The tokens one by one, then the sample that they make, once."""

    async def load(self, version: int) -> None:
        """Returns when every token sampled from now on comes from `version` or newer."""


class Agent(Protocol):
    """A harness. It reaches the model only through an OpenAI-compatible URL and the key for it, so
    anyone's harness is one."""

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript: ...


class Environment(Protocol):
    """An environment: its tasks, the sandbox of each, and the score of an attempt.

    It may also have `solution(task)`, which gives the files of a good answer, path -> content, or
    an agent that makes one, or None: `etude try` scores it. No agent sees it. And it may have
    `own_agent(desk, **limits)`, which gives the agent that belongs to it; `harness.agent` is left
    alone then. `desk` is a `run.rollout.SessionDesk`, or None where there is no run. And it may
    have `scoring_s(task)`, which gives the time that a task itself sets for its scoring: it comes
    on top of `tasks.timeout_s`, so that the environment can say what running out of it is worth."""

    def tasks(self, split: str) -> Sequence[Task]: ...

    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]: ...

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score: ...


class WeightStore(Protocol):
    async def wait(self, after: int) -> Manifest:
        """The newest published version, as soon as it is newer than `after`."""
