"""Requests to a gateway that is away are repeated for a while."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import pytest
from aiohttp import web

from etude.core import patience
from etude.core.errors import RolloutFailure
from etude.core.patience import when_back
from etude.core.sandbox import SandboxSpec
from etude.core.types import Task
from etude.harness.agent import CodingAgent
from etude.sandbox.fake import FakeSandboxPool


async def test_what_breaks_otherwise_is_not_asked_again() -> None:
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        raise RolloutFailure("no")

    with pytest.raises(RolloutFailure):
        await when_back(ask, aiohttp.ClientConnectionError)
    assert asked == 1


async def test_it_is_given_up_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "AWAY_S", 0.0)

    async def ask() -> None:
        raise aiohttp.ServerDisconnectedError

    with pytest.raises(aiohttp.ServerDisconnectedError):
        await when_back(ask, aiohttp.ClientConnectionError)


async def test_a_session_of_the_built_in_agent_goes_on_when_the_gateway_is_back() -> None:
    """The first request finds no listener, the second is cut off, and the third is answered."""
    held = socket.socket()  # bound but not listening yet, so that nobody else takes the port
    held.bind(("127.0.0.1", 0))
    bodies: list[bytes] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        if len(bodies) == 1:
            assert request.transport is not None
            request.transport.abort()
        call = {"id": "1", "function": {"name": "submit", "arguments": "{}"}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return web.json_response({"choices": [{"message": message}]})

    app = web.Application()
    app.router.add_post("/s/x/v1/chat/completions", answer)
    server = web.AppRunner(app)
    await server.setup()
    async with (
        aiohttp.ClientSession() as http,
        FakeSandboxPool().open(SandboxSpec()) as sandbox,
    ):
        agent = CodingAgent(http, max_turns=3, max_tokens=9, timeout_s=600.0, temperature=1.0)
        url = f"http://127.0.0.1:{held.getsockname()[1]}/s/x/v1"
        task = Task(id="t", prompt="mend it", meta={"module": "area.py"})
        running = asyncio.create_task(agent.run(task, sandbox, base_url=url, api_key="key", seed=7))
        await asyncio.sleep(2 * patience.RETRY_S)
        assert not running.done()
        try:
            await web.SockSite(server, held).start()
            transcript = await running
        finally:
            await server.cleanup()
    assert transcript.finished
    assert len(bodies) == 2 and json.loads(bodies[0]) == json.loads(bodies[1])
