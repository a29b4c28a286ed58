"""Tokens: what is signed, ends and is revoked."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.errors import EtudeError
from etude.serve import token_routes
from etude.serve.token_routes import TokenRoutes
from etude.serve.tokens import (
    MAX_SESSION_S,
    OF_ONE_SESSION,
    Claims,
    Scope,
    TokenAuthority,
    TokenRefused,
    new_session_id,
    read_secret,
    sign,
    verify,
)
from etude.store.objects import Objects

SECRET = "a secret of more than thirty-two characters"
CLAIMS = Claims(Scope.SESSION, "s", 100.0, "id")


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(st.sampled_from(Scope), st.text(), st.floats(1.0, 1e12), st.text())
def test_what_is_signed_is_read(scope: Scope, subject: str, expires: float, id: str) -> None:
    claims = Claims(scope, subject, expires, id)
    token = sign(claims, SECRET)
    assert verify(token, SECRET, 0.0) == claims
    assert token.isascii() and " " not in token
    with pytest.raises(TokenRefused, match="expired"):
        verify(token, SECRET, expires)


def forged(token: str) -> dict[str, str]:
    body, _, mac = token.removeprefix("etude_").partition(".")
    claims = msgspec.json.decode(base64.urlsafe_b64decode(body + "=="))
    other = base64.urlsafe_b64encode(msgspec.json.encode(["admin", *claims[1:]])).decode()
    return {
        "another scope": f"etude_{other.rstrip('=')}.{mac}",
        "no signature": f"etude_{body}.",
        "no signature at all": f"etude_{body}",
        "another secret": sign(CLAIMS, SECRET + "x"),
        "no prefix": f"{body}.{mac}",
        "padded": f"etude_{body}==.{mac}",
        "a padded signature": f"etude_{body}.{mac}=",
        "a signature cut short": f"etude_{body}.{mac[:-1]}",
        "twice": f"{token}.{mac}",
        "a line behind it": f"{token}\n",
        "not ASCII": f"etude_{body}.{mac}é",
        "half a surrogate pair": f"etude_{body}\ud800.{mac}",
        "empty": "",
        "a dot": ".",
        "long": "etude_" + "A" * 100_000 + "." + mac,
    }


@pytest.mark.parametrize("kind", forged(sign(CLAIMS, SECRET)))
def test_a_forged_token_is_refused(kind: str) -> None:
    with pytest.raises(TokenRefused, match="not a token of this server"):
        verify(forged(sign(CLAIMS, SECRET))[kind], SECRET, 0.0)


@given(st.integers(0), st.characters())
def test_every_character_counts(place: int, character: str) -> None:
    token = sign(CLAIMS, SECRET)
    place %= len(token)
    changed = token[:place] + character + token[place + 1 :]
    if changed != token:
        with pytest.raises(TokenRefused):
            verify(changed, SECRET, 0.0)


def test_a_token_ends_and_can_be_revoked() -> None:
    time = Time()
    authority = TokenAuthority(SECRET, clock=time)
    token = authority.mint(Scope.USER, "ann", 60.0)
    claims = authority.verify(token)
    assert (claims.scope, claims.subject, claims.expires) == (Scope.USER, "ann", 1060.0)
    other = TokenAuthority(SECRET, clock=time)
    authority.revoke(claims.id)
    with pytest.raises(TokenRefused, match="revoked"):
        authority.verify(token)
    assert other.verify(token) == claims
    time.now = 1060.0
    with pytest.raises(TokenRefused, match="expired"):
        other.verify(token)
    assert authority.verify(authority.mint(Scope.USER, "ann", 60.0)).subject == "ann"


def test_tokens_of_a_session_end_with_it() -> None:
    time = Time()
    authority = TokenAuthority(SECRET, clock=time)
    first, score, other = (
        authority.mint(scope, name, MAX_SESSION_S)
        for scope, name in ((Scope.SESSION, "a"), (Scope.SCORE, "a"), (Scope.SESSION, "b"))
    )
    of_the_user = authority.mint(Scope.USER, "a", 60.0)
    authority.close_session("a")
    for closed in (first, score):
        with pytest.raises(TokenRefused, match="revoked"):
            authority.verify(closed)
    authority.verify(other)
    authority.verify(of_the_user)
    time.now += MAX_SESSION_S + 1
    authority.close_session("c")
    assert list(authority._closed) == ["c"], "what no token can ask for is not kept"


@pytest.mark.parametrize("lifetime_s", [0.0, -1.0, float("nan"), float("inf"), 1e12])
def test_no_token_is_for_ever(lifetime_s: float) -> None:
    with pytest.raises(ValueError, match="must have a lifetime"):
        TokenAuthority().mint(Scope.ADMIN, "", lifetime_s)


@pytest.mark.parametrize("scope", sorted(OF_ONE_SESSION))
def test_a_session_is_not_for_long(scope: Scope) -> None:
    with pytest.raises(ValueError, match="at most 172800 s"):
        TokenAuthority().mint(scope, "s", MAX_SESSION_S + 1)


@pytest.mark.parametrize("scope", sorted(OF_ONE_SESSION))
def test_a_token_of_a_session_names_it(scope: Scope) -> None:
    with pytest.raises(ValueError, match="session's id"):
        TokenAuthority().mint(scope, "", 1.0)


def test_without_a_secret_nobody_elses_tokens_are_good() -> None:
    one, other = TokenAuthority(), TokenAuthority()
    one.verify(token := one.mint(Scope.ADMIN, "", 60.0))
    for secret in ("", "None"):
        forged = sign(CLAIMS, secret)
        with pytest.raises(TokenRefused):
            one.verify(forged)
    with pytest.raises(TokenRefused):
        other.verify(token)


def test_ids_of_sessions_cannot_be_guessed() -> None:
    ids = {new_session_id() for _ in range(1000)}
    assert len(ids) == 1000 and {len(id) for id in ids} == {32}


@pytest.mark.parametrize(
    ("value", "expected"), [("", None), ("x" * 32, "x" * 32), ("x" * 31, EtudeError)]
)
def test_a_secret_from_the_environment(
    value: str, expected: str | None | type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_SECRET", value)
    read: Callable[[], str | None] = read_secret
    if expected is EtudeError:
        with pytest.raises(EtudeError, match="31 characters"):
            read()
    else:
        assert read() == expected


async def test_what_others_revoke_is_looked_for_every_10_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    authority, objects = TokenAuthority(SECRET), Objects.open("memory:")
    token = authority.mint(Scope.USER, "ann", 60.0)
    objects.put(f"revoked-tokens/{authority.verify(token).id}", b"")
    slept: list[float] = []

    class Away(Objects):
        def list(self, prefix: str, *, after: str | None = None) -> list[str]:
            if len(slept) == 1:
                raise EtudeError("it is away")
            return super().list(prefix, after=after)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            authority.verify(token)  # the revocation is not known yet
        if len(slept) == 3:
            raise asyncio.CancelledError

    watched = TokenRoutes(authority, Away(objects._store, objects.url))
    calls = SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread)
    monkeypatch.setattr(token_routes, "asyncio", calls)
    with pytest.raises(asyncio.CancelledError):
        await watched.watch()
    assert slept == [10.0] * 3
    with pytest.raises(TokenRefused, match="revoked"):
        authority.verify(token)
    said = capsys.readouterr().err
    assert said.endswith("cannot be read, trying again: it is away\n")
