"""Every route with every kind of token and every method: only the intended scopes are let in."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from etude.core.errors import EtudeError
from etude.serve.access import Access, NoToken, OneToken, SignedTokens
from etude.serve.alone import PolicySessions, ScriptedSessions
from etude.serve.fake import Scripted
from etude.serve.gateway import Gateway
from etude.serve.http import create_app
from etude.serve.policies import POLICIES
from etude.serve.production.config import ProductionConfig
from etude.serve.production.routes import Production
from etude.serve.relay import ShardRelay
from etude.serve.router import Router
from etude.serve.tokens import OF_ONE_SESSION, Scope, TokenAuthority, sign
from etude.serve.worker import Worker
from etude.store.objects import Objects
from etude.store.production import ProductionStore
from tests.serve.conftest import served
from tests.serve.test_api import FILES
from tests.serve.test_generate import FakeEngine

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
SECRET = "the secret of the gateway of these tests"

# Written down a second time on purpose, so that a change of permissions is a change here, too.
SPEAK = """
POST /v1/chat/completions
POST /v1/responses
POST /v1/responses/input_tokens
GET /v1/responses/{response}
DELETE /v1/responses/{response}
GET /v1/responses/{response}/input_items
POST /v1/responses/{response}/cancel
POST /v1/messages
POST /v1/messages/count_tokens
"""
EVERYBODY = """
GET /v1/models
GET /v1/models/{model:path}
GET /health
GET /openapi.json
"""


def lines(text: str, prefix: str = "") -> set[tuple[str, str]]:
    rows = [line.split() for line in text.strip().splitlines()]
    return {(method, prefix + path) for method, path in rows}


OPENS: dict[Scope, set[tuple[str, str]]] = {
    Scope.SESSION: lines(SPEAK, "/s/{session}") | lines(EVERYBODY),
    Scope.SCORE: lines(EVERYBODY) | {("POST", "/v1/sessions/{session}/score")},
    Scope.USER: lines(SPEAK)
    | lines(EVERYBODY)
    | {("POST", "/v1/completions"), ("POST", "/v1/feedback")}
    | {("POST", "/v1/consent"), ("DELETE", "/v1/users")},
    Scope.SCHEDULER: lines(EVERYBODY) | {("POST", "/v1/sessions")},
    Scope.WORKER: lines(EVERYBODY)
    | {("POST", "/workers"), ("POST", "/generate")}
    | {("GET", "/shards/{epoch:int}/{version:int}/{hash}")},
    Scope.FEEDBACK: lines(EVERYBODY) | {("POST", "/v1/feedback")},
    Scope.ADMIN: set(POLICIES),
}


def servers(tmp_path: Path) -> dict[str, list[Route]]:
    objects, http = Objects.open(f"file:{tmp_path}/run"), Any
    gateway = Gateway(Router(http), objects, FILES, max_context=64)  # type: ignore[arg-type]
    users = Production(
        gateway.model, gateway.router, ProductionStore(objects),
        ProductionConfig(user_key_file=""), bytes(32), "mine",
    )  # fmt: skip
    return {
        "gateway": gateway.routes(),
        "production": [*gateway.fleet_routes(), *users.routes()],
        "worker": Worker(FakeEngine(), FILES, "here").routes(),  # type: ignore[arg-type]
        "policy": PolicySessions(Scripted([]), FILES, max_context=64).routes(),
        "script": ScriptedSessions([]).routes(),
        "relay": ShardRelay(Any, Any).routes(),  # type: ignore[arg-type]
    }


def hollow(routes: Iterable[Route]) -> list[Route]:
    """The same routes without their handlers."""

    async def inside(http: Request) -> Response:
        return Response("inside")

    return [Route(route.path, inside, methods=list(route.methods or ())) for route in routes]


async def ask(
    app: ASGIApp, method: str, path: str, headers: Mapping[str, str], address: str = "127.0.0.1"
) -> int:
    told: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        told.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": raw}
    await app({**scope, "client": (address, 1), "root_path": ""}, receive, send)
    status: int = told[0]["status"]
    return status


def served_by(method: str, path: str) -> tuple[str, str]:
    """The route that handles a request if the path's own route does not have the method."""
    if path.endswith("/responses/input_tokens") and method in ("GET", "DELETE"):
        path = path.replace("input_tokens", "{response}")
    return method, path


def at(path: str) -> str:
    filled = path.replace("{session}", "mine").replace("{model:path}", "some/model")
    filled = filled.replace("{epoch:int}/{version:int}/{hash}", f"1/2/{'a' * 64}")
    return filled.replace("{response}", "resp_1").replace("{id}", "0123456789abcdef")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def bad_tokens(authority: TokenAuthority) -> dict[str, dict[str, str]]:
    ended = authority.claims(Scope.ADMIN, "", 60.0)
    expired = sign(type(ended)(ended.scope, ended.subject, 1.0, ended.id), SECRET)
    revoked = authority.mint(Scope.ADMIN, "", 60.0)
    authority.revoke(authority.verify(revoked).id)
    good = authority.mint(Scope.ADMIN, "", 60.0)
    closed = [authority.mint(scope, "over", 60.0) for scope in (Scope.SESSION, Scope.SCORE)]
    authority.close_session("over")
    return {
        "none": {},
        "empty": bearer(""),
        "garbage": bearer("etude_garbage.garbage"),
        "expired": bearer(expired),
        "revoked": bearer(revoked),
        "of a session that is over": bearer(closed[0]),
        "for the score of one": bearer(closed[1]),
        "of another gateway": bearer(TokenAuthority().mint(Scope.ADMIN, "", 60.0)),
        "the secret itself": bearer(SECRET),
        "as basic": {"Authorization": f"Basic {good}"},
        "as a cookie": {"Cookie": f"token={good}"},
    }


async def test_no_door_is_open_that_should_not_be(tmp_path: Path) -> None:
    every = {(r.path, tuple(r.methods or ())): r for rs in servers(tmp_path).values() for r in rs}
    routes, authority = list(every.values()), TokenAuthority(SECRET)
    app = create_app(hollow(routes), SignedTokens(authority))
    offered = {(m, r.path) for r in routes for m in r.methods or () if m != "HEAD"}
    paths = {path for _, path in offered}
    tokens = {
        scope: authority.mint(scope, "mine" if scope in OF_ONE_SESSION else "somebody", 60.0)
        for scope in Scope
    }
    bad = bad_tokens(authority)
    for path, method in itertools.product([*paths, "/nothing"], METHODS):
        for kind, headers in bad.items():
            assert await ask(app, method, at(path), headers) == 401, (kind, method, path)
        for scope, token in tokens.items():
            key = served_by("GET" if method == "HEAD" else method, path)
            expected = 200 if key in OPENS[scope] else 403
            if key not in offered:
                expected = 404 if path == "/nothing" else 405
            assert await ask(app, method, at(path), bearer(token)) == expected, (scope, key)
            assert await ask(app, method, at(path), {"x-api-key": token}) == expected


async def test_a_session_has_one_door(tmp_path: Path) -> None:
    authority = TokenAuthority(SECRET)
    app = create_app(hollow(servers(tmp_path)["gateway"]), SignedTokens(authority))
    others = ("other", "mine2", "min", "MINE", "mine ", "%6Dine", "*", "..", "mine\x00", "ｍine")
    for scope, other in itertools.product(sorted(OF_ONE_SESSION), others):
        token = authority.mint(scope, "mine", 60.0)
        for method, path in [row for row in sorted(OPENS[scope]) if "{session}" in row[1]]:
            there = at(path).replace("/mine/", f"/{other}/")
            assert await ask(app, method, there, bearer(token)) in (403, 404), there
            assert await ask(app, method, at(path), bearer(token)) == 200


def test_every_policy_is_of_a_route(tmp_path: Path) -> None:
    offered = {
        ("GET" if method == "HEAD" else method, route.path)
        for routes in servers(tmp_path).values()
        for route in routes
        for method in route.methods or ()
    }
    assert offered == set(POLICIES)
    assert set().union(*OPENS.values()) == offered


def test_a_route_without_a_policy_does_not_start() -> None:
    async def inside(http: Request) -> Response:
        return Response()

    for method, path in (("POST", "/new"), ("DELETE", "/health")):
        with pytest.raises(EtudeError, match=f"{method} {path} has no access policy"):
            create_app([Route(path, inside, methods=[method])], None)


BROWSERS = {
    "a page elsewhere": {"Host": "127.0.0.1:8100", "Origin": "https://evil.example"},
    "a page of another port": {"Host": "127.0.0.1:8100", "Origin": "http://127.0.0.1:3000"},
    "a page without an origin": {"Host": "127.0.0.1:8100", "Origin": "null"},
    "a name that points here": {"Host": "evil.example:8100"},
    "a name that points here, its page": {
        "Host": "evil.example:8100",
        "Origin": "http://evil.example:8100",
    },
    "a name like ours": {"Host": "localhost.evil.example"},
    "an address outside": {"Host": "10.0.0.1:8100"},
    "no name": {"Host": "["},
    "a picture": {"Host": "127.0.0.1", "Sec-Fetch-Site": "cross-site"},
    "a form": {"Host": "127.0.0.1", "Sec-Fetch-Site": "same-site"},
}
PROGRAMS = {
    "curl": {"Host": "127.0.0.1:8100"},
    "a client with a key that it must have": {"Host": "localhost:8100", **bearer("none")},
    "another loopback": {"Host": "127.5.0.1"},
    "IPv6": {"Host": "[::1]:8100"},
    "HTTP/1.0": {},
    "a page of ours": {"Host": "localhost:8100", "Origin": "http://localhost:8100"},
    "typed": {"Host": "localhost:8100", "Sec-Fetch-Site": "none"},
}


@pytest.mark.parametrize("who", [*BROWSERS, *PROGRAMS])
async def test_without_a_token_a_machine_is_served_but_no_browser(who: str, tmp_path: Path) -> None:
    routes = servers(tmp_path)["gateway"]
    app = create_app(hollow(routes), None)
    for route in routes:
        for method in route.methods or ():
            given = await ask(app, method, at(route.path), {**BROWSERS, **PROGRAMS}[who])
            assert given == (403 if who in BROWSERS else 200), (method, route.path)


async def test_with_a_token_the_origin_is_no_matter(tmp_path: Path) -> None:
    """A web page does not have the token on its own."""
    authority = TokenAuthority(SECRET)
    token = authority.mint(Scope.USER, "ann", 60.0)
    accesses: list[tuple[Access, str]] = [
        (SignedTokens(authority), token),
        (OneToken("secret"), "secret"),
    ]
    for access, key in accesses:
        app = create_app(hollow(servers(tmp_path)["gateway"]), access)
        headers = {**BROWSERS["a page elsewhere"], **bearer(key)}
        assert await ask(app, "POST", "/v1/chat/completions", headers) == 200


def test_who_shares_slots_with_whom() -> None:
    authority = TokenAuthority(SECRET)

    def client(access: Access, key: str, address: str) -> str:
        headers = {"authorization": f"bearer {key}", "host": "localhost"}
        return access.identify(headers, address).client

    ann, bob, nobody, admin = (
        authority.mint(scope, name, 60.0)
        for scope, name in (
            (Scope.USER, "ann"),
            (Scope.USER, "bob"),
            (Scope.USER, ""),
            (Scope.ADMIN, "controller"),
        )
    )
    signed = SignedTokens(authority)
    again = authority.mint(Scope.USER, "ann", 30.0)
    assert client(signed, ann, "1.1.1.1") == client(signed, again, "2.2.2.2")
    assert len({client(signed, key, "1.1.1.1") for key in (ann, bob, nobody)}) == 3
    assert client(signed, admin, "1.1.1.1") == ""
    assert client(OneToken("x"), "x", "1.1.1.1") != client(OneToken("x"), "x", "2.2.2.2")
    assert client(NoToken(), "", "127.0.0.1") == ""


async def test_tokens_are_made_and_revoked(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    objects, authority = Objects.open(f"file:{tmp_path}/run"), TokenAuthority(SECRET)
    made = Gateway(Router(http), objects, FILES, max_context=64, tokens=authority)
    admin = bearer(authority.mint(Scope.ADMIN, "", 600.0))
    async with served(create_app(made.routes(), SignedTokens(authority))) as url:

        async def mint(**body: Any) -> tuple[int, Any]:
            async with http.post(f"{url}/tokens", json=body, headers=admin) as response:
                return response.status, await response.json()

        async def enters(token: str) -> bool:
            async with http.get(f"{url}/health", headers=bearer(token)) as response:
                return response.ok

        status, user = await mint(scope="user", subject="ann", lifetime_s=60)
        assert status == 200 and await enters(user["token"])
        status, long = await mint(scope="admin", lifetime_s=1e7)
        assert long["expires"] <= user["expires"] + 600, "no longer than whoever made it"
        for wrong in ({"scope": "root"}, {"scope": "session"}, {"scope": "user", "lifetime_s": 0}):
            assert (await mint(**wrong))[0] == 400

        async with http.delete(f"{url}/tokens/{user['id']}", headers=admin) as response:
            assert response.status == 204
        assert not await enters(user["token"])
        for wrong_id in ("..%2f..%2fx", "0" * 15, "0" * 17, "g" * 16, "A" * 16):
            async with http.delete(f"{url}/tokens/{wrong_id}", headers=admin) as response:
                assert response.status in (400, 404)
        assert objects.list("revoked-tokens") == [f"revoked-tokens/{user['id']}"]

    again = TokenAuthority(SECRET)
    reborn = Gateway(Router(http), objects, FILES, max_context=64, tokens=again)
    await reborn.token_routes.restore()
    async with served(create_app(reborn.routes(), SignedTokens(again))) as url:
        assert await enters(long["token"]) and not await enters(user["token"])
