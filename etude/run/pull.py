"""The pull environment: the user's own scheduler asks the gateway for sessions, runs them, and
sends the results (docs/environments-by-url.md)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from etude.core.errors import EtudeError, Interrupted, RolloutFailure
from etude.core.remote import RolloutResult, SessionOffer
from etude.core.sandbox import Sandbox, SandboxSpec
from etude.core.types import Attempt, Score, Task, Transcript
from etude.run.remote_tasks import read_task_file
from etude.run.rollout import SessionDesk
from etude.run.service import GRACE_S, WAIT_S, SessionLimits, session_of, to_transcript
from etude.sandbox.fake import FakeSandboxPool


class PullEnvironment:
    """A `core.protocols.Environment` whose sessions are run and scored by the client that claims
    them."""

    def __init__(self, path: str, *, counts: Mapping[str, int], claim_s: float) -> None:
        """`path`: a file of tasks. `claim_s`: the time that a session may wait to be claimed."""
        self._path = path
        self._counts = counts
        self._claim_s = claim_s

    def tasks(self, split: str) -> Sequence[Task]:
        return read_task_file(self._path, split, self._counts[split])

    @contextlib.asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        """An empty sandbox: the work is done elsewhere."""
        async with FakeSandboxPool().open(SandboxSpec()) as nothing:
            yield nothing

    def own_agent(self, desk: SessionDesk | None, **limits: Any) -> PullAgent:
        if desk is None:
            raise EtudeError(
                'environment = "pull" needs a run with a gateway that offers its sessions: start '
                "it with etude run"
            )
        return PullAgent(desk, claim_s=self._claim_s, **limits)

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        assert attempt.transcript.score is not None
        return attempt.transcript.score


class PullAgent:
    """A `core.protocols.Agent` that stands for the client that claims the session."""

    def __init__(self, desk: SessionDesk, *, claim_s: float, **limits: Any) -> None:
        self._desk = desk
        self._claim_s = claim_s
        self._limits = SessionLimits.of(**limits)

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        session = session_of(base_url)
        request = self._limits.request(
            task,
            id=session,
            base_url=base_url,
            token=api_key,
            seed=seed,
            callback=await self._desk.callback(session),
        )
        offer = SessionOffer(request=request, timeout_s=self._limits.timeout_s)
        result = await self._claimed(session, offer)
        if result is None:
            result = await self._settled(session, replace(offer, claimed=True))
        if result.status == "failed":
            raise RolloutFailure(f"the scheduler reports that the session failed: {result.error}")
        return to_transcript(task, result)

    async def _claimed(self, session: str, offer: SessionOffer) -> RolloutResult | None:
        """Return when the session is claimed, with the result if there is one immediately."""
        try:
            async with asyncio.timeout(self._claim_s):
                while True:
                    await self._desk.offer(session, offer)
                    outcome = await self._desk.outcome(session, WAIT_S)
                    if outcome is not None and outcome.claimed:
                        return outcome.result
        except TimeoutError as e:
            raise RolloutFailure(
                f"no scheduler took the session within {self._claim_s:g} s (tasks.timeout_s): is "
                "one running?"
            ) from e

    async def _settled(self, session: str, offer: SessionOffer) -> RolloutResult:
        try:
            async with asyncio.timeout(self._limits.timeout_s + GRACE_S):
                while True:
                    outcome = await self._desk.outcome(session, WAIT_S, claimed=True)
                    if outcome is None:  # the gateway was restarted
                        await self._desk.offer(session, offer)
                    elif outcome.result is not None:
                        return outcome.result
        except TimeoutError as e:
            raise Interrupted(
                f"the scheduler sent no result within {GRACE_S:g} s after the session's deadline "
                f"(harness.timeout_s = {self._limits.timeout_s:g})"
            ) from e
