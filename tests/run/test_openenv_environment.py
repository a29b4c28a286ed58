"""The adapter for OpenEnv, over a stand-in for its servers (`make test-adapters` uses the real
package)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.types import Attempt, Score, Transcript
from etude.run.openenv_environment import OpenEnvEnvironment
from etude.sandbox.fake import FakeSandbox, FakeSandboxPool

COUNTS = {"train": 6, "heldout": 2, "novel": 5}
LIMITS: dict[str, Any] = {
    "max_turns": 4,
    "max_tokens": 20,
    "timeout_s": 60.0,
    "temperature": 0.5,
    "tool_delay_s": 0.0,
}
GUESS = {
    "title": "Guess",
    "type": "object",
    "properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["number"],
}
MCP = {"type": "object", "properties": {"tool_name": {"type": "string"}}}
INVALID = {"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": ["number"]}}
FULL = {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "1 of 1"}}
BROKEN = {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "boom"}}


def saw(text: str, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    told = {"observation": {"text": text}, "reward": reward, "done": done}
    return {"type": "observation", "data": told}


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


class World:
    """An OpenEnv server and a model, both following a script."""

    def __init__(
        self, folder: Path, action: Any, said: Sequence[Any], answers: Sequence[dict[str, Any]]
    ) -> None:
        self._folder = folder
        self._action = action
        self._said: Iterator[Any] = iter(said)
        self._answers = iter(answers)
        self.told: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []

    @asynccontextmanager
    async def at(self) -> AsyncIterator[tuple[str, OpenEnvEnvironment]]:
        app = web.Application()
        app.router.add_get("/{about:metadata|schema}", self._about)
        app.router.add_get("/ws", self._episode)
        app.router.add_post("/v1/chat/completions", self._chat)
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            yield url, await asyncio.to_thread(environment, self._folder, url)

    async def run(self) -> Transcript:
        async with self.at() as (url, made):
            (task, *_) = made.tasks("train")
            agent = made.own_agent(None, **LIMITS)
            async with made.open(task) as nothing:
                done = await agent.run(task, nothing, base_url=f"{url}/v1", api_key="k", seed=1)
                score = await made.score(task, nothing, Attempt(transcript=done, segments=()))
        assert score == done.score
        return done

    async def _about(self, request: web.Request) -> web.Response:
        about = {"name": "g", "description": "Guess.", "action": self._action}
        return web.json_response(about)

    async def _episode(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            self.told.append(message.json())
            if (said := next(self._said)) is None:
                await socket.close()
            else:
                await socket.send_json(said)
        return socket

    async def _chat(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        return web.json_response({"choices": [{"message": next(self._answers)}]})


def environment(folder: Path, url: str) -> OpenEnvEnvironment:
    place = folder / "guess.toml"
    place.write_text(f'url = "{url}"\n[reset]\nlevel = 2\n')
    return OpenEnvEnvironment(FakeSandboxPool(), counts=COUNTS, seed=0, path=str(place))


async def test_an_episode_is_worth_the_sum_of_its_rewards(tmp_path: Path) -> None:
    world = World(
        tmp_path,
        GUESS,
        [saw("From 1 to 9."), saw("higher", 0.25), INVALID, saw("yes", 1.0, done=True)],
        [calls("step", number=3), calls("step", what=1), calls("step", number=7)],
    )
    done = await world.run()
    assert done.finished
    assert done.score is not None and done.score.reward == 1.25
    assert [part.value for part in done.score.parts] == [2.0, 1.0]
    assert [message["content"] for message in done.messages if message["role"] != "assistant"] == [
        "Guess.\n\nFrom 1 to 9.", "higher", 'error: ["number"]', "yes"
    ]  # fmt: skip
    reset, *steps = world.told
    assert reset["type"] == "reset" and isinstance(reset["data"].pop("seed"), int)
    assert reset["data"] == {"level": 2}
    assert [step["data"] for step in steps] == [{"number": 3}, {"what": 1}, {"number": 7}]
    (tool,) = world.asked[0]["tools"]
    assert tool["function"]["name"] == "step"
    assert list(tool["function"]["parameters"]["properties"]) == ["number"]


async def test_all_calls_of_an_answer_are_made_until_the_episode_ends(tmp_path: Path) -> None:
    several = calls("step", number=3)
    for number in (7, 9):
        several["tool_calls"] += calls("step", number=number)["tool_calls"]
    said = [saw("From 1 to 9."), saw("higher", 0.25), saw("yes", 1.0, done=True)]
    world = World(tmp_path, GUESS, said, [several])
    done = await world.run()
    assert done.finished and done.score is not None and done.score.reward == 1.25
    assert [step["data"] for step in world.told[1:]] == [{"number": 3}, {"number": 7}]
    assert [each["content"] for each in done.messages if each["role"] == "tool"] == [
        "higher", "yes"
    ]  # fmt: skip


async def test_tools_that_an_environment_lists_are_those_of_the_model(tmp_path: Path) -> None:
    listed = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
    tools = {"type": "observation", "data": {"observation": {"tools": [listed]}}}
    world = World(
        tmp_path, MCP, [saw("Begin."), tools, saw("a door", 1.0, True)], [calls("look", at="it")]
    )
    done = await world.run()
    assert done.finished and done.messages[0]["content"].endswith("Begin.")
    assert world.asked[0]["tools"][0]["function"]["name"] == "look"
    assert world.told[-1]["data"] == {
        "type": "call_tool", "tool_name": "look", "arguments": {"at": "it"}
    }  # fmt: skip


async def test_a_place_is_waited_for_and_an_unfinished_episode_keeps_what_it_earned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("etude.run.openenv_environment.RETRY_S", 0.0)
    turns = LIMITS["max_turns"]
    world = World(
        tmp_path,
        GUESS,
        [FULL, FULL, saw("Go."), *[saw("no", 0.5)] * turns],
        [calls("step", number=1)] * turns,
    )
    done = await world.run()
    assert (done.finished, done.limit) == (False, "turns")
    assert isinstance(done.score, Score) and done.score.reward == 0.5 * turns


async def test_a_model_that_never_acts_has_earned_nothing(tmp_path: Path) -> None:
    silent = {"role": "assistant", "content": "I wait."}
    done = await World(tmp_path, GUESS, [saw("Go.")], [silent, silent]).run()
    assert not done.finished
    assert done.score is not None and done.score.reward == 0.0


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([BROKEN], "boom"),
        ([saw("Go."), BROKEN], "boom"),
        ([saw("Go."), None], "ended the episode early"),
        ([saw("Go."), saw("end", done=True)], "without any reward"),
    ],
)
async def test_what_breaks_at_a_server_is_never_a_result(
    said: list[Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(RolloutFailure, match=why):
        await World(tmp_path, GUESS, said, [calls("step", number=1)]).run()


async def test_tasks_are_seeds_and_a_share_is_held_out(tmp_path: Path) -> None:
    async with World(tmp_path, GUESS, [], []).at() as (_, made):
        found = {split: [task.id for task in made.tasks(split)] for split in COUNTS}
        assert {split: len(ids) for split, ids in found.items()} == COUNTS | {"novel": 0}
        assert not set(found["train"]) & set(found["heldout"])
        assert found == {split: [task.id for task in made.tasks(split)] for split in COUNTS}


@pytest.mark.parametrize("text", [None, "url = "])
def test_a_file_that_cannot_be_read_says_so(text: str | None, tmp_path: Path) -> None:
    place = tmp_path / "guess.toml"
    if text is not None:
        place.write_text(text)
    with pytest.raises(EtudeError, match=f"^tasks.path = '{place}' cannot be read: "):
        OpenEnvEnvironment(FakeSandboxPool(), counts=COUNTS, seed=0, path=str(place))


async def test_no_place_in_time_is_a_failure_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(LIMITS, "timeout_s", 0.25)
    monkeypatch.setattr("etude.run.openenv_environment.RETRY_S", 60.0)
    with pytest.raises(
        RolloutFailure, match=r"no free place within 0\.25 s \(harness\.timeout_s\)"
    ):
        await World(tmp_path, GUESS, [FULL], []).run()


async def test_a_server_that_is_gone_begins_no_episode(tmp_path: Path) -> None:
    async with World(tmp_path, GUESS, [], []).at() as (url, made):
        task = made.tasks("train")[0]
    agent, sandbox = made.own_agent(None, **LIMITS), FakeSandbox({})
    with pytest.raises(RolloutFailure, match=f"^{url}: cannot start an episode: "):
        await agent.run(task, sandbox, base_url=f"{url}/v1", api_key="k", seed=1)


async def test_only_its_own_time_limit_ends_an_episode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def late(*about: Any) -> Any:
        raise TimeoutError("of somebody else")

    async def never(*about: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr("etude.run.openenv_environment.ask_model", late)
    with pytest.raises(TimeoutError, match="of somebody else"):
        await World(tmp_path, GUESS, [saw("Go.")], []).run()
    monkeypatch.setattr("etude.run.openenv_environment.ask_model", never)
    limits = iter([60.0, 0.01])  # for a place, and for the episode
    calls = SimpleNamespace(timeout=lambda _: asyncio.timeout(next(limits)))
    monkeypatch.setattr("etude.run.openenv_environment.asyncio", calls)
    done = await World(tmp_path, GUESS, [saw("Go.")], []).run()
    assert (done.limit, done.finished) == ("time", False)


async def test_an_observation_of_several_parts_is_shown_as_json(tmp_path: Path) -> None:
    silent = {"role": "assistant", "content": "I wait."}
    observation = {"text": "Grüße", "score": 3, "metadata": {"a": 1}}
    begin = {"observation": observation, "reward": None, "done": False}
    world = World(tmp_path, GUESS, [{"type": "observation", "data": begin}], [silent, silent])
    await world.run()
    shown = world.asked[0]["messages"][0]["content"].rpartition("\n\n")[2]
    assert shown == '{"text": "Grüße", "score": 3}'


def test_a_url_without_a_server_says_so(tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="as an OpenEnv server"):
        environment(tmp_path, "http://127.0.0.1:9")
    (tmp_path / "nothing.toml").write_text("")
    with pytest.raises(EtudeError, match="set the URL of the OpenEnv server"):
        OpenEnvEnvironment(
            FakeSandboxPool(), counts=COUNTS, seed=0, path=str(tmp_path / "nothing.toml")
        )
