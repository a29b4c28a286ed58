from __future__ import annotations

import pytest

from etude.cli import main
from etude.serve.tokens import Scope, TokenAuthority

SECRET = "the secret of a gateway elsewhere, long enough"


def test_a_token_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ETUDE_SECRET", SECRET)
    assert main(["token", "worker", "--subject", "east", "--days", "2"]) == 0
    claims = TokenAuthority(SECRET).verify(capsys.readouterr().out.strip())
    assert (claims.scope, claims.subject) == (Scope.WORKER, "east")
    assert main(["token", "session", "--days", "1"]) == 2
    assert "session's id" in capsys.readouterr().err
    assert main(["token", "user", "--days", "-1"]) == 2
    monkeypatch.delenv("ETUDE_SECRET")
    assert main(["token", "user"]) == 2
    assert "openssl rand -hex 32" in capsys.readouterr().err


def test_every_scope_has_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_SECRET", SECRET)
    for scope in Scope:
        assert main(["token", scope, "--subject", "x"]) == 0
