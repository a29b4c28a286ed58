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
    """A model to sample from, token ids in and token ids out, that can switch to newer weights."""

    async def sample(self, request: Request) -> Sample:
        """Sample an answer. ValueError for a request that can never be answered."""

    def stream(self, request: Request) -> AsyncIterator[Token | Sample]:
        """Yield the tokens one by one, then once the sample that they form."""

    async def load(self, version: int) -> None:
        """Return when every token sampled from now on comes from `version` or newer."""


class Agent(Protocol):
    """A harness. It reaches the model only through an OpenAI-compatible URL and the key for it, so
    any harness can be one."""

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript: ...


class Environment(Protocol):
    """An environment: its tasks, the sandbox of each, and the score of an attempt.

    Optional methods: `solution(task)` returns the files of a good answer (path -> content), an
    agent that produces one, or None; `etude try` scores it, and no agent sees it. `own_agent(desk,
    **limits)` returns the agent that belongs to the environment, which replaces `harness.agent`;
    `desk` is a `run.rollout.SessionDesk`, or None outside a run. `scoring_s(task)` returns the time
    that a task itself allows for its scoring, in addition to `tasks.timeout_s`, so that the
    environment can score an attempt that runs out of it."""

    def tasks(self, split: str) -> Sequence[Task]: ...

    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]: ...

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score: ...


class WeightStore(Protocol):
    async def wait(self, after: int) -> Manifest:
        """Wait for a version newer than `after`, and return the newest one published."""
