"""A taskset of `verifiers` with a tool, played by that package itself in recorded sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.core.types import Attempt, turns
from etude.run.verifiers_environment import VerifiersEnvironment
from etude.sandbox.fake import FakeSandboxPool
from tests.agents.play import playing, recorded
from tests.serve.scripted import TOKENIZER

pytestmark = pytest.mark.adapters

CONFIG = """
[env.taskset]
id = "toy-sums"
[env.agent.harness]
id = "null"
[env.agent.runtime]
type = "subprocess"
"""
LIMITS = {"max_turns": 4, "max_tokens": 200, "timeout_s": 300.0, "temperature": 1.0}


@pytest.mark.timeout(600)
async def test_an_episode_is_a_recorded_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # the tool runs elsewhere
    (tmp_path / "sums.toml").write_text(CONFIG)
    environment = VerifiersEnvironment(
        FakeSandboxPool(),
        counts={"train": 3, "heldout": 2, "novel": 0},
        seed=0,
        path=str(tmp_path / "sums.toml"),
    )
    train, heldout = environment.tasks("train"), environment.tasks("heldout")
    assert (len(train), len(heldout)) == (3, 2)
    assert not {task.id for task in train} & {task.id for task in heldout}

    task = train[0]
    number = int(task.id.rpartition("/")[2])
    assert task.prompt == f"{number} + 3 = ?"
    agent = environment.own_agent(None, **LIMITS)
    use = {"name": "adder_add", "arguments": {"a": number, "b": 3}}
    async with (
        playing(use, str(number + 3)) as (url, player),
        environment.open(task) as nothing,
    ):
        done = await agent.run(task, nothing, base_url=f"{url}/s/one/v1", api_key="k", seed=1)
        (segment,) = await recorded(url, "one")
        score = await environment.score(task, nothing, Attempt(transcript=done, segments=()))
    assert done.finished
    assert [message["role"] for message in done.messages] == [
        "user", "assistant", "tool", "assistant"
    ]  # fmt: skip
    assert score.reward == 1.0
    assert {part.name: part.value for part in score.parts} == {"right": 1.0, "calls": 1.0}
    spoken = [tuple(segment.tokens[place] for place in answer) for answer in turns(segment)]
    assert spoken == player.said, [TOKENIZER.decode(each) for each in spoken]
