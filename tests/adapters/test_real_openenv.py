"""An OpenEnv environment behind that package's own server, played in a recorded session."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from etude.core.types import Attempt, turns
from etude.launch.launcher import free_ports
from etude.run.openenv_environment import OpenEnvEnvironment
from etude.sandbox.fake import FakeSandboxPool
from tests.agents.play import playing, recorded
from tests.serve.scripted import TOKENIZER

pytestmark = pytest.mark.adapters

LIMITS = {"max_turns": 4, "max_tokens": 200, "timeout_s": 300.0, "temperature": 1.0}


@pytest.fixture
def server() -> Iterator[str]:
    pytest.importorskip("openenv.core", reason="openenv is not installed")
    (port,) = free_ports(1)
    url, toy = f"http://127.0.0.1:{port}", Path(__file__).with_name("toy_guess.py")
    child = subprocess.Popen([sys.executable, str(toy), str(port)])
    try:
        while child.poll() is None:
            try:
                urlopen(f"{url}/health", timeout=60).close()
                break
            except URLError:
                time.sleep(0.2)
        assert child.poll() is None, "the server ended"
        yield url
    finally:
        child.kill()
        child.wait()


def environment_at(server: str, folder: Path) -> OpenEnvEnvironment:
    place = folder / "guess.toml"
    place.write_text(f'url = "{server}"\n')
    counts = {"train": 3, "heldout": 1, "novel": 0}
    return OpenEnvEnvironment(FakeSandboxPool(), counts=counts, seed=0, path=str(place))


@pytest.mark.timeout(600)
async def test_an_episode_is_a_recorded_session(server: str, tmp_path: Path) -> None:
    environment = environment_at(server, tmp_path)
    task = environment.tasks("train")[1]
    number = int(task.id.rpartition("/")[2]) % 10
    agent = environment.own_agent(None, **LIMITS)
    use = {"name": "step", "arguments": {"number": number}}
    async with (
        playing(use, "It is done.") as (url, player),
        environment.open(task) as nothing,
    ):
        done = await agent.run(task, nothing, base_url=f"{url}/s/one/v1", api_key="k", seed=1)
        (segment,) = await recorded(url, "one")
        score = await environment.score(task, nothing, Attempt(transcript=done, segments=()))
    assert done.finished
    assert [message["role"] for message in done.messages] == ["user", "assistant", "tool"]
    assert done.messages[0]["content"] == f"Guess a number.\n\nIt is {number}."
    assert done.messages[-1]["content"] == "yes"
    assert score.reward == 1.0
    spoken = [tuple(segment.tokens[place] for place in answer) for answer in turns(segment)]
    assert spoken == player.said, [TOKENIZER.decode(each) for each in spoken]


@pytest.mark.timeout(600)
async def test_what_is_no_action_is_told_to_the_model(server: str, tmp_path: Path) -> None:
    environment = environment_at(server, tmp_path)
    task = environment.tasks("train")[0]
    agent = environment.own_agent(None, **LIMITS | {"max_turns": 1})
    async with (
        playing({"name": "step", "arguments": {"number": "?"}}, ".") as (url, _),
        environment.open(task) as nothing,
    ):
        done = await agent.run(task, nothing, base_url=f"{url}/s/one/v1", api_key="k", seed=1)
    assert not done.finished
    assert done.score is not None and done.score.reward == 0.0
    assert "valid integer" in done.messages[-1]["content"]
