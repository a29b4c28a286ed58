"""A gateway with tokens and real requests: what a harness, a user and a worker can reach, and what
they cannot."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from etude.core.types import Segment
from etude.serve.access import OneToken, SignedTokens
from etude.serve.gateway import Gateway
from etude.serve.http import create_app
from etude.serve.process import authorization
from etude.serve.router import Router
from etude.serve.tokens import Scope, TokenAuthority
from etude.serve.worker import Worker
from etude.store.objects import Objects
from tests.serve.conftest import served
from tests.serve.scripted import FILES, answers
from tests.serve.test_dialect_sessions import ScriptedEngine

CHAT = {"messages": [{"role": "user", "content": "read"}], "max_tokens": 9}


class World:
    """A gateway, and a worker that has joined it with a token of its own."""

    def __init__(self, http: aiohttp.ClientSession, directory: Path) -> None:
        self.http = http
        self.tokens = TokenAuthority()
        objects = Objects.open(f"file:{directory}/run")
        self.gateway = Gateway(Router(http), objects, FILES, max_context=4096, tokens=self.tokens)
        self.url = ""
        self.seen: set[str] = set()
        """Tokens that reached a worker."""

    def watched(self, app: ASGIApp) -> ASGIApp:
        async def call(scope: AsgiScope, receive: Receive, send: Send) -> None:
            self.seen.add(dict(scope["headers"]).get(b"authorization", b"").decode())
            await app(scope, receive, send)

        return call

    async def ask(
        self, method: str, path: str, token: str, body: Any = None, **more: str
    ) -> tuple[int, bytes]:
        headers = authorization(token) | more
        async with self.http.request(
            method, self.url + path, headers=headers, json=body
        ) as response:
            return response.status, await response.read()

    def token(self, scope: Scope, subject: str = "") -> str:
        return self.tokens.mint(scope, subject, 600.0)

    async def worker(self, stack: AsyncExitStack, region: str, token: str) -> str:
        """Start a worker that joins the gateway."""
        engine = ScriptedEngine(answers(["said"] * 9))
        app = create_app(Worker(engine, FILES, region).routes(), OneToken(token))  # type: ignore[arg-type]
        at = await stack.enter_async_context(served(self.watched(app)))
        joining = {"url": at, "region": region, "version": 0}
        assert (await self.ask("POST", "/workers", token, joining))[0] == 200
        return at


@pytest.fixture
async def world(http: aiohttp.ClientSession, tmp_path: Path) -> AsyncIterator[World]:
    made = World(http, tmp_path)
    async with served(create_app(made.gateway.routes(), SignedTokens(made.tokens))) as made.url:
        yield made


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


async def test_a_harness_has_its_session_and_nothing_else(
    world: World, stack: AsyncExitStack
) -> None:
    await world.worker(stack, "east", world.token(Scope.WORKER))
    mine, admin = world.token(Scope.SESSION, "mine"), world.token(Scope.ADMIN)
    other = world.token(Scope.SESSION, "other")
    chat = "/s/{}/v1/chat/completions"
    assert (await world.ask("POST", chat.format("mine"), mine, CHAT))[0] == 200
    assert (await world.ask("POST", chat.format("other"), other, CHAT))[0] == 200
    for token in (mine, world.token(Scope.USER, "mine"), world.token(Scope.WORKER)):
        for method, path in (
            ("POST", chat.format("other")),
            ("GET", "/s/other/segments"),
            ("GET", "/s/mine/segments"),
            ("DELETE", "/s/other"),
            ("DELETE", "/s/mine"),
            ("POST", "/tokens"),
            ("GET", "/status"),
        ):
            assert (await world.ask(method, path, token, CHAT))[0] == 403, path
    assert (await world.ask("POST", "/v1/chat/completions", mine, CHAT))[0] == 403

    status, body = await world.ask("GET", "/s/mine/segments", admin)
    (segment,) = msgspec.msgpack.decode(body, type=tuple[Segment, ...])
    assert status == 200 and sum(segment.mask) == len(answers(["said"])[0])

    assert (await world.ask("DELETE", "/s/mine", admin))[0] == 204
    assert (await world.ask("POST", chat.format("mine"), mine, CHAT))[0] == 401, "it is over"
    assert (await world.ask("GET", "/s/mine/segments", admin))[0] == 404
    assert (await world.ask("GET", "/s/other/segments", admin))[0] == 200


async def test_a_user_sees_no_conversation_of_another(world: World, stack: AsyncExitStack) -> None:
    await world.worker(stack, "east", world.token(Scope.WORKER))
    ann, bob = (world.token(Scope.USER, name) for name in ("ann", "bob"))
    status, body = await world.ask("POST", "/v1/responses", ann, {"input": "a secret"})
    id = msgspec.json.decode(body)["id"]
    on = {"input": "go on", "previous_response_id": id}
    reference = {"input": [{"type": "item_reference", "id": "x"}], "previous_response_id": id}
    for token, found in ((bob, False), (world.token(Scope.ADMIN), False), (ann, True)):
        for method, path, asked in (
            ("GET", f"/v1/responses/{id}", None),
            ("GET", f"/v1/responses/{id}/input_items", None),
            ("POST", "/v1/responses", on),
        ):
            status, body = await world.ask(method, path, token, asked)
            assert (status == 200) == found and (b"a secret" in body) <= found
        assert b"a secret" not in (await world.ask("POST", "/v1/responses", token, reference))[1]
    assert (await world.ask("DELETE", f"/v1/responses/{id}", bob))[0] == 404
    assert (await world.ask("DELETE", f"/v1/responses/{id}", ann))[0] == 200


async def test_a_worker_is_asked_with_its_own_token(world: World, stack: AsyncExitStack) -> None:
    east, west = (world.token(Scope.WORKER, name) for name in ("east", "west"))
    admin = world.token(Scope.ADMIN)
    await world.worker(stack, "east", east)
    for method, path, body in (
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/chat/completions", CHAT | {"stream": True}),
        ("GET", "/status", None),
    ):
        assert (await world.ask(method, path, admin, body))[0] == 200
    assert world.seen == {f"Bearer {east}"}
    world.seen.clear()
    await world.worker(stack, "west", west)
    for _ in range(4):
        await world.ask("POST", "/v1/chat/completions", admin, CHAT)
    assert world.seen <= {f"Bearer {east}", f"Bearer {west}"}


async def test_a_worker_that_refuses_the_token_is_left(world: World, stack: AsyncExitStack) -> None:
    """This is not an error of the client."""
    admin, thief = world.token(Scope.ADMIN), world.token(Scope.WORKER)
    at = await world.worker(stack, "east", world.token(Scope.WORKER))
    await world.worker(stack, "west", world.token(Scope.WORKER))
    joining = {"url": at, "region": "east", "version": 0}
    assert (await world.ask("POST", "/workers", thief, joining))[0] == 200
    for _ in range(3):
        assert (await world.ask("POST", "/v1/chat/completions", admin, CHAT))[0] == 200
    assert [worker.region for worker in world.gateway.router.fleet.up] == ["west"]


async def test_nobody_but_a_worker_joins(world: World) -> None:
    joining = {"url": "http://127.0.0.1:9", "region": "evil", "version": 10**6}
    for scope in (Scope.SESSION, Scope.USER, Scope.FEEDBACK):
        assert (await world.ask("POST", "/workers", world.token(scope, "x"), joining))[0] == 403
    assert (await world.ask("POST", "/workers", "", joining))[0] == 401
    assert not world.gateway.router.fleet.workers


async def test_no_page_makes_itself_a_worker_of_a_gateway_without_tokens(world: World) -> None:
    joining = {"url": "http://127.0.0.1:9", "region": "evil", "version": 10**6}
    async with served(create_app(world.gateway.routes(), None)) as world.url:
        for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
            status, body = await world.ask("POST", "/workers", "", joining, **headers)
            assert (status, b"a server without a token" in body) == (403, True)
        assert not world.gateway.router.fleet.workers
        assert (await world.ask("POST", "/workers", "", joining))[0] == 200


async def test_a_worker_is_drained_by_an_admin_alone(world: World, stack: AsyncExitStack) -> None:
    own, admin = world.token(Scope.WORKER, "east"), world.token(Scope.ADMIN)
    at = await world.worker(stack, "east", own)
    drain = {"url": at}
    assert (await world.ask("POST", "/workers/drain", own, drain))[0] == 403
    assert (await world.ask("POST", "/workers/drain", admin, {"url": "http://x"}))[0] == 404
    status, body = await world.ask("POST", "/workers/drain", admin, drain | {"keep": 1})
    assert status == 409 and b"1 workers must keep running" in body
    status, body = await world.ask("POST", "/workers/drain", admin, drain)
    assert status == 200 and msgspec.json.decode(body) == {"state": "draining", "active": 0}
    told = msgspec.json.decode((await world.ask("GET", "/status", admin))[1])
    assert told["up"] == 0 and told["workers"] == {at: {"state": "draining", "active": 0}}
    body = (await world.ask("POST", "/workers/drain", admin, drain | {"draining": False}))[1]
    assert msgspec.json.decode(body)["state"] == "live"
    assert (await world.ask("POST", "/v1/chat/completions", admin, CHAT))[0] == 200
