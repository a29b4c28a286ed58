"""Priority and deadline of requests, from the header to the engine, also through the gateway."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import aiohttp
import pytest

from etude.core.sampling import Request, Sample
from etude.serve import headers
from etude.serve.access import SignedTokens
from etude.serve.alone import PolicySessions
from etude.serve.fake import Scripted
from etude.serve.http import DeadlineExceeded, create_app
from etude.serve.process import authorization
from etude.serve.router import Router
from etude.serve.tokens import Scope, TokenAuthority
from etude.serve.worker import Worker
from etude.serve.worker_protocol import JoinRequest
from tests.serve.conftest import served
from tests.serve.test_api import ASK, FILES, app, said
from tests.serve.test_generate import FakeEngine
from tests.serve.test_silence import Stopped, Watch, join

PATHS = [("chat/completions", ASK), ("completions", {"prompt": [5]})]


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_headers_reach_the_policy(
    http: aiohttp.ClientSession, path: str, body: dict[str, object]
) -> None:
    policy = Scripted([said("test")] * 2)
    async with served(app(policy, None)) as url:
        for given in ({}, {"X-Etude-Priority": "batch", "X-Etude-Deadline-S": "90.5"}):
            async with http.post(f"{url}/v1/{path}", json=body, headers=given) as response:
                assert response.status == 200
    plain, urgent = policy.asked
    assert (plain.priority, plain.deadline_s) == ("standard", None)
    assert urgent.priority == "batch"
    assert urgent.deadline_s is not None and 0 < urgent.deadline_s <= 90.5


SPOKEN_IN_SESSIONS = [
    ("chat/completions", ASK),
    ("responses", {"input": "test"}),
    ("messages", ASK | {"max_tokens": 5}),
]


@pytest.mark.parametrize(("path", "body"), SPOKEN_IN_SESSIONS)
async def test_no_agent_says_that_it_comes_first(
    http: aiohttp.ClientSession, path: str, body: dict[str, object]
) -> None:
    """Headers that a session's token may not use are not even read."""
    authority, policy = TokenAuthority(), Scripted([said("test")] * 3)
    sessions = PolicySessions(policy, FILES, max_context=64)
    async with served(create_app(sessions.routes(), SignedTokens(authority))) as url:
        for scope, asked, expected in (
            (Scope.SESSION, "interactive", "batch"),
            (Scope.SESSION, "first of all", "batch"),
            (Scope.ADMIN, "interactive", "interactive"),
        ):
            headers = {"X-Etude-Priority": asked, "X-Etude-Deadline-S": "90"}
            headers |= authorization(authority.mint(scope, "s", 60.0))
            async with http.post(f"{url}/s/s/v1/{path}", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
            assert policy.asked[-1].priority == expected
            assert policy.asked[-1].deadline_s is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Etude-Priority", "urgent"),
        ("X-Etude-Priority", ""),
        *(
            ("X-Etude-Deadline-S", value)
            for value in ("soon", "", "0", "-1", "nan", "inf", "1_0", "0x5", "1e99", "5s")
        ),
    ],
)
async def test_a_wrong_value_is_named(http: aiohttp.ClientSession, name: str, value: str) -> None:
    policy = Scripted([])
    async with (
        served(app(policy, None)) as url,
        http.post(f"{url}/v1/completions", json={"prompt": [5]}, headers={name: value}) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, "invalid_request", name)
    assert name in error["message"] and repr(value) in error["message"]
    assert not policy.asked


class Late(Scripted):
    async def sample(self, request: Request) -> Sample:
        raise DeadlineExceeded()


async def test_a_client_is_told_that_its_deadline_has_passed(http: aiohttp.ClientSession) -> None:
    async with served(app(Late([]), None)) as url:
        for path, body in PATHS:
            async with http.post(f"{url}/v1/{path}", json=body) as response:
                error = (await response.json())["error"]
            assert (response.status, error["code"]) == (408, "deadline_exceeded")
            assert response.headers.get("Connection") != "close"


async def test_a_deadline_passes_while_nobody_is_up(http: aiohttp.ClientSession) -> None:
    router = Router(http)
    with pytest.raises(DeadlineExceeded):
        await router.sample(Request(prompt=(1,), max_tokens=1, seed=0, deadline_s=0.01))


async def test_a_deadline_passes_while_a_worker_hangs(http: aiohttp.ClientSession) -> None:
    """The worker is not at fault, and stays."""
    stopped, router = Stopped(), Router(http)
    async with stopped.listening() as url:
        await join(router, url)
        with pytest.raises(DeadlineExceeded):
            await router.sample(Request(prompt=(1,), max_tokens=1, seed=0, deadline_s=0.05))
        assert [worker.url for worker in router.fleet.up] == [url]


async def test_a_worker_is_told_what_is_left(http: aiohttp.ClientSession) -> None:
    """The first worker falls silent after ten seconds, so the second gets a deadline that is ten
    seconds shorter."""
    watch, stopped, engine = Watch(http), Stopped(), FakeEngine()
    other = Worker(engine, FILES, "west")  # type: ignore[arg-type]
    async with stopped.listening() as first, served(create_app(other.routes(), None)) as second:
        await join(watch.router, first)
        request = Request(prompt=(1,), max_tokens=4, seed=0, priority="batch", deadline_s=600.0)
        sampling = asyncio.create_task(watch.router.sample(request))
        await stopped.until_asked("/generate")
        watch.wait(5)
        await watch.router.join(JoinRequest(second, "west", 0))
        for _ in range(6):
            watch.wait(1)
            await watch.router.join(JoinRequest(second, "west", 0))
        await sampling
    (asked,) = engine.asked
    assert asked.priority == "batch"
    assert asked.deadline_s == pytest.approx(600.0 - 11.0, abs=2.0)


def test_what_is_left_of_a_deadline_is_counted_from_its_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(headers, "time", SimpleNamespace(monotonic=lambda: 100.0))
    assert headers.Scheduling("batch", None).deadline_s() is None
    assert headers.Scheduling("batch", 100.5).deadline_s() == 0.5
    for expires in (100.0, 99.0):
        with pytest.raises(DeadlineExceeded):
            headers.Scheduling("batch", expires).deadline_s()
