"""Third-party command-line agents complete recorded sessions (`make test-agents`).

Each is asked to write a file, and its scripted model plays along: it calls the agent's own tool for
that and ends after the result. The tool must have run, and the session must be one unbroken segment
of exactly the sampled tokens, with their log-probs.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.agents.play import playing, recomputed, recorded
from tests.serve.scripted import TOKENIZER, call

pytestmark = pytest.mark.agents
INSTALLED = Path(__file__).parents[2] / ".agents"
TASK = "Write hi to the file made, then stop."
COMMAND = "echo hi > made"


@dataclass(frozen=True)
class Agent:
    """The command and environment of an agent, given the session's URL and a home of its own."""

    call: dict[str, Any]
    """Call of its tool that runs a command."""
    argv: Callable[[str, Path], list[str]]
    environment: Callable[[str, Path], dict[str, str]]
    end: str = "Done."
    """The last message of its model."""


def codex(url: str, home: Path) -> list[str]:
    provider = f'{{name="etude",base_url="{url}/v1",wire_api="responses"}}'
    return [
        str(INSTALLED / "node_modules/.bin/codex"), "exec", "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox", "-c", "model_provider=etude",
        "-c", f"model_providers.etude={provider}", "-m", "etude", TASK,
    ]  # fmt: skip


def qwen(url: str, home: Path) -> list[str]:
    return [
        str(INSTALLED / "node_modules/.bin/qwen"), "--auth-type", "openai", "--approval-mode",
        "yolo", "--openai-base-url", f"{url}/v1", "--openai-api-key", "x", "-m", "etude", "-p",
        TASK,
    ]  # fmt: skip


def opencode(url: str, home: Path) -> list[str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "x"},
        "models": {"etude": {}},
    }
    config = {"provider": {"etude": provider}, "autoupdate": False, "share": "disabled"}
    (home / "opencode.json").write_text(json.dumps(config))
    return [str(INSTALLED / "node_modules/.bin/opencode"), "run", "-m", "etude/etude", TASK]


def claude(url: str, home: Path) -> list[str]:
    return [
        str(INSTALLED / "node_modules/.bin/claude"), "--bare", "--model", "etude",
        "--allowedTools", "Bash", "-p", TASK,
    ]  # fmt: skip


def mini(url: str, home: Path) -> list[str]:
    return [
        str(INSTALLED / "venv/bin/mini"), "-t", TASK, "-y", "--exit-immediately", "-m",
        "openai/etude", "-c", "mini.yaml", "-c", f"model.model_kwargs.api_base={url}/v1",
    ]  # fmt: skip


def nothing_more(url: str, home: Path) -> dict[str, str]:
    return {}


AGENTS = {
    "codex": Agent(
        {"name": "exec_command", "arguments": {"cmd": COMMAND}},
        codex,
        lambda url, home: {"CODEX_HOME": str(home)},
    ),
    "qwen-code": Agent(
        {"name": "run_shell_command", "arguments": {"command": COMMAND, "is_background": False}},
        qwen,
        nothing_more,
    ),
    "opencode": Agent(
        {"name": "bash", "arguments": {"command": COMMAND, "description": "Writes the file"}},
        opencode,
        lambda url, home: {"OPENCODE_CONFIG": str(home / "opencode.json")},
    ),
    "claude-code": Agent(
        {"name": "Bash", "arguments": {"command": COMMAND, "description": "Writes the file"}},
        claude,
        lambda url, home: {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "x"},
    ),
    "mini-swe-agent": Agent(
        {"name": "bash", "arguments": {"command": COMMAND}},
        mini,
        lambda url, home: {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": str(home),
            "OPENAI_API_KEY": "x",
        },
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_completes_a_recorded_session(name: str, tmp_path: Path) -> None:
    agent = AGENTS[name]
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    async with playing(agent.call, agent.end) as (url, player):
        session = f"{url}/s/one"
        environment = {"HOME": str(home), "PATH": os.environ["PATH"], "CI": "1"}
        child = await asyncio.create_subprocess_exec(
            *agent.argv(session, home),
            cwd=work,
            env=environment | agent.environment(session, home),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        told, _ = await child.communicate()
        assert (work / "made").exists(), told.decode()[-3000:]
        assert (work / "made").read_text() == "hi\n"
        segments = await recorded(url, "one")
    # Exactly the sampled tokens are recorded as sampled.
    sampled = sorted(
        token for s in segments for token, drawn in zip(s.tokens, s.mask, strict=True) if drawn
    )
    assert sampled == sorted(token for tokens in player.said for token in tokens)
    # The recorded context of each token is the one that it was sampled from.
    assert all(s.logprobs == recomputed(s) for s in segments)
    # The conversation that called is one segment: the call, its result, and the end.
    (main,) = [s for s in segments if "<tool_call>" in TOKENIZER.decode(s.tokens)]
    text = TOKENIZER.decode(main.tokens)
    assert "<think>I should.</think>I do it now.<tool_call>" in text
    assert text.endswith(f"{agent.end}<|end|>")
