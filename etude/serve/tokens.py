"""Tokens: permissions with an expiry.

A token is `etude_CLAIMS.MAC`: its scope, its subject, its expiry, and an id by which it can be
revoked, signed with the secret of the gateway. The secret never travels; it allows its holder to
make any token. A token permits what the policy of a route says (`serve/policies.py`), and nothing
else.
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
"""The secret that a gateway signs tokens with. Only processes that make tokens need it."""
MIN_SECRET_CHARS = 32
"""Every token allows its holder to test guesses of the secret, and a harness has time."""
PREFIX = "etude_"
MAX_LIFETIME_S = 366 * 86400.0
MAX_SESSION_S = 2 * 86400.0
"""Lifetime of a session's tokens, and time for which the ids of closed sessions are remembered."""
_CONTEXT = b"etude token 1\n"


class Scope(StrEnum):
    SESSION = "session"
    """Take part in one session, whose id is the subject."""
    SCORE = "score"
    """Report the score of one session, whose id is the subject. No agent gets such a token: an
    agent must not score its own session."""
    USER = "user"
    """Chat without a session; the subject is the user. What the server keeps for one user is hidden
    from all others."""
    WORKER = "worker"
    """Join a gateway, and be sent its requests."""
    SCHEDULER = "scheduler"
    """Claim sessions to run elsewhere; each session comes with a token of its own."""
    FEEDBACK = "feedback"
    """Send feedback on answers."""
    ADMIN = "admin"
    """Everything, including making other tokens."""


OF_ONE_SESSION = frozenset({Scope.SESSION, Scope.SCORE})
OF_USERS = frozenset({Scope.USER, Scope.FEEDBACK})


class Claims(msgspec.Struct, frozen=True, array_like=True):
    scope: Scope
    subject: str
    expires: float
    """Seconds since 1970."""
    id: str
    organisation: str = ""
    """The organisation of the user."""


class TokenRefused(Exception):
    """A token that is not signed by this server, has expired, or was revoked."""


def sign(claims: Claims, secret: str) -> str:
    body = _text(msgspec.json.encode(claims))
    return f"{PREFIX}{body}.{_mac(body, secret)}"


def verify(token: str, secret: str, now: float) -> Claims:
    """The claims of a token that is signed with the secret and has not expired. Nothing in the
    token is interpreted before its signature is verified, and the verification takes constant
    time."""
    body, _, mac = token.removeprefix(PREFIX).rpartition(".")
    expected = _mac(body, secret)
    genuine = hmac.compare_digest(mac.encode(errors="replace"), expected.encode())
    if not genuine or not token.startswith(PREFIX):
        raise TokenRefused("this is not a token of this server")
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
    """Makes and verifies tokens, and keeps track of those that were revoked."""

    def __init__(
        self, secret: str | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Without a secret, a random one is used, and its tokens end with this process."""
        self._secret = secret or secrets.token_urlsafe(32)
        self._clock = clock
        self._revoked: set[str] = set()
        self._closed: dict[str, float] = {}

    def mint(self, scope: Scope, subject: str, lifetime_s: float, organisation: str = "") -> str:
        return sign(self.claims(scope, subject, lifetime_s, organisation), self._secret)

    def claims(
        self, scope: Scope, subject: str, lifetime_s: float, organisation: str = ""
    ) -> Claims:
        """The claims of a new token. Raises ValueError if no token may have them."""
        longest = longest_s(scope)
        if not 0 < lifetime_s <= longest:
            raise ValueError(
                f"a token of the scope {scope} must have a lifetime above 0 s and at most "
                f"{longest:.0f} s, not {lifetime_s!r}"
            )
        if scope in OF_ONE_SESSION and not subject:
            raise ValueError("a session token needs the session's id as its subject")
        if organisation and scope not in OF_USERS:
            raise ValueError(
                f"a token of the scope {scope} cannot belong to an organisation: only "
                f"tokens of users can"
            )
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
        """Revoke the tokens of a session that is over. `at`: when it ended; now by default."""
        now = self._clock()
        while self._closed and next(iter(self._closed.values())) < now:
            del self._closed[next(iter(self._closed))]
        self._closed[session] = (now if at is None else at) + MAX_SESSION_S


def new_session_id() -> str:
    """A random id that nobody can guess."""
    return secrets.token_hex(16)


def longest_s(scope: Scope) -> float:
    """The longest lifetime that a token of a scope may have."""
    return MAX_SESSION_S if scope in OF_ONE_SESSION else MAX_LIFETIME_S


def read_secret() -> str | None:
    """The secret in the environment. Raises if it is short enough to be guessed."""
    secret = os.environ.get(SECRET_VARIABLE) or None
    if secret is not None and len(secret) < MIN_SECRET_CHARS:
        raise EtudeError(
            f"{SECRET_VARIABLE} has only {len(secret)} characters, so it could be guessed from "
            f"a token: make one of at least {MIN_SECRET_CHARS} with `openssl rand -hex 32`"
        )
    return secret
