"""Access control of the dashboard, and the headers that restrict what a browser does with its
answers.

A page of a stranger can make a browser send requests to loopback, under a host name that resolves
to it (DNS rebinding) or across sites. A request must therefore name one of our hosts, come from our
own page if the browser sends its origin, and carry the token if there is one. The token is sent in
a header that no other site can set, never in a cookie or a URL.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

API = "/api/"
READING = ("GET", "HEAD")
CSP = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The access rules of one server."""

    host: str
    """The host that it listens on."""
    token: str | None = None

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """(status, reason) of a refusal, or None if the request may pass."""
        given = _headers(scope)
        hosts = given.get("host", ())
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return 421, "this server does not serve that host name"
        origins = given.get("origin", ())
        if any(origin.partition("://")[2] != hosts[0] for origin in origins):
            return 403, "requests from other sites are refused"
        if not scope["path"].startswith(API):
            return None if scope["method"] in READING else (405, "pages are read-only")
        if any(site not in ("same-origin", "none") for site in given.get("sec-fetch-site", ())):
            return 403, "requests from other sites are refused"
        if self.token is None and scope["method"] not in READING:
            return 403, "verdicts need a token: start `etude dash` with --token-file or ETUDE_TOKEN"
        if self.token is not None and not self._has_token(given):
            return 401, "send this server's token as 'Authorization: Bearer ..'"
        return None

    def _is_ours(self, host: str) -> bool:
        """True for loopback by any name. For a server that listens on more than loopback, also for
        any IP address, which no name server can forge, and for the names of this machine."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name == "localhost":
            return True
        wide = not _is_loopback(self.host)
        try:
            return ipaddress.ip_address(name).is_loopback or wide
        except ValueError:
            return wide and name in {self.host.lower(), *_machine_names()}

    def _has_token(self, given: Mapping[str, tuple[str, ...]]) -> bool:
        assert self.token is not None
        expected = f"Bearer {self.token}".encode()
        sent = given.get("authorization", ())
        return len(sent) == 1 and hmac.compare_digest(sent[0].encode(), expected)


@cache
def _machine_names() -> set[str]:
    return {socket.gethostname().lower(), socket.getfqdn().lower()}


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _headers(scope: Scope) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name, value in scope.get("headers", ()):
        key = name.decode("latin-1").lower()
        found[key] = (*found.get(key, ()), value.decode("latin-1"))
    return found


def guarded(app: ASGIApp, access: Access) -> ASGIApp:
    """Wrap an app: requests against the rules do not reach it, and every answer carries
    `HEADERS`."""
    extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        refused = access.refusal(scope)
        if refused is not None:
            status, why = refused
            await JSONResponse({"error": why}, status)(scope, receive, send_with_headers)
            return
        await app(scope, receive, send_with_headers)

    return call
