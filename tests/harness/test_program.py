"""A program as an agent: it reaches only the model, and it ends with its attempt."""

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
from aiohttp.test_utils import RawTestServer

from etude.core.config import parse
from etude.core.errors import RolloutFailure
from etude.core.sandbox import Sandbox, SandboxSpec
from etude.core.types import Task, Transcript
from etude.harness.program import CommandAgent, ProgramAgent
from etude.harness.session_proxy import SessionProxy
from etude.run.controller import build_agent
from etude.sandbox.pool import open_sandbox_pool
from etude.serve.fake import Scripted
from tests.harness.test_agent import Answer, model, says
from tests.namespaces import need_namespaces
from tests.serve.conftest import served
from tests.serve.scripted import scripted_app

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


async def test_its_own_session_is_reached_and_nothing_else() -> None:
    """No other session, not the gateway itself, and no network, however the URL is spelled."""
    text = """
import socket
def connects(*address):
    try:
        socket.create_connection(address, 5).close()
        return True
    except OSError:
        return False
port = int(task["meta"]["port"])
print(connects("127.0.0.1", port), connects("192.0.2.1", 80), connects("localhost", port))
paths = ("/../../other/v1/chat/completions", "/%2e%2e/%2e%2e/other/v1/chat/completions",
         "/..%2f..%2fother/v1/chat/completions", "/../status", "", "//chat/completions",
         "/chat/completions/../../x")
print(*(ask(path)[:3] for path in paths))
print(os.environ["OPENAI_API_KEY"] == os.environ["ANTHROPIC_API_KEY"] == "the-sandbox-has-it")
print(ask(messages=task["messages"])["content"])
print(ask("/chat/completions?beta=true", messages=1)[:3], ask("/models")[:3])
"""
    answers = iter([says(content="la"), web.Response(status=400, text="what is that")])
    async with (
        opened("namespaces") as sandbox,
        model(lambda request: next(answers)) as (url, requests),
        aiohttp.ClientSession() as http,
    ):
        task = Task(id="t", prompt="sing", meta={"port": url.split(":")[2].split("/")[0]})
        agent = Script(http, max_tokens=9, timeout_s=60.0, temperature=0.5)
        agent.text = text
        transcript = await agent.run(task, sandbox, base_url=url, api_key="key", seed=7)
    assert transcript.messages[-1]["content"].splitlines() == [
        "False False False",
        "404 404 404 404 404 404 404",
        "True",
        "la",
        "400 404",
    ]
    assert len(requests) == 2


@pytest.mark.parametrize("body", ["[1]", "[]", '"x"', "3", "null", "{", ""])
async def test_what_is_no_object_is_told_so_and_not_asked(body: str) -> None:
    async with aiohttp.ClientSession() as http:
        session = SessionProxy(http, base_url="http://nowhere", api_key="key", seed=7, defaults={})
        async with (
            RawTestServer(session) as server,
            http.post(server.make_url("/v1/chat/completions"), data=body) as answer,
        ):
            assert (
                answer.status == 400
                and "the body is not a valid JSON object" in await answer.text()
            )
    assert not session.has_asked


async def test_answers_stream_and_do_not_wait_for_each_other() -> None:
    """The second request is sent when the first word of the first answer has arrived, and the rest
    of that answer arrives only then. A program may stop reading an answer; that is not a
    failure."""
    text = """
def begin(**body):
    return urllib.request.urlopen(urllib.request.Request(
        os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages?beta=true", json.dumps(body).encode()))
first = begin(number=1)
print(first.readline().decode().strip())
print(begin(number=2).read().decode().strip())
print(first.read().decode().strip())
begin(number=1).close()
print(begin(number=2).read().decode().strip())
"""
    second = asyncio.Event()
    asked: list[Answer] = []

    async def messages(http: web.Request) -> web.StreamResponse:
        asked.append({**await http.json(), "by": http.headers["Authorization"]})
        if asked[-1]["number"] == 2:
            second.set()
            return web.Response(text="two")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b"one\n")
        await second.wait()
        await response.write(b"done\n")
        return response

    app = web.Application()
    app.router.add_post("/s/x/v1/messages", messages)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        async with opened("namespaces") as sandbox, aiohttp.ClientSession() as http:
            agent = Script(http, max_tokens=9, timeout_s=60.0, temperature=0.5)
            agent.text = text
            url = f"http://127.0.0.1:{port}/s/x/v1"
            transcript = await agent.run(TASK, sandbox, base_url=url, api_key="key", seed=7)
    finally:
        await runner.cleanup()
    assert transcript.messages[-1]["content"].split() == ["one", "two", "done", "two"]
    assert [(each["by"], each["temperature"]) for each in asked] == [("Bearer key", 0.5)] * 4


def test_the_config_names_one() -> None:
    text = 'name = "x"\n[[stage]]\nkind = "rl"\nsteps = 1\n'
    config = parse(text, ["harness.command=['mine', '{prompt}', '{task}']"])
    agent = build_agent(config.harness, object(), None, desk=None, temperature=1.0)  # type: ignore[arg-type]
    assert isinstance(agent, CommandAgent) and agent.command(TASK) == ["mine", "sing", "t"]


async def test_a_template_is_a_program() -> None:
    async with (
        opened("namespaces") as sandbox,
        model(lambda request: says(content="la")) as (url, _),
        aiohttp.ClientSession() as http,
    ):
        script = ASK + "print(sys.argv[1:], os.environ['MODE'], ask(messages=[])['content'])"
        agent = CommandAgent(
            http,
            argv=["python", "-c", script, "{task}", "--say={prompt}", "{base_url}"],
            env={"MODE": "quick"},
            max_tokens=9,
            timeout_s=60.0,
            temperature=0.5,
            max_turns=3,
        )
        transcript = await agent.run(TASK, sandbox, base_url=url, api_key="key", seed=7)
    said = transcript.messages[-1]["content"]
    assert said.startswith("['t', '--say=sing', 'http://127.0.0.1:") and "quick la" in said


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1 / 0", "exit code 1; .*ZeroDivisionError"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
        ("print(ask(messages=[])); sys.exit(2)", "exit code 2; .*last words: 503 no engine"),
        ("ask(messages=[]); 1 / 0", r"its last request was rejected \(503 no engine\); its last"),
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
    assert (transcript.finished, transcript.limit) == (False, "context")


@pytest.mark.parametrize("dialect", ["/chat/completions", "/messages"])
async def test_it_may_ask_in_any_dialect_what_is_too_long(dialect: str) -> None:
    text = f'ask("{dialect}", max_tokens=9, messages=[{{"role": "user", "content": "a " * 5000}}])'
    async with (
        opened("process") as sandbox,
        served(scripted_app(Scripted(()), token="secret")) as url,
        aiohttp.ClientSession() as http,
    ):
        agent = Script(http, max_tokens=9, timeout_s=600.0, temperature=0.5)
        agent.text = f"{text}; 1 / 0"
        transcript = await agent.run(TASK, sandbox, base_url=f"{url}/v1", api_key="secret", seed=0)
    assert (transcript.finished, transcript.limit) == (False, "context")


async def test_a_model_that_is_gone_fails_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails before its time is over, since the model does not return."""
    monkeypatch.setattr("etude.core.patience.AWAY_S", 0.1)
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
            # long enough for a request on any machine
            transcript, _ = await play(text, sandbox, says(content="la"), timeout_s=15.0)
            assert (transcript.finished, transcript.limit) == (False, "time")
        else:
            over = r"it ran for 2 s \(harness.timeout_s\) without"
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
