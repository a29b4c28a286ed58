"""Tokens: who may do what, and until when.

A token is `etude_CLAIMS.MAC`: its scope, whom or what it is for, when it ends, and an id by which
it can be revoked, signed with the secret of the gateway. Whoever has the secret can make any token;
it never travels. A token opens what the policy of a route says (`serve/policies.py`), no more.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable
from enum import StrEnum

import msgspec

from etude.core.errors import EtudeError
from etude.store.decoding import decode_json

SECRET_VARIABLE = "ETUDE_SECRET"
"""What a gateway signs tokens with. Only whoever makes tokens needs it."""
MIN_SECRET_CHARS = 32
"""Every token is something to try secrets on, and a harness has time."""
PREFIX = "etude_"
MAX_LIFETIME_S = 366 * 86400.0
MAX_SESSION_S = 2 * 86400.0
"""Of the token of a session: so long the ids of those that are over are remembered."""
_CONTEXT = b"etude token 1\n"


class Scope(StrEnum):
    SESSION = "session"
    """One session: speak in it. The subject is its id."""
    SCORE = "score"
    """Say what one session was worth. The subject is its id. No agent is given it: whoever can
    speak in a session cannot score it."""
    USER = "user"
    """Chat without a session; the subject is the user. What the server keeps for one user no other
    sees."""
    WORKER = "worker"
    """Join a gateway, and be asked by it."""
    SCHEDULER = "scheduler"
    """Ask for sessions to run elsewhere; each comes with a token of its own."""
    FEEDBACK = "feedback"
    """Say what became of answers."""
    ADMIN = "admin"
    """Everything, other tokens included."""


OF_ONE_SESSION = frozenset({Scope.SESSION, Scope.SCORE})
OF_USERS = frozenset({Scope.USER, Scope.FEEDBACK})


class Claims(msgspec.Struct, frozen=True, array_like=True):
    scope: Scope
    subject: str
    expires: float
    """In seconds since 1970."""
    id: str
    organisation: str = ""
    """That its user belongs to."""


class TokenRefused(Exception):
    """A token that is not signed by this server, has expired, or was revoked."""


def sign(claims: Claims, secret: str) -> str:
    body = _text(msgspec.json.encode(claims))
    return f"{PREFIX}{body}.{_mac(body, secret)}"


def verify(token: str, secret: str, now: float) -> Claims:
    """The claims of a token that is signed with the secret and has not ended. Nothing of it is read
    before the signature is known to be right, and how long that takes tells nothing."""
    body, _, mac = token.removeprefix(PREFIX).rpartition(".")
    expected = _mac(body, secret)
    genuine = hmac.compare_digest(mac.encode(errors="replace"), expected.encode())
    if not genuine or not token.startswith(PREFIX):
        raise TokenRefused("this is no token of this server")
    claims = decode_json(base64.urlsafe_b64decode(body + "=="), Claims)
    if claims.expires <= now:
        raise TokenRefused("this token has expired")
    return claims


def _mac(body: str, secret: str) -> str:
    message = _CONTEXT + body.encode(errors="replace")
    return _text(hmac.new(secret.encode(), message, hashlib.sha256).digest())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class TokenAuthority:
    """Makes tokens, and knows those that were revoked."""

    def __init__(
        self, secret: str | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Without a secret one is made up, and its tokens end with this process."""
        self._secret = secret or secrets.token_urlsafe(32)
        self._clock = clock
        self._revoked: set[str] = set()
        self._closed: dict[str, float] = {}

    def mint(self, scope: Scope, subject: str, lifetime_s: float, organisation: str = "") -> str:
        return sign(self.claims(scope, subject, lifetime_s, organisation), self._secret)

    def claims(
        self, scope: Scope, subject: str, lifetime_s: float, organisation: str = ""
    ) -> Claims:
        """The claims of a new token. Raises ValueError for claims that no token may have."""
        longest = longest_s(scope)
        if not 0 < lifetime_s <= longest:
            raise ValueError(
                f"a token of this scope lives for more than 0 s and at most {longest:.0f} s, not "
                f"{lifetime_s!r}"
            )
        if scope in OF_ONE_SESSION and not subject:
            raise ValueError("the token of a session needs the id of the session as its subject")
        if organisation and scope not in OF_USERS:
            raise ValueError(f"an organisation has users: a token of the scope {scope} has none")
        expires = self._clock() + lifetime_s
        id = secrets.token_hex(8)
        return Claims(scope, subject, expires, id, organisation)

    def sign(self, claims: Claims) -> str:
        return sign(claims, self._secret)

    def verify(self, token: str) -> Claims:
        claims = verify(token, self._secret, self._clock())
        closed = claims.scope in OF_ONE_SESSION and claims.subject in self._closed
        if closed or claims.id in self._revoked:
            raise TokenRefused("this token was revoked")
        return claims

    def revoke(self, id: str) -> None:
        self._revoked.add(id)

    def close_session(self, session: str, at: float | None = None) -> None:
        """The session is over: its tokens open nothing any more. `at`: since when, if not from now
        on."""
        now = self._clock()
        while self._closed and next(iter(self._closed.values())) < now:
            del self._closed[next(iter(self._closed))]
        self._closed[session] = (now if at is None else at) + MAX_SESSION_S


def new_session_id() -> str:
    """One that nobody guesses."""
    return secrets.token_hex(16)


def longest_s(scope: Scope) -> float:
    """How long a token may live at most."""
    return MAX_SESSION_S if scope in OF_ONE_SESSION else MAX_LIFETIME_S


def read_secret() -> str | None:
    """From the environment. One that could be found by trying is an error."""
    secret = os.environ.get(SECRET_VARIABLE) or None
    if secret is not None and len(secret) < MIN_SECRET_CHARS:
        raise EtudeError(
            f"{SECRET_VARIABLE} has {len(secret)} characters, and whoever has a token could find "
            f"it by trying: make one of at least {MIN_SECRET_CHARS} with: openssl rand -hex 32"
        )
    return secret
