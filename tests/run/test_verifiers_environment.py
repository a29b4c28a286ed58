"""The adapter for `verifiers`, over a stand-in for the package (`make test-adapters` uses the real
one)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.types import Attempt
from etude.run.verifiers_environment import VerifiersEnvironment, to_transcript
from etude.sandbox.fake import FakeSandboxPool

COUNTS = {"train": 6, "heldout": 2, "novel": 5}
LIMITS: dict[str, Any] = {
    "max_turns": 7,
    "max_tokens": 20,
    "timeout_s": 60.0,
    "temperature": 0.5,
    "tool_delay_s": 0.0,
}


class Record(SimpleNamespace):
    """A stand-in for a pydantic model."""

    def model_copy(self, update: dict[str, Any]) -> Record:
        return Record(**{**vars(self), **update})

    def model_dump(self, **unused: Any) -> dict[str, Any]:
        return vars(self)


class Config(Record):
    def agent_harnesses(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name.startswith("agent")}

    def model_copy(self, update: dict[str, Any]) -> Config:
        return Config(**{**vars(self), **update})


def a_trace(**changes: Any) -> Record:
    told: dict[str, Any] = {
        "rewards": {"right": Record(score=1.0, weight=0.5), "short": Record(score=0.5, weight=1.0)},
        "metrics": {"calls": 2.0, "right": 3.0, "unknown": None},
        "reward": 1.0,
        "messages": [Record(role="user", content="hi"), Record(role="assistant", content="ho")],
        "is_truncated": False,
        "is_timeout": False,
        "errors": [],
    }
    return Record(**told | changes)


def an_episode(ok: bool = True, **changes: Any) -> Record:
    return Record(ok=ok, errors=[], traces=[a_trace(**changes)])


Play = Callable[[Any, Any, Any], Any]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> list[Play]:
    """A list whose first entry scripts an episode: called with configuration, task and context."""
    plays: list[Play] = [lambda config, task, context: an_episode()]

    class Environment:
        def __init__(self, config: Any) -> None:
            self.config = config

        @contextlib.asynccontextmanager
        async def serving(self) -> AsyncIterator[None]:
            yield

        async def run_episode(self, task: Any, context: Any) -> Any:
            played = plays[0](self.config, task, context)
            return await played if asyncio.iscoroutine(played) else played

    def resolve(told: dict[str, Any]) -> Config:
        seats = {name: Record(**told[name]) for name in told if name.startswith("agent")}
        return Config(taskset=Record(**told["taskset"]), env_id=told["taskset"]["id"], **seats)

    def load_taskset(config: Any) -> Any:
        for number in range(10**9):  # tasksets may be endless
            yield Record(data=Record(idx=number, prompt_text=f"ask {number}", name=None))

    package, fake = ModuleType("verifiers"), ModuleType("verifiers.v1")
    fake.__dict__.update(
        resolve_env_config=resolve,
        load_taskset=load_taskset,
        load_environment=Environment,
        ModelContext=Record,
        EvalClientConfig=Record,
        SamplingConfig=Record,
    )
    package.v1 = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", fake)
    return plays


def an_environment(folder: Path, text: str = "[env.agent]\nmax_turns = 3\n") -> Any:
    (folder / "env.toml").write_text(f'[env.taskset]\nid = "sums"\n{text}')
    return VerifiersEnvironment(
        FakeSandboxPool(), counts=COUNTS, seed=0, path=str(folder / "env.toml")
    )


def test_tasks_are_split_the_same_way_every_time(play: list[Play], tmp_path: Path) -> None:
    environment = an_environment(tmp_path)
    train, heldout = environment.tasks("train"), environment.tasks("heldout")
    assert (len(train), len(heldout), len(environment.tasks("novel"))) == (6, 2, 0)
    assert not {task.id for task in train} & {task.id for task in heldout}
    assert train == an_environment(tmp_path).tasks("train")
    assert train[0].prompt == f"ask {train[0].id.removeprefix('sums/')}"


async def test_an_episode_asks_at_the_url_of_its_session(play: list[Play], tmp_path: Path) -> None:
    seen: list[Any] = []

    def look(config: Any, task: Any, context: Any) -> Any:
        variable = context.client.api_key_var
        assert "API_KEY" in variable  # not passed on to the programs of a runtime
        seen.append((config.agent.max_turns, task.data.idx, os.environ[variable], variable))
        seen.append((context.client.base_url, vars(context.sampling)))
        return an_episode()

    play.insert(0, look)
    environment = an_environment(tmp_path)
    (task, *_) = environment.tasks("train")
    agent = environment.own_agent(None, **LIMITS)
    async with environment.open(task) as nothing:
        done = await agent.run(task, nothing, base_url="http://x/s/1/v1", api_key="k", seed=9)
        score = await environment.score(task, nothing, Attempt(transcript=done, segments=()))
    turns, number, key, variable = seen[0]
    assert (turns, f"sums/{number}", key) == (3, task.id, "k")
    assert variable not in os.environ
    assert seen[1] == ("http://x/s/1/v1", {"temperature": 0.5, "max_tokens": 20, "seed": 9})
    assert done.finished
    assert [message["content"] for message in done.messages] == ["hi", "ho"]
    assert score.reward == 1.0
    assert {part.name: part.value for part in score.parts} == {
        "right": 1.0, "short": 0.5, "calls": 2.0, "metric right": 3.0
    }  # fmt: skip


def test_limits_of_the_run_hold_where_the_environment_names_none(
    play: list[Play], tmp_path: Path
) -> None:
    agent = an_environment(tmp_path, "[env.agent]\nmax_turns = 0\n").own_agent(None, **LIMITS)
    assert agent._config.agent.max_turns == 7


@pytest.mark.parametrize(
    ("episode", "told"),
    [
        (an_episode(ok=False, errors=[Record(type="ToolsetError", message="gone")]), "gone"),
        (an_episode(ok=False), "no reason given"),
        (an_episode(rewards={"right": None}), "'right' was not computed"),
    ],
)
def test_what_breaks_is_no_reward(episode: Any, told: str) -> None:
    with pytest.raises(RolloutFailure, match=told):
        to_transcript(episode)


def test_what_was_cut_off_is_scored_and_not_finished() -> None:
    done = to_transcript(an_episode(is_truncated=True))
    assert (done.finished, done.limit) == (False, "turns")
    assert done.score is not None


def test_tool_calls_are_told_as_openai_writes_them() -> None:
    """The detector, the judge and the dashboard read this format."""
    call = {"id": "c1", "type": "function", "name": "bash", "arguments": '{"command": "ls"}'}
    done = to_transcript(an_episode(messages=[Record(role="assistant", tool_calls=[call])]))
    function = {"name": "bash", "arguments": '{"command": "ls"}'}
    assert done.messages == [
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
    ]


async def test_an_episode_that_hangs_is_ended(play: list[Play], tmp_path: Path) -> None:
    play.insert(0, lambda config, task, context: asyncio.sleep(1000))
    environment = an_environment(tmp_path)
    (task, *_) = environment.tasks("train")
    agent = environment.own_agent(None, **{**LIMITS, "timeout_s": 0.05})
    async with environment.open(task) as nothing:
        with pytest.raises(RolloutFailure, match=r"harness\.timeout_s"):
            await agent.run(task, nothing, base_url="http://x/v1", api_key="k", seed=0)


def test_several_agents_are_refused(play: list[Play], tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="2 agents"):
        an_environment(tmp_path, "[env.agent]\nmax_turns = 1\n[env.agent_two]\nmax_turns = 1\n")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(EtudeError, match=r"pip install 'etude\[verifiers\]'"):
        an_environment(tmp_path)
