"""The settings of a run's file about tasks, sandboxes and rewards, as they arrive where they are
used."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from etude.core.config import RunConfig, parse
from etude.core.errors import EtudeError
from etude.core.sandbox import Limits
from etude.run import controller
from etude.run.controller import build_agent, build_review, open_environment
from etude.run.pull import PullEnvironment
from etude.run.service import ServiceEnvironment
from etude.sandbox.fleet import Need

RL = 'name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1\n'


def config(text: str) -> RunConfig:
    return parse(RL + text)


class Pool:
    tier = "gvisor"

    def __init__(self) -> None:
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments that pools were opened with."""
    found: list[dict[str, Any]] = []

    def open_pool(isolation: str, reply_timeout_s: float, **more: Any) -> Pool:
        found.append({"isolation": isolation, "reply_timeout_s": reply_timeout_s, **more})
        return Pool()

    monkeypatch.setattr(controller, "open_sandbox_pool", open_pool)
    monkeypatch.setattr(controller, "load", lambda reference, key: None)
    return found


async def test_sandboxes_are_as_the_file_of_the_run_says(
    opened: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[Any, ...]] = []
    monkeypatch.setattr(controller, "build", lambda *named, **told: built.append((*named, told)))
    monkeypatch.setattr(controller, "server_mounts", lambda config: ("/servers:/opt/servers",))
    said = config(
        '[sandbox]\nisolation = "gvisor"\nmounts = ["/opt/data"]\nimage = "img"\n'
        f'network_log = "{tmp_path / "log"}"\nmirrors = {{"pypi.org" = "10.0.0.1:8080"}}\n'
        "[sandbox.budget]\nmemory_mib = 3\n"
        '[tasks]\nenvironment = "mine.py:A"\npath = "/tasks"\ntrain = 4\nheldout = 2\nnovel = 1\n'
    )
    async with open_environment(said) as (_, pool):
        assert not pool.is_closed  # type: ignore[attr-defined]
    assert pool.is_closed  # type: ignore[attr-defined]
    (told,) = opened
    outside = told.pop("outside")
    assert outside.mirrors == {"pypi.org": ("10.0.0.1", 8080)}
    assert told == {
        "isolation": "gvisor",
        "reply_timeout_s": said.heartbeat_timeout_s,
        "mounts": ["/opt/data", *said.tasks.mounts, "/servers:/opt/servers"],
        "limits": said.sandbox.limits,
        "hosts": said.sandbox.hosts,
        "image": "img",
        "budget": Need(cpus=math.inf, memory_bytes=3 << 20, disk_bytes=math.inf),
    }
    assert isinstance(told["limits"], Limits)
    ((reference, key, given, how),) = built
    assert (reference, key, given) == ("mine.py:A", "tasks.environment", pool)
    assert how == {
        "counts": {"train": 4, "heldout": 2, "novel": 1},
        "seed": said.seed,
        "path": "/tasks",
    }


async def test_sessions_that_are_run_elsewhere_have_the_tasks_and_the_time_of_the_file(
    opened: list[dict[str, Any]], tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(f'{{"id": "{n}", "prompt": "x"}}\n' for n in range(9)))
    more = f'path = "{tasks}"\ntrain = 4\nheldout = 0\nnovel = 0\ntimeout_s = 77.0\n'
    for reference, kind in (("pull", PullEnvironment), ("http://host:1/x/", ServiceEnvironment)):
        said = config(f'[tasks]\nenvironment = "{reference}"\n{more}')
        async with open_environment(said) as (environment, _):
            assert type(environment) is kind
            assert [task.id for task in environment.tasks("train")] == ["0", "1", "2", "3"]
            waits = vars(environment).get("_wait_s", vars(environment).get("_claim_s"))
            assert waits == 77.0


@pytest.mark.parametrize(
    ("text", "need"),
    [
        ("", None),
        ("cpus = 2.5", Need(cpus=2.5, memory_bytes=math.inf, disk_bytes=math.inf)),
        ("disk_mib = 2", Need(cpus=math.inf, memory_bytes=math.inf, disk_bytes=2 << 20)),
        (
            "cpus = 1\nmemory_mib = 1\ndisk_mib = 1",
            Need(cpus=1, memory_bytes=1 << 20, disk_bytes=1 << 20),
        ),
    ],
)
def test_a_budget_bounds_what_it_names(text: str, need: Need | None) -> None:
    assert controller._budget(config(f"[sandbox.budget]\n{text}").sandbox.budget) == need


async def test_weaker_sandboxes_than_a_run_accepts_are_closed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool()
    pool.tier = "process"
    monkeypatch.setattr(controller, "open_sandbox_pool", lambda *named, **told: pool)
    said = config('[sandbox]\nisolation = "gvisor"\nmin_isolation = "gvisor"\n')
    with pytest.raises(EtudeError, match="only tier process, .* requires gvisor"):
        async with open_environment(said):
            pass
    assert pool.is_closed


HARNESS = "[harness]\nmax_turns = 3\nmax_tokens = 44\ntimeout_s = 5.0\ntool_delay_s = 0.5\n"
LIMITS = {
    "max_turns": 3, "max_tokens": 44, "timeout_s": 5.0, "temperature": 0.25, "tool_delay_s": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "agent", "key", "more"),
    [
        ('agent = "mine.py:A"', "mine.py:A", "harness.agent", {}),
        (
            'agent = "mine.py:A"\nsummarise_at = 90',
            "mine.py:A",
            "harness.agent",
            {"summarise_at": 90},
        ),
        (
            'command = ["run", "it"]\nenv = {A = "b"}',
            controller.COMMAND_AGENT,
            "harness.command",
            {"argv": ("run", "it"), "env": {"A": "b"}},
        ),
    ],
)
def test_an_agent_is_told_the_limits_of_the_file(
    text: str, agent: str, key: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[Any, ...]] = []
    monkeypatch.setattr(controller, "build", lambda *named, **told: built.append((*named, told)))
    harness = config(HARNESS + text).harness
    http: Any = object()
    build_agent(harness, http, http, desk=None, temperature=0.25)
    assert built == [(agent, key, http, LIMITS | more)]


def test_an_environment_may_bring_its_agent() -> None:
    told: list[Any] = []

    class Bringing:
        def own_agent(self, desk: object, **limits: Any) -> str:
            told.append((desk, limits))
            return "own"

    nobody: Any = None
    desk: Any = object()
    environment: Any = Bringing()
    harness = config(HARNESS + 'command = ["run"]').harness
    assert build_agent(harness, environment, nobody, desk=desk, temperature=0.25) == "own"  # type: ignore[comparison-overlap]
    assert told == [(desk, LIMITS)]


JUDGE = (
    '[rewards.judge]\nurl = "http://judge/v1"\nmodel = "m"\nvotes = 5\nneeded = 4\n'
    'temperature = 0.25\nrubrics = {tidy = "it is tidy"}\n'
)


def test_scores_stay_as_they_are_unless_the_file_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nobody: Any = None

    def review(text: str) -> Any:
        return build_review(config(text).rewards, nobody)

    assert review('[rewards]\ndetector = "off"') is None
    for text, detector in (("", True), ('[rewards]\ndetector = "flag"', True)):
        made = review(text)
        assert (made.detector, made.judge, made.reward) == (detector, None, None)
    made = review('[rewards]\ndetector = "off"\nreward = "environment * 2"')
    assert (made.detector, made.judge) == (False, None) and made.reward is not None
    seen: list[dict[str, Any]] = []

    def judge(http: object, **told: Any) -> str:
        seen.append(told)
        return "judge"

    monkeypatch.setattr(controller, "Judge", judge)
    monkeypatch.setenv("ETUDE_JUDGE_KEY", "secret")
    assert review(JUDGE).judge == "judge"
    asked = {name: seen[0][name] for name in ("url", "model", "votes", "needed", "temperature")}
    assert asked == {
        "url": "http://judge/v1", "model": "m", "votes": 5, "needed": 4, "temperature": 0.25,
    }  # fmt: skip
    assert seen[0]["rubrics"] == {"tidy": "it is tidy"} and seen[0]["api_key"] == "secret"
