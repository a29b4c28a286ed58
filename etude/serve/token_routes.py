"""The routes to make and revoke tokens. Revocations are kept in the store, so that they hold after
a restart and for other gateways."""

from __future__ import annotations

import asyncio
import re

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from etude.core.errors import EtudeError
from etude.serve.access import identity_of
from etude.serve.http import ApiError, read, respond
from etude.serve.process import log_to_stderr
from etude.serve.tokens import Scope, TokenAuthority
from etude.store.objects import Objects

FOLDER = "revoked-tokens"
LOOK_EVERY_S = 10.0
_ID = re.compile(r"[0-9a-f]{16}")


class TokenRequest(msgspec.Struct, forbid_unknown_fields=True):
    scope: Scope
    subject: str = ""
    lifetime_s: float = 86400.0
    organisation: str = ""


class MintedToken(msgspec.Struct):
    token: str
    id: str
    expires: float


class TokenRoutes:
    def __init__(self, authority: TokenAuthority, objects: Objects) -> None:
        self._authority = authority
        self._objects = objects

    def routes(self) -> list[Route]:
        return [
            Route("/tokens", self.mint, methods=["POST"]),
            Route("/tokens/{id}", self.revoke, methods=["DELETE"]),
        ]

    async def mint(self, http: HttpRequest) -> Response:
        """Make a token. One that was made with another token does not outlive that token."""
        asked = await read(http, TokenRequest)
        try:
            claims = self._authority.claims(
                asked.scope, asked.subject, asked.lifetime_s, asked.organisation
            )
        except ValueError as e:
            raise ApiError(str(e)) from e
        expires = min(claims.expires, identity_of(http).expires)
        claims = msgspec.structs.replace(claims, expires=expires)
        return respond(MintedToken(self._authority.sign(claims), claims.id, claims.expires))

    async def revoke(self, http: HttpRequest) -> Response:
        """Revoke a token; answers when this is stored."""
        id: str = http.path_params["id"]
        if not _ID.fullmatch(id):
            raise ApiError(f"{id[:200]!r} is not a token id", param="id")
        self._authority.revoke(id)
        await asyncio.to_thread(self._objects.put, f"{FOLDER}/{id}", b"")
        return Response(status_code=204)

    async def restore(self) -> None:
        """Read the revocations in the store, made here or by another process."""
        for key in await asyncio.to_thread(self._objects.list, FOLDER):
            self._authority.revoke(key.rpartition("/")[2])

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.restore()
            except EtudeError as e:
                log_to_stderr(f"revoked tokens cannot be read, trying again: {e}")
