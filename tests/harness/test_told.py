"""The built-in agent follows its settings: sampling, patience, the end of a context."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from etude.core.errors import RolloutFailure
from etude.core.sandbox import CommandResult
from etude.harness.agent import NUDGE, CodingAgent, gave_up
from etude.harness.tools import Tools
from etude.sandbox.fake import FakeSandbox
from tests.harness.test_agent import TASK, model, says, succeeds


async def test_settings_reach_the_model() -> None:
    async with (
        model(lambda request: says(("submit", "{}"))) as (url, requests),
        aiohttp.ClientSession() as session,
    ):
        agent = CodingAgent(session, max_turns=1, max_tokens=9, timeout_s=60.0, temperature=0.25)
        await agent.run(
            TASK, FakeSandbox(TASK.sandbox.files, succeeds), base_url=url, api_key="key", seed=1
        )
    assert (requests[0]["temperature"], requests[0]["max_tokens"]) == (0.25, 9)


@pytest.mark.parametrize(
    ("status", "text", "ends"),
    [
        (400, "context_length_exceeded", True),
        (400, "bad request", False),
        (503, "context_length_exceeded", False),
    ],
)
async def test_a_session_that_fills_the_context_ends_as_it_stands(
    status: int, text: str, ends: bool
) -> None:
    answers = iter([says(("test", "{}")), web.Response(status=status, text=text)])
    async with model(lambda request: next(answers)) as (url, _), aiohttp.ClientSession() as session:
        agent = CodingAgent(session, max_turns=9, max_tokens=9, timeout_s=60.0)
        work = agent.run(
            TASK, FakeSandbox(TASK.sandbox.files, succeeds), base_url=url, api_key="key", seed=1
        )
        if ends:
            transcript = await work
            assert (transcript.finished, transcript.limit) == (False, "context")
            assert len(transcript.messages) == 3
        else:
            with pytest.raises(RolloutFailure, match=f"status {status}: {text}"):
                await work


async def test_every_call_waits_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(delay: float, *more: Any) -> None:
        slept.append(delay)
        await sleep(0, *more)

    async with (
        model(lambda request: says(("test", "{}"), ("submit", "{}"))) as (url, _),
        aiohttp.ClientSession() as session,
    ):
        agent = CodingAgent(session, max_turns=1, max_tokens=9, timeout_s=60.0, tool_delay_s=0.125)
        monkeypatch.setattr("etude.harness.agent.asyncio.sleep", noted)
        await agent.run(
            TASK, FakeSandbox(TASK.sandbox.files, succeeds), base_url=url, api_key="key", seed=1
        )
    assert slept.count(0.125) == 2


async def test_the_visible_tests_have_their_time() -> None:
    told: list[tuple[Sequence[str], float]] = []

    class Noting(FakeSandbox):
        async def run(self, argv: Sequence[str], *, timeout_s: float, **how: Any) -> CommandResult:
            told.append((argv, timeout_s))
            return CommandResult(None, "")

    box = Noting(TASK.sandbox.files)
    assert await Tools(TASK, box).call("test", {}) == "timeout"
    await Tools(TASK, box, test_timeout_s=3.0).call("test", {})
    assert told == [(["python", "test_shape.py"], 10.0), (["python", "test_shape.py"], 3.0)]


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ((NUDGE, "so", NUDGE), True),
        ((NUDGE,), False),
        ((NUDGE, "so", "ok"), False),
        (("ok", NUDGE), False),
    ],
)
def test_one_reminder_is_enough(contents: tuple[str, ...], expected: bool) -> None:
    assert (
        gave_up([{"role": "user", "content": text} for text in ("go", "what", *contents)])
        == expected
    )
