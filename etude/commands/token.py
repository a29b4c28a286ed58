"""`etude token`: a token for a worker on another machine, a user, or anybody else at a gateway."""

from __future__ import annotations

from etude.core.errors import EtudeError
from etude.serve.tokens import SECRET_VARIABLE, Scope, TokenAuthority, longest_s, read_secret

DAYS = 30.0
DAY_S = 86400.0


def make_token(scope: str, subject: str, days: float | None, organisation: str = "") -> str:
    """`days`: until it ends; else 30, or as many as one of its scope may have."""
    secret = read_secret()
    if secret is None:
        raise EtudeError(
            f"set {SECRET_VARIABLE} to the secret of the gateway that the token is for; to make "
            f"one: openssl rand -hex 32"
        )
    try:
        longest = longest_s(Scope(scope))
        lifetime_s = min(DAYS * DAY_S, longest) if days is None else days * DAY_S
        return TokenAuthority(secret).mint(Scope(scope), subject, lifetime_s, organisation)
    except ValueError as e:
        raise EtudeError(f"no token: {e}") from e
