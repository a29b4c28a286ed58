"""The built-in coding agent: ask the model, do what it says, show it what came of it, until it
submits.

It is a harness like anyone's: it knows the model as an OpenAI-compatible URL, and the machine as a
sandbox.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial

import aiohttp

from etude.core.errors import RolloutFailure
from etude.core.patience import when_back
from etude.core.sandbox import Sandbox
from etude.core.seeds import derive
from etude.core.types import Json, Task, Transcript
from etude.harness.tools import SCHEMAS, SUBMIT, Tools

NUDGE = "call a tool"

Message = dict[str, Json]


class OutOfContext(Exception):
    """The session is longer than what the model can read: it ends as it stands, like one that is
    out of turns."""


class CodingAgent:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        max_turns: int,
        max_tokens: int,
        timeout_s: float,
        temperature: float = 1.0,
        tool_delay_s: float = 0.0,
    ) -> None:
        self._session = session
        self._max_turns = max_turns
        self._timeout_s = timeout_s
        self._tool_delay_s = tool_delay_s
        self._sampling = {"model": "etude", "max_tokens": max_tokens, "temperature": temperature}

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        messages: list[Message] = task.opening
        tools = Tools(task, sandbox)
        finished = False
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                for turn in range(self._max_turns):
                    answer = await self._ask(base_url, api_key, messages, turn_seed(seed, turn))
                    messages.append(answer)
                    finished = await self._act(answer, tools, messages)
                    if finished or gave_up(messages):
                        break
        except TimeoutError:
            # someone else's time ran out: a failure, not the end of the session
            if not deadline.expired():
                raise
        except OutOfContext:
            pass
        return Transcript(messages=messages, finished=finished)

    async def _ask(
        self, base_url: str, api_key: str, messages: list[Message], seed: int
    ) -> Message:
        body = {
            **self._sampling,
            "messages": messages,
            "tools": SCHEMAS,
            "seed": seed,
            "parallel_tool_calls": True,
        }
        return await ask_model(self._session, base_url, api_key, body)

    async def _act(self, answer: Message, tools: Tools, messages: list[Message]) -> bool:
        """Do what the answer says, and add what came of it. True if it submits."""
        calls = answer.get("tool_calls") or []
        if not calls:
            messages.append({"role": "user", "content": NUDGE})
        for call in calls:
            name = call["function"]["name"]
            arguments = parse_arguments(call["function"]["arguments"])
            content = await tools.call(name, arguments)
            await asyncio.sleep(self._tool_delay_s)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if name == SUBMIT:
                return True
        return False


async def ask_model(
    http: aiohttp.ClientSession, base_url: str, api_key: str, body: Mapping[str, Json]
) -> Message:
    """The answer to a chat. Raises `OutOfContext` if the chat has become too long."""
    # The session has a time limit of its own; the client's default would end long answers of a
    # busy engine.
    no_limit = aiohttp.ClientTimeout(total=None)
    asking = partial(
        http.post,
        f"{base_url}/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {api_key}"},
        timeout=no_limit,
    )
    async with await when_back(asking, aiohttp.ClientConnectionError) as response:
        if response.status != 200:
            said = await response.text()
            if response.status == 400 and "context_length_exceeded" in said:
                raise OutOfContext
            raise RolloutFailure(f"chat completions: status {response.status}: {said[:500]}")
        message: Message = (await response.json())["choices"][0]["message"]
    return message


def gave_up(messages: list[Message]) -> bool:
    """Two answers in a row without a call: one reminder is enough."""
    return [message["content"] for message in messages[-3::2]] == [NUDGE, NUDGE]


def turn_seed(seed: int, turn: int) -> int:
    """Of one request, from the session's seed."""
    return derive(seed, turn)


def parse_arguments(text: str) -> Json:
    """The arguments as the model wrote them; None, which no tool accepts, if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # ValueError is also a number of too many digits
        return None
