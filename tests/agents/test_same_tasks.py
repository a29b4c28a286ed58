"""Our coding harness and mini-swe-agent solve the same 20 tasks through one gateway (`make
test-agents`).

A scripted model plays both: it knows the solution of each task, and gives it in the tools of the
agent that asks. All attempts must earn the full reward, and exactly the sampled tokens must be
recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from etude.core.harness_config import CodeConfig
from etude.core.protocols import Agent
from etude.core.sampling import Request, Sample
from etude.core.sandbox import Limits
from etude.core.types import Attempt, Task
from etude.harness.code.agent import CodeAgent
from etude.harness.program import CommandAgent
from etude.run.environment import CodeRepair
from etude.sandbox.pool import open_sandbox_pool
from tests.agents.play import Player, playing_with, recomputed, recorded
from tests.namespaces import need_namespaces
from tests.serve.scripted import TOKENIZER, call

pytestmark = pytest.mark.agents
INSTALLED = Path(__file__).parents[2] / ".agents" / "venv"
COUNT = 20
LIMITS = {"max_turns": 8, "max_tokens": 4096, "timeout_s": 1200.0, "temperature": 1.0}
MINI = [
    "/opt/agent/bin/python", "-m", "minisweagent.run.mini", "-t", "{prompt}", "-y",
    "--exit-immediately", "-m", "openai/etude", "-c", "mini.yaml",
    "-c", "model.model_kwargs.api_base={base_url}",
]  # fmt: skip
MINI_ENV = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini",
}


class Both(Player):
    """A model that solves the task named in the prompt, with the tools that it is offered."""

    def __init__(self, tasks: list[Task], solutions: dict[str, dict[str, str]]) -> None:
        super().__init__({"name": "", "arguments": {}}, "")
        self._tasks = {task.id: task for task in tasks}
        self._solutions = solutions

    async def sample(self, request: Request) -> Sample:
        shown = TOKENIZER.decode(request.prompt)
        found = re.search(r"\[task ([^\]]+)\]", shown)
        assert found is not None, shown[-2000:]
        [(path, good)] = self._solutions[found[1]].items()
        bad = str(self._tasks[found[1]].sandbox.files[path])
        plays = self._ours if '"apply_patch"' in shown else self._mini
        turn = shown.count("<|assistant|>") - 1
        return await self.say(plays(path, bad, good)[turn], request)

    def _ours(self, path: str, bad: str, good: str) -> list[str]:
        old, new = difference(bad, good)
        return [
            call("glob", pattern="*.py") + call("read", path=path),
            call("edit", path=path, old=old, new=new) + call("run_tests"),
            call("submit"),
        ]

    def _mini(self, path: str, bad: str, good: str) -> list[str]:
        return [
            call("bash", command=f"cat {path}"),
            call("bash", command=f"cat > {path} <<'END'\n{good}END\n"),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ]


def difference(bad: str, good: str) -> tuple[str, str]:
    """The changed lines with all lines above them, so that the quote is unique."""
    old, new = bad.splitlines(keepends=True), good.splitlines(keepends=True)
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changed = [block for block in blocks if block[0] != "equal"]
    return "".join(old[: changed[-1][2]]), "".join(new[: changed[-1][4]])


@contextlib.asynccontextmanager
async def environment() -> AsyncIterator[tuple[CodeRepair, list[Task]]]:
    need_namespaces()
    limits = Limits(memory_bytes=4 << 30, disk_bytes=256 << 20, processes=128)
    pool = open_sandbox_pool("namespaces", mounts=[f"{INSTALLED}:/opt/agent"], limits=limits)
    try:
        repair = CodeRepair(pool, counts={"train": COUNT}, seed=0, timeout_s=600.0)
        tasks = repair.tasks("train")
        yield repair, [replace(t, prompt=f"[task {t.id}] {t.prompt}") for t in tasks]
    finally:
        await pool.close()


def agents(http: aiohttp.ClientSession) -> dict[str, Agent]:
    code = CodeConfig(diagnostics={}, test_command=("python", "-m", "unittest"))
    return {
        "etude": CodeAgent(http, code=code, **LIMITS),  # type: ignore[arg-type]
        "mini-swe-agent": CommandAgent(http, argv=MINI, env=MINI_ENV, **LIMITS),
    }


@pytest.mark.timeout(3600)
async def test_both_solve_the_same_tasks_through_one_gateway() -> None:
    async with environment() as (repair, tasks), aiohttp.ClientSession() as http:
        player = Both(tasks, {task.id: repair.solution(task) for task in tasks})
        room = asyncio.Semaphore(2)
        sampled: dict[str, list[int]] = {}
        async with playing_with(player) as url:

            async def attempt(name: str, agent: Agent, task: Task) -> tuple[str, str, float]:
                session = f"{name}-{tasks.index(task)}"
                async with room, repair.open(task) as sandbox:
                    transcript = await agent.run(
                        task, sandbox, base_url=f"{url}/s/{session}/v1", api_key="x", seed=1
                    )
                    assert transcript.finished, json.dumps(transcript.messages)[-3000:]
                    segments = await recorded(url, session)
                    assert all(s.logprobs == recomputed(s) for s in segments)
                    done = Attempt(transcript=transcript, segments=segments)
                    score = await repair.score(task, sandbox, done)
                sampled[session] = [
                    token
                    for s in segments
                    for token, is_drawn in zip(s.tokens, s.mask, strict=True)
                    if is_drawn
                ]
                return name, task.id, score.reward

            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(attempt(name, agent, task))
                    for name, agent in agents(http).items()
                    for task in tasks
                ]
        rewards = [each.result() for each in running]
    for name in ("etude", "mini-swe-agent"):
        assert [task for n, task, reward in rewards if n == name and reward == 1.0] == [
            task.id for task in tasks
        ]
    # exactly the sampled tokens are recorded as sampled
    assert len(player.said) == 2 * COUNT * 3
    assert sorted(token for tokens in sampled.values() for token in tokens) == sorted(
        token for tokens in player.said for token in tokens
    )
