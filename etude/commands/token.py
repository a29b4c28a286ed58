"""`etude token`: make a token of a gateway, for a worker on another machine, a user, or any other
client."""

from __future__ import annotations

from etude.core.errors import EtudeError
from etude.serve.tokens import SECRET_VARIABLE, Scope, TokenAuthority, longest_s, read_secret

DAYS = 30.0
DAY_S = 86400.0


def make_token(scope: str, subject: str, days: float | None, organisation: str = "") -> str:
    """`days`: the lifetime; by default 30, or the maximum of the scope if that is less."""
    secret = read_secret()
    if secret is None:
        raise EtudeError(
            f"set {SECRET_VARIABLE} to the secret of the gateway that the token is for; to "
            "create a secret: openssl rand -hex 32"
        )
    try:
        longest = longest_s(Scope(scope))
        lifetime_s = min(DAYS * DAY_S, longest) if days is None else days * DAY_S
        return TokenAuthority(secret).mint(Scope(scope), subject, lifetime_s, organisation)
    except ValueError as e:
        raise EtudeError(f"no token made: {e}") from e
