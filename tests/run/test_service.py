"""An environment by URL: a service's answer becomes a score, and its failures never do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.remote import RemoteTask, RolloutRequest, TaskPage
from etude.core.types import Segment, SessionAccess, Task, Trajectory
from etude.model.tokenizer import ChatTokenizer
from etude.run import service as service_module
from etude.run.remote_tasks import read_task_file
from etude.run.rollout import TRIES, RolloutRunner, SessionDesk
from etude.run.service import ServiceAgent, ServiceClient, ServiceEnvironment
from etude.run.service_openapi import document
from etude.serve.alone import PolicySessions
from etude.serve.fake import Scripted

ROOT = Path(__file__).parents[2]
TASK = Task(id="t", prompt="sing", meta={"key": 1})
DONE = {"status": "done", "score": {"reward": 0.5}}
Answer = Callable[[web.Request], Awaitable[web.Response]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "RETRY_S", 0.01)


class Sessions:
    """Sessions that always have one recorded answer."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    async def open_session(self, session: str) -> SessionAccess:
        return SessionAccess(base_url=f"http://gateway/s/{session}/v1", api_key="key")

    async def up(self) -> None: ...

    async def disturbed(self, session: str, age_s: float) -> bool:
        return False

    async def segments(self, session: str, *, experts: bool) -> tuple[Segment, ...]:
        return (Segment(prompt=(1,), tokens=(2,), mask=(True,), logprobs=(-1.0,), versions=()),)

    async def forget(self, session: str) -> None:
        self.forgotten.append(session)


class Service:
    """A service with scripted answers."""

    def __init__(self, *answers: tuple[int, Any], capacity: int = 4) -> None:
        self.answers = iter(answers)
        self.capacity = capacity
        self.requests: list[tuple[str, str]] = []
        self.asked: list[dict[str, Any]] = []
        self.looked: Answer | None = None
        self.busy = self.busiest = 0

    async def health(self, http: web.Request) -> web.Response:
        return web.json_response({"capacity": self.capacity})

    async def begin(self, http: web.Request) -> web.Response:
        self.asked.append(await http.json())
        assert http.headers["Idempotency-Key"] == self.asked[-1]["id"]
        self.busy += 1
        self.busiest = max(self.busy, self.busiest)
        await asyncio.sleep(0)
        status, body = next(self.answers)
        self.busy -= 1
        return web.json_response(body, status=status)

    async def look(self, http: web.Request) -> web.Response:
        self.requests.append((http.method, http.match_info["id"]))
        if self.looked is not None:
            return await self.looked(http)
        return web.json_response(DONE)

    async def cancel(self, http: web.Request) -> web.Response:
        self.requests.append((http.method, http.match_info["id"]))
        return web.Response(status=204)

    @contextlib.asynccontextmanager
    async def runner(
        self, sessions: Any = None, timeout_s: float = 60.0, desk: SessionDesk | None = None
    ) -> AsyncIterator[RolloutRunner]:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_post("/rollouts", self.begin)
        app.router.add_get("/rollouts/{id}", self.look)
        app.router.add_delete("/rollouts/{id}", self.cancel)
        running = web.AppRunner(app, shutdown_timeout=0.1)
        await running.setup()
        site = web.TCPSite(running, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        try:
            async with runner(f"http://127.0.0.1:{port}", sessions, timeout_s, desk) as made:
                yield made
        finally:
            await running.cleanup()


@contextlib.asynccontextmanager
async def runner(
    url: str,
    sessions: Any = None,
    timeout_s: float = 60.0,
    desk: SessionDesk | None = None,
    wait_s: float = 60.0,
) -> AsyncIterator[RolloutRunner]:
    async with ServiceClient(url) as client:
        environment = ServiceEnvironment(client, counts={"train": 3}, path=None, wait_s=wait_s)
        agent = environment.own_agent(desk, max_tokens=9, timeout_s=timeout_s, temperature=0.5)
        assert isinstance(agent, ServiceAgent)
        yield RolloutRunner(environment, agent, sessions or Sessions(), concurrency=16)


async def attempt(service: Service, **more: Any) -> Trajectory:
    async with service.runner(**more) as rollouts:
        return await rollouts.attempt(TASK, "g1.0", seed=7)


async def test_it_is_asked_for_a_rollout_and_believed() -> None:
    score = {
        "reward": 0.5,
        "parts": [{"name": "tests", "value": 3, "evidence": "3 pass"}],
        "flags": ["odd"],
        "credit": [{"value": 1.0, "segment": 0, "turn": 0}],
    }
    made = [{"name": "diff", "text": "+1"}, {"name": "film", "url": "https://x/film"}]
    service = Service((200, {"status": "done", "score": score, "artifacts": made}))
    done = await attempt(service)
    assert done.status == "done" and done.score is not None and done.reward == 0.5
    assert done.score.parts[0].evidence == "3 pass" and done.score.flags == ("odd",)
    assert done.score.credit[0].turn == 0
    assert [message["content"] for message in done.messages] == ["sing", "+1", "https://x/film"]
    (asked,) = service.asked
    assert asked["task"] == {"id": "t", "prompt": "sing", "messages": [], "split": "train"} | {
        "meta": {"key": 1}
    }
    assert asked["base_url"] == "http://gateway/s/g1.0/v1" and asked["token"] == "key"
    assert (asked["seed"], asked["temperature"], asked["max_tokens"]) == (7, 0.5, 9)


async def test_a_running_one_is_asked_for_again() -> None:
    service = Service((202, {"status": "running"}))
    answers = iter([{"status": "running"}, {"status": "timeout", "score": {"reward": 0.25}}])

    async def look(http: web.Request) -> web.Response:
        assert float(http.query["wait_s"]) > 0
        return web.json_response(next(answers))

    service.looked = look
    done = await attempt(service)
    assert (done.status, done.reward) == ("timeout", 0.25)
    assert service.requests == [("GET", service.asked[0]["id"])] * 2


@pytest.mark.parametrize("busy", [429, 503])
async def test_a_service_without_room_is_asked_again(busy: int) -> None:
    service = Service((busy, {}), (busy, {}), (200, DONE))
    done = await attempt(service)
    assert done.reward == 0.5 and len({asked["id"] for asked in service.asked}) == 1


async def test_one_that_is_not_there_yet_is_asked_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []
    nobody = SimpleNamespace(host="there", port=1, ssl=None)
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        happened.append("pause")
        await sleep(0)

    async def send(method: str, path: str, **more: Any) -> tuple[int, bytes]:
        happened.append(f"{method} {path}")
        assert len(happened) < 9, happened
        if len(happened) < 4:
            raise aiohttp.ClientConnectorError(nobody, OSError("refused"))  # type: ignore[arg-type]
        return 200, json.dumps(DONE).encode()

    asked = RolloutRequest(
        id="r", task=RemoteTask(id="t", prompt="sing"), base_url="", token="", seed=1, deadline=0.0
    )
    async with ServiceClient("http://there") as client:
        with monkeypatch.context() as patched:
            patched.setattr(client, "_send", send)
            patched.setattr(asyncio, "sleep", pause)
            result = await client.rollout(asked)
    assert result.score is not None and result.score.reward == 0.5
    assert happened == ["POST /rollouts", "pause"] * 2 + ["POST /rollouts"]


async def test_an_answer_that_is_lost_on_the_way_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []

    async def send(method: str, path: str, **more: Any) -> tuple[int, bytes]:
        happened.append(f"{method} {path}")
        if method == "POST":
            raise aiohttp.ServerDisconnectedError
        return 200, json.dumps(DONE).encode()

    asked = RolloutRequest(
        id="r", task=RemoteTask(id="t", prompt="sing"), base_url="", token="", seed=1, deadline=0.0
    )
    async with ServiceClient("http://there") as client:
        monkeypatch.setattr(client, "_send", send)
        result = await client.rollout(asked)
    assert result.score is not None and result.score.reward == 0.5
    assert happened == ["POST /rollouts", "GET /rollouts/r"], "it may have begun: not once more"


async def test_one_that_breaks_is_asked_again_in_another_session() -> None:
    service = Service((500, "boom"), (502, ""), (200, DONE))
    sessions = Sessions()
    done = await attempt(service, sessions=sessions)
    assert (done.id, done.status, done.reward) == ("g1.0", "done", 0.5)
    assert len({asked["id"] for asked in service.asked}) == 3
    assert sessions.forgotten == ["g1.0", "g1.0~1", "g1.0~2"]


async def test_one_that_always_breaks_makes_a_failed_attempt_and_no_zero() -> None:
    done = await attempt(Service(*[(500, "boom")] * TRIES))
    assert (done.status, done.score) == ("failed", None)
    assert done.error is not None and 'answered 500 to POST /rollouts: "boom"' in done.error


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((400, "no such task"), "answered 400"),
        ((200, {"status": "failed", "error": "no database"}), "no database"),
        ((200, {"status": "done"}), "without a score"),
        ((200, {"status": "fine"}), "did not return a RolloutResult"),
        ((200, {"status": "done", "score": {"reward": "much"}}), "did not return a RolloutResult"),
        ((200, {"status": "done", "score": {"reward": 1, "credits": []}}), "field `credits`"),
    ],
)
async def test_what_is_no_result_fails_the_attempt_at_once(
    answer: tuple[int, Any], why: str
) -> None:
    service = Service(answer)
    done = await attempt(service)
    assert (done.status, done.score) == ("failed", None)
    assert done.error is not None and why in done.error and len(service.asked) == 1


async def test_one_that_has_lost_the_rollout_is_asked_for_another() -> None:
    service = Service((202, {"status": "running"}), (200, DONE))

    async def look(http: web.Request) -> web.Response:
        return web.Response(status=404)

    service.looked = look
    assert (await attempt(service)).reward == 0.5 and len(service.asked) == 2


@pytest.mark.parametrize(
    ("statuses", "told"),
    [
        ([200], ""),
        ([500, 502, 429, 503, 200], ""),
        ([503, 400], "answered 400 to GET /rollouts: no"),
        ([499], "answered 499 to GET /rollouts: no"),
    ],
)
async def test_what_is_said_of_a_running_one(statuses: list[int], told: str) -> None:
    service, left = Service((202, {"status": "running"})), list(statuses)

    async def look(http: web.Request) -> web.Response:
        status = left.pop(0)
        return web.json_response(DONE) if status == 200 else web.Response(status=status, text="no")

    service.looked = look
    done = await attempt(service)
    assert (done.reward, done.status) == ((None, "failed") if told else (0.5, "done"))
    assert told in (done.error or "") and left == [] and len(service.asked) == 1


@pytest.mark.parametrize(
    ("statuses", "told"),
    [
        ([500, 429, 503, 200], ""),
        ([403], "answered 403 to GET /health: no"),
        ([500, 404], "answered 404 to GET /health: no"),
    ],
)
async def test_a_rollout_begins_when_the_service_is_well(statuses: list[int], told: str) -> None:
    left = list(statuses)

    class Ailing(Service):
        async def health(self, http: web.Request) -> web.Response:
            status = left.pop(0)
            if status == 200:
                return web.json_response({"capacity": 0})  # it has room for one
            return web.Response(status=status, text="no")

    service = Ailing((200, DONE))
    done = await attempt(service)
    assert told in (done.error or "") and left == []
    assert len(service.asked) == (0 if told else 1)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9])
def test_tasks_come_in_pages_and_no_more_than_asked_for(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "PAGE", 2)
    asked: list[dict[str, str]] = []
    client = ServiceClient("http://there/")

    def page(url: str) -> TaskPage:
        assert url.startswith("http://there/tasks?")
        query = dict(parse_qsl(url.partition("?")[2]))
        asked.append(query)
        first = int(query.get("after", "0"))
        found = [RemoteTask(id=str(n), prompt="x") for n in range(first, min(first + 2, 5))]
        return TaskPage(tasks=tuple(found), next=str(first + 2) if first < 4 else None)

    monkeypatch.setattr(client, "_page", page)
    found = client.tasks("train", limit)
    assert [task.id for task in found] == [str(n) for n in range(min(limit, 5))]
    sizes = {1: "1", 2: "2", 3: "21", 5: "221", 9: "222"}[limit]
    assert [query["limit"] for query in asked] == list(sizes)
    assert [query.get("after") for query in asked] == [None, "2", "4"][: len(sizes)]
    assert {query["split"] for query in asked} == {"train"}


def test_an_empty_page_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ServiceClient("http://there")
    monkeypatch.setattr(client, "_page", lambda url: TaskPage(tasks=(), next="x"))
    assert client.tasks("train", 3) == []


async def test_one_that_does_not_end_is_cancelled_and_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "GRACE_S", 1.5)  # enough time for a request
    service = Service((202, {"status": "running"}))

    async def look(http: web.Request) -> web.Response:
        await asyncio.sleep(600)
        raise AssertionError

    service.looked = look
    done = await attempt(service, timeout_s=0.05)
    assert done.status == "failed" and done.error is not None and "deadline" in done.error
    assert service.requests[-1] == ("DELETE", service.asked[0]["id"])


async def test_one_that_stays_away_fails_the_attempt_and_is_named() -> None:
    async with runner("http://127.0.0.1:9", wait_s=0.1) as rollouts:
        done = await rollouts.attempt(TASK, "g1.0", seed=7)
    assert done.score is None and done.error is not None
    assert "127.0.0.1:9 for 0.1 s (tasks.timeout_s)" in done.error


async def test_no_more_rollouts_than_it_has_room_for() -> None:
    service = Service(*[(200, DONE)] * 12, capacity=3)
    async with service.runner() as rollouts:
        done = await asyncio.gather(*(rollouts.attempt(TASK, f"g.{n}", seed=n) for n in range(12)))
    assert all(each.reward == 0.5 for each in done) and service.busiest <= 3


def test_tasks_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    lines = [
        {"id": "a", "prompt": "x"},
        {"id": "b", "messages": [{"role": "user", "content": "y"}], "meta": {"n": 1}},
        {"id": "c", "prompt": "z", "split": "heldout"},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    first, second = read_task_file(str(path), "train", 9)
    assert (first.id, first.prompt, second.meta) == ("a", "x", {"n": 1})
    assert [task.id for task in read_task_file(str(path), "train", 1)] == ["a"]
    assert [task.id for task in read_task_file(str(path), "heldout", 9)] == ["c"]
    path.write_text('{"id": "a", "prompt": "x"}\n{"id": "b"}')
    with pytest.raises(EtudeError, match="line 2: task 'b' has neither of prompt and messages"):
        read_task_file(str(path), "train", 9)
    with pytest.raises(EtudeError, match="cannot be read"):
        read_task_file(str(tmp_path / "none"), "train", 9)


@pytest.mark.parametrize("body", ["<html>", '{"tasks": [{"id": 1}]}'])
async def test_what_is_no_page_of_tasks_is_told(body: str) -> None:
    async def answer(http: web.Request) -> web.Response:
        return web.Response(text=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/tasks", answer)
    async with TestServer(app) as server:
        client = ServiceClient(str(server.make_url("")))
        with pytest.raises(
            EtudeError, match="/tasks.* returned something other than a page of tasks: "
        ):
            await asyncio.to_thread(client.tasks, "train", 3)


def test_a_service_that_is_not_there_gives_no_tasks() -> None:
    with pytest.raises(EtudeError, match="127.0.0.1:9 returns no tasks .*: start it"):
        ServiceClient("http://127.0.0.1:9").tasks("train", 3)


def test_the_config_takes_one() -> None:
    text = 'name = "x"\n[[stage]]\nkind = "rl"\nsteps = 1\n'
    for url in ("http://127.0.0.1:80", "https://host", "https://host:1/path"):
        assert parse(text, [f"tasks.environment={url}"]).tasks.is_remote
    assert not parse(text).tasks.is_remote
    with pytest.raises(EtudeError, match="leave out harness.agent"):
        parse(text, ["tasks.environment=http://h", "harness.agent=a:B"])
    with pytest.raises(EtudeError, match="two agents: leave out one"):
        parse(text, ["harness.command=['x']", "harness.agent=a:B"])
    with pytest.raises(EtudeError, match="set path to a file of tasks"):
        parse(text, ["tasks.environment=pull"])
    with pytest.raises(EtudeError, match="has its own tasks"):
        parse(text, ["tasks.path=tasks.jsonl"])


def test_the_openapi_file_is_that_of_the_code() -> None:
    page = ROOT / "docs" / "environments-by-url.openapi.json"
    assert json.loads(page.read_text()) == json.loads(json.dumps(document())), (
        f"run: python -m etude.run.service_openapi > {page.relative_to(ROOT)}"
    )


PRODUCT = """
import os, sys, time
sys.path.append(sys.argv[1])
from etude_environment import Result, Service

def rollout(asked):
    said = [{"role": "user", "content": asked.task["prompt"]}]
    first = asked.chat(said)
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.01)
    asked.chat([*said, first, {"role": "user", "content": "more"}])
    return Result(reward=1.0)

Service(rollout, capacity=8).serve(port=int(sys.argv[2]))
"""


class Product:
    """A service in a process of its own, which can be killed."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate
        self.port = 0

    def start(self) -> str:
        client = ROOT / "clients" / "python"
        argv = [sys.executable, "-c", PRODUCT, str(client), str(self.port), str(self.gate)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        url = self.process.stdout.readline().split()[-1]
        self.port = int(url.rpartition(":")[2])
        return url

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


async def test_a_service_killed_in_the_middle_costs_no_attempt(tmp_path: Path) -> None:
    """Each attempt is in the middle of its session when the service dies. The earlier answers are
    not in the trajectory: it holds the two answers of one try."""
    from tests.small_model import small_files  # imports torch

    files = small_files()
    tokenizer = ChatTokenizer(files)
    spoken = [*tokenizer.encode("test"), tokenizer.eos_token_id]
    policy = Scripted(itertools.repeat(spoken))
    product = Product(tmp_path / "gate")
    url = product.start()
    sessions = PolicySessions(policy, files, max_context=256)
    try:
        async with sessions.open(), runner(url, sessions) as rollouts:
            attempts = [
                asyncio.create_task(rollouts.attempt(TASK, f"g.{n}", seed=n)) for n in range(6)
            ]
            async with asyncio.timeout(60):
                while len(policy.asked) < 6:
                    await asyncio.sleep(0.01)
            product.kill()
            product.gate.touch()
            product.start()
            done = await asyncio.gather(*attempts)
    finally:
        product.kill()
    assert [(each.status, each.reward, each.error) for each in done] == [("done", 1.0, None)] * 6
    assert all(each.cost.calls == 2 and len(each.segments) == 1 for each in done)
    assert len(policy.asked) == 6 + 2 * 6
