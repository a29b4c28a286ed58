"""Several gateway processes (shards), each with its share of the sessions.

The hash of a session's name determines its shard. A request that reaches another shard is forwarded
unchanged, token included, so any URL will do. The first shard holds the sessions that others run.
Workers join all shards, and all shards are told which weights are live.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import aiohttp
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from etude.core.errors import EtudeError
from etude.serve.http import (
    ApiError,
    ClientDisconnected,
    Unavailable,
    cancel_on_disconnect,
    error_response,
    read_bytes,
)

DESK = "/v1/sessions"
FORWARDED = "x-etude-forwarded"
"""Header of a request from another shard, which is not forwarded again."""
NOT_PASSED_ON = {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"content-length"}
"""Headers that belong to a connection, not to the request."""


class Shards:
    """All shards, and the index of this process among them."""

    def __init__(self, urls: Sequence[str] = ("",), index: int = 0) -> None:
        if not 0 <= index < len(urls):
            raise EtudeError(f"no shard {index}: --shards lists {len(urls)}, counted from 0")
        self._urls = [url.rstrip("/") for url in urls]
        self._index = index

    @property
    def name(self) -> str:
        return f"{self._index}-of-{len(self._urls)}"

    @property
    def others(self) -> list[str]:
        return [url for n, url in enumerate(self._urls) if n != self._index]

    def elsewhere(self, path: str) -> str | None:
        """The URL of the shard that a path belongs to; None if it is this one, or any."""
        if path == DESK or path.startswith(f"{DESK}/"):
            owner = 0
        elif path.startswith("/s/"):
            owner = zlib.crc32(path.split("/")[2].encode()) % len(self._urls)
        else:
            return None
        return None if owner == self._index else self._urls[owner]


class ShardedApp:
    """The app of one shard, which forwards requests that belong to another shard."""

    def __init__(self, app: ASGIApp, shards: Shards, http: aiohttp.ClientSession) -> None:
        """`http`: a client without headers of its own; a request is forwarded with its own
        token."""
        self._app = app
        self._shards = shards
        self._http = http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        url = self._shards.elsewhere(scope["path"])
        if url is None:
            await self._app(scope, receive, send)
            return
        request = HttpRequest(scope, receive)
        try:
            if FORWARDED in request.headers:
                message = (
                    f"this session belongs to {url}: all shards must be started with the same "
                    f"list of shards, in the same order"
                )
                raise ApiError(message, status=421, code="wrong_shard")
            body = bytes(await read_bytes(request))
            await cancel_on_disconnect(request, self._forward(request, url, body, send))
        except ClientDisconnected:
            pass
        except ApiError as e:
            await error_response(e, scope["path"])(scope, receive, send)

    async def _forward(self, request: HttpRequest, url: str, body: bytes, send: Send) -> None:
        scope, started = request.scope, False
        query = scope["query_string"].decode()
        path = scope["raw_path"].decode() + (f"?{query}" if query else "")
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in NOT_PASSED_ON
        ]
        try:
            async with self._http.request(
                scope["method"], url + path, data=body or None,
                headers=[*headers, (FORWARDED, "1")], allow_redirects=False,
            ) as response:  # fmt: skip
                answered = [
                    (name.lower(), value)
                    for name, value in response.raw_headers
                    if name.lower() not in NOT_PASSED_ON
                ]
                started = True
                await send(
                    {
                        "type": "http.response.start",
                        "status": response.status,
                        "headers": answered,
                    }
                )
                async for chunk in response.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except aiohttp.ClientError as e:
            if started:
                raise  # break off this connection as the other shard did
            raise Unavailable(
                f"the gateway at {url}, which has this session, cannot be reached"
            ) from e
