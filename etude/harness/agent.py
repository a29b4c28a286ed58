"""The built-in coding agent: a loop that asks the model, runs its tool calls and shows it the
results, until it submits.

It is a harness like any other: it reaches the model through an OpenAI-compatible URL, and the
machine through a sandbox.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import aiohttp

from etude.core.errors import RolloutFailure
from etude.core.patience import when_back
from etude.core.sandbox import Sandbox
from etude.core.seeds import derive
from etude.core.types import Json, Limit, PromptPart, Task, Transcript
from etude.harness.summary import REQUEST, SUMMARISE, CarriedState, Conversation, Message
from etude.harness.summary import SCHEMA as SUMMARY_SCHEMA
from etude.harness.tools import Tools

NUDGE = "call a tool"

Ask = Callable[..., Awaitable[tuple[Message, int]]]


class OutOfContext(Exception):
    """The session has outgrown the model's context. It ends at this point, like one that is out of
    turns."""


class AgentTools(Protocol):
    """The tools of one session: those of the demo (`harness.tools`) or of a product
    (`harness.code`)."""

    @property
    def schemas(self) -> list[dict[str, Json]]:
        """Schemas in the format of the chat completions API. They must be the same at every turn,
        since another list would be another prompt."""

    async def call(self, name: str, arguments: Json) -> str:
        """The answer to a call as the model wrote it, however wrong it is. Raises only if the
        sandbox fails."""

    def ends(self, name: str) -> bool:
        """True if a call of this tool ends the session."""

    def carried(self) -> CarriedState:
        """State that the session's next window receives in addition to its summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The beginning of a session: its first messages, and its tools."""

    messages: list[Message]
    tools: AgentTools
    prompt_parts: tuple[PromptPart, ...] = ()


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
        summarise_at: int | None = None,
        summarise_tool: bool = False,
    ) -> None:
        """`summarise_at`: number of tokens at which a window is full; the model is then asked for a
        summary, and the next window begins with it. `summarise_tool`: the model may also summarise
        on its own, by a tool call."""
        self._session = session
        self._max_turns = max_turns
        self._timeout_s = timeout_s
        self._tool_delay_s = tool_delay_s
        self._summarise_at = summarise_at
        self._summarise_tool = summarise_tool
        self._sampling = {"model": "etude", "max_tokens": max_tokens, "temperature": temperature}

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        opening = await self.open(task, sandbox, seed)
        talk = Conversation(opening.messages, self._summarise_at)
        tools = opening.tools
        own = [SUMMARY_SCHEMA] if self._summarise_tool else []
        ask = partial(self._ask, base_url, api_key, [*tools.schemas, *own])
        finished = False
        limit: Limit = "turns"
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                for turn in range(self._max_turns):
                    if talk.is_full:
                        await self._summarise(ask, talk, tools, seed)
                    try:
                        answer, num_tokens = await ask(talk.window, turn_seed(seed, turn))
                    except OutOfContext:
                        if not talk.step_back():
                            raise
                        await self._summarise(ask, talk, tools, seed)
                        continue
                    talk.answered(answer, num_tokens)
                    finished = await self._act(answer, tools, talk)
                    if finished or gave_up(talk.window):
                        break
        except TimeoutError:
            # a timeout of something else: a failure, not the end of the session
            if not deadline.expired():
                raise
            limit = "time"
        except OutOfContext:
            limit = "context"
        return Transcript(
            messages=talk.said,
            finished=finished,
            limit=limit,
            prompt_parts=opening.prompt_parts,
        )

    async def open(self, task: Task, sandbox: Sandbox, seed: int) -> Opening:
        """Prepare the session before the model's first turn."""
        return Opening(messages=task.opening, tools=Tools(task, sandbox))

    async def _summarise(self, ask: Ask, talk: Conversation, tools: AgentTools, seed: int) -> None:
        """Ask for a summary of the window, or of as much of it as leaves room for the request."""
        own_seed = derive(seed, SUMMARISE, talk.num_summaries)
        while True:
            try:
                answer, _ = await ask(talk.summary_request, own_seed, kind="summary")
                break
            except OutOfContext:
                if not talk.step_back():
                    raise
        talk.add({"role": "user", "content": REQUEST}, answer)
        talk.reopen(self._summary_of(answer), tools.carried())

    async def _ask(
        self,
        base_url: str,
        api_key: str,
        schemas: list[Message],
        messages: list[Message],
        seed: int,
        kind: str = "turns",
    ) -> tuple[Message, int]:
        """The answer, and the number of tokens of the context including it. `kind`: of the segment,
        if the request opens one."""
        body = {
            **self._sampling,
            "messages": messages,
            "tools": schemas,
            "seed": seed,
            "parallel_tool_calls": True,
        }
        return await ask_model(self._session, base_url, api_key, body, kind)

    async def _act(self, answer: Message, tools: AgentTools, talk: Conversation) -> bool:
        """Run the calls of an answer, and add their results to the conversation. Returns True if
        the answer ends the session."""
        calls = answer.get("tool_calls") or []
        if not calls:
            talk.add({"role": "user", "content": NUDGE})
        for call in calls:
            name = call["function"]["name"]
            arguments = parse_arguments(call["function"]["arguments"])
            if (summary := self._own_summary(name, arguments)) is not None:
                talk.reopen(summary, tools.carried())
                return False
            content = await tools.call(name, arguments)
            await asyncio.sleep(self._tool_delay_s)
            talk.add({"role": "tool", "tool_call_id": call["id"], "content": content})
            if tools.ends(name):
                return True
        return False

    def _summary_of(self, answer: Message) -> str:
        """The summary in an answer to `REQUEST`: its text, or the text of its call of the summary
        tool."""
        for call in answer.get("tool_calls") or []:
            arguments = parse_arguments(call["function"]["arguments"])
            if (text := self._own_summary(call["function"]["name"], arguments)) is not None:
                return text
        return str(answer.get("content") or "").strip()

    def _own_summary(self, name: str, arguments: Json) -> str | None:
        """The text of a valid call of the summary tool; None for any other call."""
        is_one = name == SUMMARISE and self._summarise_tool
        if not is_one or not isinstance(arguments, dict) or arguments.keys() != {"text"}:
            return None
        return arguments["text"] if isinstance(arguments["text"], str) else None


async def ask_model(
    http: aiohttp.ClientSession,
    base_url: str,
    api_key: str,
    body: Mapping[str, Json],
    kind: str = "turns",
) -> tuple[Message, int]:
    """The answer to a chat, and the number of tokens of the context including it. `kind`: of the
    segment, if the request opens one. Raises `OutOfContext` if the chat has become too long."""
    # The session has a time limit of its own; the client's default would cut off long answers of a
    # busy engine.
    no_limit = aiohttp.ClientTimeout(total=None)
    asking = partial(
        http.post,
        f"{base_url}/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {api_key}", "X-Etude-Segment": kind},
        timeout=no_limit,
    )
    async with await when_back(asking, aiohttp.ClientConnectionError) as response:
        if response.status != 200:
            said = await response.text()
            if response.status == 400 and "context_length_exceeded" in said:
                raise OutOfContext
            raise RolloutFailure(f"chat completions: status {response.status}: {said[:500]}")
        told = await response.json()
    message: Message = told["choices"][0]["message"]
    return message, (told.get("usage") or {}).get("total_tokens", 0)


def gave_up(messages: list[Message]) -> bool:
    """True after two answers in a row without a call: the model gets one reminder."""
    return [message["content"] for message in messages[-3::2]] == [NUDGE, NUDGE]


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one request, derived from the session's seed."""
    return derive(seed, turn)


def parse_arguments(text: str) -> Json:
    """The decoded arguments of a call; None, which no tool accepts, if they are not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # ValueError also covers numbers with too many digits
        return None
