"""`etude token`: a token for a worker on another machine, a user, or anybody else at a gateway."""

from __future__ import annotations

from etude.core.errors import EtudeError
from etude.serve.tokens import SECRET_VARIABLE, Scope, TokenAuthority, read_secret


def make_token(scope: str, subject: str, days: float) -> str:
    secret = read_secret()
    if secret is None:
        raise EtudeError(
            f"set {SECRET_VARIABLE} to the secret of the gateway that the token is for; to make "
            f"one: openssl rand -hex 32"
        )
    try:
        return TokenAuthority(secret).mint(Scope(scope), subject, days * 86400)
    except ValueError as e:
        raise EtudeError(f"no token: {e}") from e
