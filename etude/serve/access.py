"""Authentication and authorisation: the identity behind a request, and what it may do.

There are three kinds of servers. A gateway that others can reach verifies signed tokens. A worker,
or `etude serve`, has one token, which permits everything on that server. A server on the loopback
interface without any token is open to everybody on the machine except requests from a browser,
since any page that is open there can send requests.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

from starlette.requests import Request as HttpRequest

from etude.serve.policies import Policy
from etude.serve.process import is_loopback
from etude.serve.tokens import OF_ONE_SESSION, Scope, TokenAuthority, TokenRefused

IDENTITY = "etude.identity"
"""Key of the identity in the ASGI scope of a request."""


class AccessDenied(Exception):
    """A request that is not allowed, with the reason and the HTTP status and code of the answer."""

    def __init__(self, message: str, *, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity behind a request: the scope of its token, and the subject that the token was
    made for."""

    scope: Scope
    subject: str = ""
    organisation: str = ""
    """The user's organisation; empty for other scopes."""
    client: str = ""
    """The client that its requests are counted for in the limit of concurrent answers; empty for no
    client."""
    token: str = field(default="", repr=False)
    """The token as it was sent."""
    expires: float = float("inf")

    @property
    def owner(self) -> str:
        """The key under which a server keeps this user's responses outside of sessions. No session
        id looks like it."""
        return f"/user/{self.subject}" if self.scope is Scope.USER else ""

    def check(self, policy: Policy, path_params: Mapping[str, str]) -> None:
        if self.scope not in policy:
            opens = ", ".join(sorted(policy))
            message = f"this route needs a token of the scope {opens}, not {self.scope}"
            raise AccessDenied(message, status=403, code="wrong_scope")
        for_one = self.scope in OF_ONE_SESSION
        if for_one and path_params.get("session", self.subject) != self.subject:
            message = "this token is for another session"
            raise AccessDenied(message, status=403, code="wrong_session")


class Access(Protocol):
    """The authentication of a server: finds the identity behind a request from its headers and the
    address of its client."""

    def identify(self, headers: Mapping[str, str], address: str) -> Identity: ...


class SignedTokens:
    """Authentication by the signed tokens of an authority."""

    def __init__(self, authority: TokenAuthority) -> None:
        self._authority = authority

    def identify(self, headers: Mapping[str, str], address: str) -> Identity:
        why = "send a token of this server as 'Authorization: Bearer TOKEN'"
        for token in _tokens_in(headers):
            try:
                claims = self._authority.verify(token)
            except TokenRefused as e:
                why = str(e)
            else:
                client = f"{claims.scope} {claims.subject or claims.id}"
                return Identity(
                    scope=claims.scope,
                    subject=claims.subject,
                    organisation=claims.organisation,
                    client="" if claims.scope is Scope.ADMIN else client,
                    token=token,
                    expires=claims.expires,
                )
        raise AccessDenied(why, status=401, code="unauthorized")


class OneToken:
    """One token that opens everything; its clients are told apart by their addresses."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def identify(self, headers: Mapping[str, str], address: str) -> Identity:
        for token in _tokens_in(headers):
            if hmac.compare_digest(token.encode("latin-1"), self._token):
                return Identity(scope=Scope.ADMIN, client=address, token=token)
        message = "send this server's token as 'Authorization: Bearer TOKEN'"
        raise AccessDenied(message, status=401, code="unauthorized")


class NoToken:
    """No authentication: everybody on this machine is let in, except web pages in its browser.
    Those send an origin, or reach the server by a host name other than localhost (DNS
    rebinding)."""

    def identify(self, headers: Mapping[str, str], address: str) -> Identity:
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not is_loopback(_name_in(host)):
            raise AccessDenied(
                f"a server without a token can only be called as 127.0.0.1 or localhost, not as "
                f"{host[:200]!r}",
                status=403,
                code="wrong_host",
            )
        foreign = origin is not None and origin != f"http://{host}"
        if foreign or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            message = "a server without a token does not accept requests from web pages"
            raise AccessDenied(message, status=403, code="wrong_origin")
        sent = next(iter(_tokens_in(headers)), "")
        return Identity(scope=Scope.ADMIN, token=sent)


def identity_of(http: HttpRequest) -> Identity:
    """The identity that the server found before it routed the request."""
    identity: Identity = http.scope[IDENTITY]
    return identity


def _name_in(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _tokens_in(headers: Mapping[str, str]) -> list[str]:
    """Both `Authorization: Bearer` and `x-api-key`, the header that Anthropic's clients use."""
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    found = [bearer.strip()] if kind.lower() == "bearer" else []
    return [token for token in (*found, headers.get("x-api-key", "")) if token]
