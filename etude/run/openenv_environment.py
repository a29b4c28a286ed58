"""OpenEnv environments, at the URL of their server.

    GET /metadata, /schema     the environment's description, and the schema of an action
    WS  /ws                    one episode: {"type": "reset" | "step", "data": ..}, each answered by
                               {"type": "observation", "data": {observation, reward, done}}

The model is shown the environment's description and its first observation, and acts by calling
tools: those that the environment lists, or, if it lists none, a single tool `step`, whose arguments
are an action. Every other observation is the result of a call. A task is a seed, and an episode is
worth the sum of its rewards.

OpenEnv itself is not needed here: the server has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import aiohttp

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import Sandbox, SandboxPool, SandboxSpec
from etude.core.types import Attempt, Json, Limit, Part, Score, Task, Transcript
from etude.harness.agent import (
    NUDGE,
    OutOfContext,
    ask_model,
    gave_up,
    parse_arguments,
    turn_seed,
)
from etude.harness.summary import Message
from etude.run.rollout import SessionDesk
from etude.run.task_folder import HELDOUT_SHARE, hash_of
from etude.sandbox.fake import FakeSandboxPool

ASK_S = 30.0
"""Time for a server's answers about itself."""
RETRY_S = 0.5
"""Time between two attempts to get one of the server's places."""
MAX_MESSAGE_BYTES = 64 << 20
STEP = "step"
NOT_SAID = ("done", "reward", "metadata")
"""Fields of an observation that the model does not see, and fields of an action that it does not
choose."""


class OpenEnvEnvironment:
    """A `core.protocols.Environment`. `tasks.path` names a TOML file with `url`, that of an OpenEnv
    server, and further arguments of its `reset` in a table `[reset]`."""

    def __init__(
        self, pool: SandboxPool, *, counts: Mapping[str, int], seed: int, path: str
    ) -> None:
        """`counts`: split -> number of tasks. `path`: the file."""
        self._counts = counts
        self._url, self._reset = self._read(Path(path))
        about = self._get("/metadata")
        self._name = str(about.get("name") or "openenv")
        self._about = str(about.get("description") or self._name)
        self._action = self._get("/schema").get("action") or {}

    def _read(self, path: Path) -> tuple[str, dict[str, Json]]:
        try:
            told = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as e:
            raise EtudeError(f"tasks.path = {str(path)!r} cannot be read: {e}") from e
        if not isinstance(told.get("url"), str) or not isinstance(told.get("reset", {}), dict):
            raise EtudeError(
                f'{path}: set the URL of the OpenEnv server, url = "http://..", and optionally a '
                "table [reset] with arguments for its reset"
            )
        return told["url"].rstrip("/"), told.get("reset", {})

    def _get(self, path: str) -> dict[str, Any]:
        """Send a GET request. Blocks: this happens before anything else runs."""
        try:
            with urlopen(self._url + path, timeout=ASK_S) as answer:
                found = json.loads(answer.read())
        except (URLError, OSError, ValueError) as e:
            raise EtudeError(
                f"{self._url} does not answer {path} as an OpenEnv server ({e}): start the "
                "server, and set its URL in the file that tasks.path names"
            ) from e
        return found if isinstance(found, dict) else {}

    def tasks(self, split: str) -> Sequence[Task]:
        """Seeds from 0 on. One in four, by a hash, is held out. None are novel."""
        wanted = self._counts[split] if split in ("train", "heldout") else 0
        names = (f"{self._name}/{seed}" for seed in count())
        chosen = (
            name
            for name in names
            if ("heldout" if hash_of(name) % HELDOUT_SHARE == 0 else "train") == split
        )
        return [Task(id=name, prompt=self._about) for name in islice(chosen, wanted)]

    @contextlib.asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        """An empty sandbox: the episode runs at the server, so there is nothing to look at here."""
        async with FakeSandboxPool().open(SandboxSpec()) as nothing:
            yield nothing

    def own_agent(self, desk: SessionDesk | None, **limits: Any) -> OpenEnvAgent:
        return OpenEnvAgent(self._url, self._action, self._reset, **limits)

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        assert attempt.transcript.score is not None
        return attempt.transcript.score


class OpenEnvAgent:
    """A `core.protocols.Agent`: the model plays one episode."""

    def __init__(
        self,
        url: str,
        action: Mapping[str, Json],
        reset: Mapping[str, Json],
        *,
        max_turns: int,
        max_tokens: int,
        timeout_s: float,
        temperature: float,
        **unused: Any,
    ) -> None:
        """`action`: the schema of an action. `reset`: further arguments of a reset."""
        self._url = url
        self._action = action
        self._reset = reset
        self._max_turns = max_turns
        self._timeout_s = timeout_s
        self._sampling = {"model": "etude", "max_tokens": max_tokens, "temperature": temperature}

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        number = int(task.id.rpartition("/")[2])
        async with aiohttp.ClientSession() as http, self._begun(http, number) as episode:
            opening = f"{task.prompt}\n\n{episode.shown}"
            tools = await self._tools(episode)
            messages: list[Message] = [{"role": "user", "content": opening}]
            limit: Limit = "turns"
            try:
                async with asyncio.timeout(self._timeout_s) as deadline:
                    for turn in range(self._max_turns):
                        asked = {"messages": messages, "tools": tools}
                        told = self._sampling | asked | {"seed": turn_seed(seed, turn)}
                        answer, _ = await ask_model(http, base_url, api_key, told)
                        messages.append(answer)
                        await self._act(answer, episode, messages)
                        if episode.done or gave_up(messages):
                            break
            except TimeoutError:
                if not deadline.expired():
                    raise
                limit = "time"
            except OutOfContext:
                limit = "context"
            return Transcript(
                messages=messages, finished=episode.done, limit=limit, score=episode.score()
            )

    @contextlib.asynccontextmanager
    async def _begun(self, http: aiohttp.ClientSession, seed: int) -> AsyncIterator[Episode]:
        """An episode after its reset. A server has a limited number of places: wait for one."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while (episode := await self._place(http, seed)) is None:
                    await asyncio.sleep(RETRY_S)
        except TimeoutError as e:
            raise RolloutFailure(
                f"{self._url}: no free place within {self._timeout_s:g} s (harness.timeout_s): "
                "raise the server's max_concurrent_envs, or lower the run's harness.concurrency"
            ) from e
        try:
            yield episode
        finally:
            await episode.socket.close()

    async def _place(self, http: aiohttp.ClientSession, seed: int) -> Episode | None:
        try:
            socket = await http.ws_connect(f"{self._url}/ws", max_msg_size=MAX_MESSAGE_BYTES)
        except aiohttp.ClientError as e:
            raise RolloutFailure(f"{self._url}: cannot start an episode: {e}") from e
        episode = Episode(socket)
        try:
            await episode.tell("reset", {**self._reset, "seed": seed})
        except Full:
            await socket.close()
            return None
        except BaseException:
            await socket.close()
            raise
        return episode

    async def _tools(self, episode: Episode) -> list[Json]:
        """The tools in OpenAI's format."""
        if not self._lists_tools:
            wanted = _without(self._action, NOT_SAID)
            return [_tool(STEP, "Take one step in the environment.", wanted)]
        await episode.tell("step", {"type": "list_tools"})
        return [
            _tool(each["name"], each.get("description") or "", each.get("input_schema") or {})
            for each in episode.observation.get("tools", ())
        ]

    @property
    def _lists_tools(self) -> bool:
        """True if the environment lists tools, as one over MCP does."""
        return "tool_name" in (self._action.get("properties") or {})

    async def _act(self, answer: Message, episode: Episode, messages: list[Message]) -> None:
        """Execute the tool calls of an answer, and append their results to the messages."""
        calls = answer.get("tool_calls") or []
        if not calls:
            messages.append({"role": "user", "content": NUDGE})
        for call in calls:
            name = call["function"]["name"]
            arguments = parse_arguments(call["function"]["arguments"])
            content = await self._step(name, arguments, episode)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if episode.done:
                return

    async def _step(self, name: str, arguments: Json, episode: Episode) -> str:
        if not isinstance(arguments, dict):
            return "error: the arguments must be an object"
        if self._lists_tools:
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        elif name == STEP:
            action = arguments
        else:
            return f"error: there is no tool {name!r}, only {STEP}"
        try:
            await episode.tell("step", action)
        except Refused as e:
            return f"error: {e}"
        episode.num_steps += 1
        return episode.shown


class Full(Exception):
    """The OpenEnv server has no free place for an episode now."""


class Refused(Exception):
    """The OpenEnv server rejected the model's action as invalid."""


@dataclass(slots=True)
class Episode:
    """One episode at a server, in its current state."""

    socket: aiohttp.ClientWebSocketResponse
    observation: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    rewards: list[float] = field(default_factory=list)
    num_steps: int = 0

    async def tell(self, kind: str, data: Mapping[str, Json]) -> None:
        """Send a message, and store the observation of the answer. Raises `Refused` for an invalid
        action, `Full` if there is no place, and RolloutFailure for everything else."""
        try:
            await self.socket.send_json({"type": kind, "data": data})
            told = await self.socket.receive_json()
        except (aiohttp.ClientError, TypeError, ValueError) as e:
            raise RolloutFailure(f"OpenEnv: the server ended the episode early: {e}") from e
        found = told.get("data") or {}
        if told.get("type") == "error":
            self._raise(found)
        self.observation = found.get("observation") or {}
        self.done = bool(found.get("done"))
        if found.get("reward") is not None:
            self.rewards.append(float(found["reward"]))

    def _raise(self, error: Mapping[str, Any]) -> None:
        message = str(error.get("message"))
        match error.get("code"):
            case "CAPACITY_REACHED":
                raise Full(message)
            case "VALIDATION_ERROR":
                raise Refused(json.dumps(error.get("errors", message), default=str))
        raise RolloutFailure(f"OpenEnv: {error.get('code')}: {message}")

    @property
    def shown(self) -> str:
        """The observation as the model sees it."""
        said = _without(self.observation, NOT_SAID)
        texts = list(said.values())
        if len(texts) == 1 and isinstance(texts[0], str):
            return texts[0]
        return json.dumps(said, ensure_ascii=False)

    def score(self) -> Score:
        if self.done and not self.rewards:
            raise RolloutFailure("OpenEnv: the episode ended without any reward")
        last = self.rewards[-1] if self.rewards else 0.0
        parts = Part("steps", float(self.num_steps)), Part("last reward", last)
        return Score(sum(self.rewards), parts)


def _tool(name: str, description: str, parameters: Mapping[str, Json]) -> Json:
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def _without(told: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A schema without these properties."""
    left = {key: value for key, value in told.items() if key not in names}
    if isinstance(properties := left.get("properties"), dict):
        left["properties"] = _without(properties, names)
    return left
