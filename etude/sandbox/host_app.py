"""HTTP API of a sandbox host: E2B's routes for sandboxes (create, list, get, keep alive, kill), and
one route for everything that a `core.sandbox.Sandbox` can do (`served`). `envd` has E2B's routes
for the inside of a sandbox."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import SandboxSpec
from etude.sandbox.envd import ENVD_PATHS, envd_routes
from etude.sandbox.host import LEASE_S, Full, Hosted, SandboxHost
from etude.sandbox.served import TOLD, failure
from etude.sandbox.spec import from_message

MAX_BODY_BYTES = 256 << 20
ENVD_VERSION = "0.5.7"
"""The version of E2B's daemon with these routes."""
DEFAULT_TEMPLATES = ("base", "")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ONCE = ("host", "authorization", "x-api-key", "x-access-token", "e2b-sandbox-id")


def create_app(host: SandboxHost, token: str | None) -> ASGIApp:
    """Without a token, the app serves this machine alone: it must be bound to loopback."""
    api = HostApi(host, token)
    control = [
        Route("/host", api.describe),
        Route("/sandboxes/refreshes", api.renew_many, methods=["POST"]),
        Route("/sandboxes/{name}/call", api.call, methods=["POST"]),
        *(
            Route(prefix + path, endpoint, methods=[method])
            for prefix in ("", "/v2")
            for path, endpoint, method in (
                ("/sandboxes", api.open, "POST"),
                ("/sandboxes", api.list_all, "GET"),
                ("/sandboxes/{name}", api.look, "GET"),
                ("/sandboxes/{name}", api.kill, "DELETE"),
                ("/sandboxes/{name}/timeout", api.renew, "POST"),
                ("/sandboxes/{name}/refreshes", api.renew, "POST"),
                ("/sandboxes/{name}/connect", api.connect, "POST"),
            )
        ),
    ]
    handlers: dict[Any, Callable[..., Awaitable[Response]]] = {
        KeyError: _not_found,
        ValueError: _refused,
        EtudeError: _refused,
        FileNotFoundError: _not_found,
        RolloutFailure: _broken,
        Full: _full,
        HTTPException: _stopped,
    }
    app = Starlette(routes=[*control, *envd_routes(host)], exception_handlers=handlers)
    return Guard(app, token)


class Guard:
    """Requires the token. Without one, only programs of this machine may call: a page in a browser
    can send requests to loopback, too."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pairs = [(name.decode().lower(), value.decode()) for name, value in scope["headers"]]
        headers = dict(pairs)
        if twice := [name for name in _ONCE if sum(name == each for each, _ in pairs) > 1]:
            # a route might read another of them than the one checked here
            await _error(400, f"send the header {twice[0]} only once")(scope, receive, send)
        elif why := self._refusal(headers, scope["path"]):
            await _error(401, why)(scope, receive, send)
        elif int(headers.get("content-length", 0)) > MAX_BODY_BYTES:
            await _error(413, f"more than {MAX_BODY_BYTES} bytes")(scope, receive, send)
        else:
            await self._app(scope, _bounded(receive), send)

    def _refusal(self, headers: dict[str, str], path: str) -> str:
        if self._token is None:
            local = urlsplit(f"//{headers.get('host', '')}").hostname in _LOOPBACK
            browser = "origin" in headers or "sec-fetch-site" in headers
            return (
                ""
                if local and not browser
                else (
                    "without a token, this host only accepts requests from programs of its own "
                    "machine"
                )
            )
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        known = _equal(headers.get("x-api-key", ""), self._token) or _equal(bearer, self._token)
        if path.startswith(ENVD_PATHS):
            opens = access_token(self._token, headers.get("e2b-sandbox-id", ""))
            known = known or _equal(headers.get("x-access-token", ""), opens)
        return "" if known else "send this host's token as X-API-Key"


def _bounded(receive: Receive) -> Receive:
    """A `receive` that enforces the size limit on chunked bodies, which do not announce their
    length."""
    left = MAX_BODY_BYTES

    async def receive_some() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise HTTPException(413, f"more than {MAX_BODY_BYTES} bytes")
        return message

    return receive_some


def access_token(token: str, name: str) -> str:
    """Token for one sandbox alone: E2B's SDKs send it to the daemon in the sandbox."""
    return hmac.new(token.encode(), name.encode(), "sha256").hexdigest()


def _equal(sent: str, expected: str) -> bool:
    return hmac.compare_digest(sent.encode(), expected.encode())


class HostApi:
    """The routes of a host."""

    def __init__(self, host: SandboxHost, token: str | None) -> None:
        self._host = host
        self._token = token
        self._default = next(iter(host.pools))

    async def describe(self, request: Request) -> Response:
        tiers = {name: pool.tier for name, pool in self._host.pools.items()}
        places = list(self._host.places)
        return JSONResponse({"tiers": tiers, "mounts": places, "sandboxes": len(self._host)})

    async def open(self, request: Request) -> Response:
        body = await request.json()
        template = body.get("templateID", "")
        isolation = self._default if template in DEFAULT_TEMPLATES else template
        if "etude" in body:
            spec: SandboxSpec = from_message(body["etude"])
        else:
            spec = SandboxSpec(env=body.get("envVars") or {})
        lease_s = _seconds(body.get("timeout") or LEASE_S)
        metadata = _texts(body.get("metadata") or {})
        try:
            hosted = await self._host.open(isolation, spec, lease_s, metadata)
        except Full:
            raise
        except TOLD as e:
            return JSONResponse({"code": 400, "message": str(e), "error": failure(e)}, 400)
        return JSONResponse(self._summary(hosted), 201)

    def _summary(self, hosted: Hosted) -> dict[str, Any]:
        started = datetime.fromtimestamp(hosted.started, UTC)
        ends = datetime.now(UTC) + timedelta(seconds=self._host.left_s(hosted.name))
        return {
            "sandboxID": hosted.name,
            "templateID": hosted.isolation,
            "clientID": "etude",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": access_token(self._token or "", hosted.name),
            "startedAt": started.isoformat(),
            "endAt": ends.isoformat(),
            "state": "running",
            "metadata": dict(hosted.metadata),
            "cpuCount": 1,
            "memoryMB": 0,
            "diskSizeMB": 0,
        }

    async def list_all(self, request: Request) -> Response:
        return JSONResponse([self._summary(each) for each in self._host.all()])

    async def look(self, request: Request) -> Response:
        return JSONResponse(self._summary(self._host.find(request.path_params["name"])))

    async def connect(self, request: Request) -> Response:
        """E2B's route to resume a sandbox: its lease becomes longer, never shorter."""
        name = request.path_params["name"]
        hosted = self._host.find(name)
        wanted_s = _seconds((await request.json()).get("timeout", 0))
        self._host.renew([name], max(wanted_s, self._host.left_s(name)))
        return JSONResponse(self._summary(hosted))

    async def kill(self, request: Request) -> Response:
        if not await self._host.kill(request.path_params["name"]):
            raise KeyError(request.path_params["name"])
        return Response(status_code=204)

    async def renew(self, request: Request) -> Response:
        body = await request.json()
        name = self._host.find(request.path_params["name"]).name
        self._host.renew([name], _seconds(body.get("timeout", body.get("duration", LEASE_S))))
        return Response(status_code=204)

    async def renew_many(self, request: Request) -> Response:
        body = await request.json()
        gone = self._host.renew(body["sandboxIDs"], _seconds(body["duration"]))
        return JSONResponse({"gone": gone})

    async def call(self, request: Request) -> Response:
        """Any operation of a sandbox: {"operation": .., "told": {..}} -> {"ok": ..} or {"error":
        [kind, message]}."""
        hosted = self._host.find(request.path_params["name"])
        body = json.loads(await request.body())
        operation, told = body["operation"], body["told"]
        try:
            if operation == "fork":
                forked = await self._host.fork(hosted.name)
                return _said({"ok": forked.name})
            return _said({"ok": await _while_asked(request, hosted, operation, told)})
        except TOLD as e:
            return _said({"error": failure(e)})


async def _while_asked(
    request: Request, hosted: Hosted, operation: str, told: dict[str, Any]
) -> Any:
    """Answer a request, and end its command once nobody waits for it any more, as on one
    machine."""
    work = asyncio.ensure_future(hosted.served.answer(operation, told))
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise RolloutFailure("sandbox: the caller did not wait for the answer")
        return work.result()
    finally:
        leaving.cancel()
        work.cancel()


def _seconds(told: Any) -> float:
    """Length of a lease. Python's JSON accepts NaN, with which a lease would never end."""
    if math.isnan(seconds := float(told)):
        raise ValueError("the length of a lease must be a number of seconds, not NaN")
    return seconds


def _texts(told: Any) -> dict[str, str]:
    """Metadata of a sandbox, which every listing contains."""
    if not isinstance(told, dict) or not all(isinstance(text, str) for text in told.values()):
        raise ValueError("metadata must be an object whose values are strings")
    "".join((*told, *told.values())).encode()  # ValueError for half of a surrogate pair
    return told


def _said(answer: dict[str, Any]) -> Response:
    """Response in plain ASCII, in which names of files that are not text survive unchanged."""
    return Response(json.dumps(answer), media_type="application/json")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"code": status, "message": message}, status)


async def _not_found(request: Request, error: Exception) -> Response:
    return _error(404, f"{error} does not exist, or not any more")


async def _refused(request: Request, error: Exception) -> Response:
    return _error(400, str(error))


async def _broken(request: Request, error: Exception) -> Response:
    return _error(502, str(error))


async def _stopped(request: Request, error: HTTPException) -> Response:
    return _error(error.status_code, error.detail)


async def _full(request: Request, error: Exception) -> Response:
    return JSONResponse({"code": 429, "message": str(error)}, 429, headers={"Retry-After": "1"})
