"""A program as an agent: it reaches the model and nothing else, and it ends with its attempt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from etude.core.errors import RolloutFailure
from etude.core.sandbox import Sandbox, SandboxSpec
from etude.core.types import Task, Transcript
from etude.harness.program import ProgramAgent
from etude.sandbox.pool import open_sandbox_pool
from tests.harness.test_agent import Answer, model, says
from tests.namespaces import need_namespaces

ROOT = Path(__file__).parents[2]
TASK = Task(id="t", prompt="sing", meta={"path": "song.txt"})
ASK = """
import json, os, sys, urllib.error, urllib.request
task = json.load(sys.stdin)
def ask(path="/chat/completions", **body):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    try:
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    except urllib.error.HTTPError as e:
        return f"{e.code} {e.read().decode()}"
"""


class Script(ProgramAgent):
    text = ""

    def command(self, task: Task) -> Sequence[str]:
        return ["python", "-c", ASK + self.text]


@contextlib.asynccontextmanager
async def opened(isolation: str) -> AsyncIterator[Sandbox]:
    if isolation == "namespaces":
        need_namespaces()
    pool = open_sandbox_pool(isolation)
    try:
        async with pool.open(SandboxSpec(files={"song.txt": ""})) as sandbox:
            yield sandbox
    finally:
        await pool.close()


async def play(
    text: str, sandbox: Sandbox, *answers: Answer | web.Response, timeout_s: float = 60.0
) -> tuple[Transcript, list[Answer]]:
    script = iter(answers)
    async with (
        model(lambda request: next(script)) as (url, requests),
        aiohttp.ClientSession() as http,
    ):
        agent = Script(http, max_tokens=9, timeout_s=timeout_s, temperature=0.5, max_turns=3)
        agent.text = text
        return await agent.run(TASK, sandbox, base_url=url, api_key="key", seed=7), requests


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
async def test_a_program_asks_the_model_and_changes_files(isolation: str) -> None:
    text = """
first = ask(messages=task["messages"])
second = ask(messages=[*task["messages"], first, {"role": "user", "content": "more"}], seed=3)
open(task["meta"]["path"], "w").write(second["content"])
print("done", "key" in os.environ["OPENAI_API_KEY"].split())
"""
    async with opened(isolation) as sandbox:
        transcript, requests = await play(text, sandbox, says(content="la"), says(content="lala"))
        assert await sandbox.read("song.txt") == "lala"
    first, second = requests
    assert (first["temperature"], first["max_tokens"], second["seed"]) == (0.5, 9, 3)
    assert isinstance(first["seed"], int) and first["messages"] == TASK.opening
    assert transcript.finished and [m["content"] for m in transcript.messages] == [
        "sing",
        "la",
        "more",
        "lala",
        "done False\n",
    ]


async def test_nothing_but_its_own_conversation_is_reached() -> None:
    text = """
for path in ("/models", "/../../other/v1/chat/completions", "/chat/completions?x=1"):
    print(ask(path)[:3], end=" ")
print(ask(messages=1)[:3], ask("/chat/completions")[:3])
"""
    async with opened("namespaces") as sandbox:
        broken = [web.Response(status=400, text="what is that") for _ in range(2)]
        transcript, requests = await play(text, sandbox, *broken)
    assert transcript.messages[-1]["content"] == "404 404 404 400 400\n" and len(requests) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1 / 0", "exit code 1; .*ZeroDivisionError"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
        ("print(ask(messages=[])); sys.exit(2)", "exit code 2; .*last words: 503 no engine"),
        ("ask(messages=[]); 1 / 0", r"its last question was refused \(503 no engine\); its last"),
        ("print('long ' * 99); print('the end'); sys.exit(3)", "its last words: the end"),
    ],
)
async def test_a_program_that_breaks_has_failed(text: str, why: str) -> None:
    async with opened("process") as sandbox:
        with pytest.raises(RolloutFailure, match=f"(?s){why}"):
            await play(text, sandbox, web.Response(status=503, text="no engine"))


async def test_a_conversation_that_is_too_long_ends_as_it_stands() -> None:
    async with opened("process") as sandbox:
        full = web.Response(status=400, text="context_length_exceeded")
        transcript, _ = await play("ask(messages=[]); 1 / 0", sandbox, full)
    assert not transcript.finished


async def test_a_model_that_is_gone_fails_the_attempt_at_once() -> None:
    async with opened("process") as sandbox, aiohttp.ClientSession() as http:
        agent = Script(http, max_tokens=9, timeout_s=600.0, temperature=0.5)
        agent.text = "ask(messages=[])"
        with pytest.raises(aiohttp.ClientConnectionError):
            await agent.run(TASK, sandbox, base_url="http://127.0.0.1:9/v1", api_key="", seed=0)


def alive(marker: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in process.read_bytes():
                found.append(process.parent.name)
    return found


@pytest.mark.parametrize("asks", [True, False])
async def test_a_program_out_of_time_is_ended_with_what_it_started(
    asks: bool, tmp_path: Path
) -> None:
    marker = f"marker-{tmp_path.name}-{time.time_ns()}"
    text = f"""
import subprocess
{"ask(messages=task['messages'])" if asks else ""}
subprocess.Popen(["sh", "-c", "sleep 1000; : {marker}"], start_new_session=True)
print("started", flush=True)
subprocess.run(["sleep", "1000"])
"""
    async with opened("namespaces") as sandbox:
        if asks:
            transcript, _ = await play(text, sandbox, says(content="la"), timeout_s=2.0)
            assert not transcript.finished
        else:
            over = r"its time was over after 2 s \(harness.timeout_s\)"
            with pytest.raises(RolloutFailure, match=over):
                await play(text, sandbox, timeout_s=2.0)
    assert not alive(marker)


HOST = """
import asyncio, sys
import aiohttp
from etude.core.sandbox import SandboxSpec
from etude.sandbox.pool import open_sandbox_pool
from tests.harness.test_program import TASK, Script

async def main():
    pool = open_sandbox_pool("namespaces")
    async with pool.open(SandboxSpec()) as sandbox, aiohttp.ClientSession() as http:
        agent = Script(http, max_tokens=9, timeout_s=600.0, temperature=1.0)
        agent.text = sys.argv[1]
        await agent.run(TASK, sandbox, base_url="http://127.0.0.1:9/v1", api_key="", seed=0)

asyncio.run(main())
"""


async def test_a_program_dies_with_a_host_that_is_killed() -> None:
    need_namespaces()
    marker = f"marker-{time.time_ns()}"
    text = f"import subprocess; subprocess.run(['sh', '-c', 'sleep 1000; : in-{marker}'])"
    host = subprocess.Popen([sys.executable, "-c", HOST, text], cwd=ROOT)
    try:
        await until(lambda: bool(alive(f": in-{marker}")) and len(alive(marker)) >= 3)
        host.send_signal(signal.SIGKILL)
        host.wait()
        await until(lambda: not alive(marker))
    finally:
        host.kill()


async def until(what: object) -> None:
    assert callable(what)
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.05)


def test_the_example_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    from examples.program_agent import SCRIPT, Program

    agent = object.__new__(Program)
    assert agent.command(TASK) == ["python", "-c", SCRIPT] and json.dumps(SCRIPT)
