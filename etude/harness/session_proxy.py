"""The model of one session, for a program that must reach nothing else. Requests below `/v1` are
forwarded to the session's own URL with the real key, and the answers are streamed back."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Awaitable
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from etude.core.patience import when_back
from etude.core.seeds import derive
from etude.core.types import Json

_PATH = re.compile(r"/v1((?:/[A-Za-z0-9_-][A-Za-z0-9_.-]*)+)")
_CHAT = "/chat/completions"
_SAMPLING = ("/responses", "/messages", "/completions")
_FORWARDED = ("Content-Type", "Accept", "anthropic-version", "anthropic-beta", "X-Etude-Segment")
_MAX_BODY_BYTES = 64 << 20
_NOTED_BYTES = 1 << 20
_REFUSAL_CHARS = 200
_OUT_OF_CONTEXT = (b"context_length_exceeded", b"prompt is too long")
"""The markers of this error in OpenAI's and in Anthropic's API."""


class SessionProxy:
    """A handler of `web.Server`."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        base_url: str,
        api_key: str,
        seed: int,
        defaults: dict[str, Json],
    ) -> None:
        """`defaults`: fields that are added to a sampling request if its client leaves them out."""
        self._http = http
        self._base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._seed = seed
        self._defaults = defaults
        self._turn = 0
        self.messages: list[dict[str, Json]] = []
        """Messages of the last request, with its answer unless that was streamed."""
        self.out_of_context = False
        self.refusal = ""
        """The response to the last request if it was an error; empty otherwise."""
        self.lost: aiohttp.ClientError | None = None
        """The error if the model could not be reached."""

    @property
    def has_asked(self) -> bool:
        return self._turn > 0

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        place = _PATH.fullmatch(request.path)
        if place is None:
            return _refusal(404, "only the model's routes, below /v1, exist here")
        try:
            asked = await self._asked(request, place[1])
        except ValueError as e:
            return _refusal(400, f"the body is not a valid JSON object: {e}")
        try:
            return await self._pass_on(request, place[1], asked)
        except aiohttp.ClientError as e:
            self.lost = e
            return _refusal(502, "the model cannot be reached")

    async def _asked(self, request: web.BaseRequest, path: str) -> dict[str, Json] | None:
        """The body with the defaults added; None if there is no body."""
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > _MAX_BODY_BYTES:
                raise ValueError(f"it has more than {_MAX_BODY_BYTES} bytes")
        if request.method != "POST":
            return None
        asked = json.loads(body)
        if not isinstance(asked, dict):
            raise ValueError(f"it is a {type(asked).__name__}")
        defaults: dict[str, Json] = {}
        if path == _CHAT:
            defaults = {**self._defaults, "seed": derive(self._seed, self._turn)}
        elif path in _SAMPLING:
            defaults = {"temperature": self._defaults["temperature"]}
        if defaults:
            self._turn += 1
        return {**defaults, **asked}

    async def _pass_on(
        self, request: web.BaseRequest, path: str, asked: dict[str, Json] | None
    ) -> web.StreamResponse:
        told: dict[str, Any] = {} if asked is None else {"json": asked}
        headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
        asking = partial(
            self._http.request,
            request.method,
            self._base_url + path,
            params=request.query,
            headers={
                **headers,
                "Authorization": f"Bearer {self._api_key}",
                "Accept-Encoding": "identity",
            },
            timeout=aiohttp.ClientTimeout(total=None),
            **told,
        )
        async with await when_back(asking, aiohttp.ClientConnectionError) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            if answer.content_length is not None:
                response.content_length = answer.content_length
            said = bytearray()
            with contextlib.suppress(_ProgramGone):
                await _to_program(response.prepare(request))
                async for chunk in answer.content.iter_any():
                    said += chunk[: _NOTED_BYTES - len(said)]
                    await _to_program(response.write(chunk))
                self._note(asked or {}, answer, bytes(said))
                await _to_program(response.write_eof())
            return response

    def _note(self, asked: dict[str, Json], answer: aiohttp.ClientResponse, said: bytes) -> None:
        told = " ".join(said.decode(errors="replace").split())[:_REFUSAL_CHARS]
        self.refusal = "" if answer.status == 200 else f"{answer.status} {told}"
        is_too_long = any(words in said for words in _OUT_OF_CONTEXT)
        self.out_of_context |= answer.status == 400 and is_too_long
        messages = asked.get("messages")
        if answer.status != 200 or not isinstance(messages, list):
            return
        self.messages = list(messages)
        if answer.content_type == "application/json":
            with contextlib.suppress(ValueError):  # longer than what is kept
                choices = json.loads(said).get("choices") or [{}]
                self.messages += [choices[0]["message"]] if "message" in choices[0] else []


class _ProgramGone(Exception):
    """The program closed its connection, which it may do at any time."""


async def _to_program(sending: Awaitable[object]) -> None:
    """Send data to the program. Both connections raise errors of the same kinds, but only the
    model's are failures, so the program's are converted."""
    try:
        await sending
    except ConnectionError as e:
        raise _ProgramGone from e


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
