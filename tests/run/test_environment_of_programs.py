"""The environment variables of a run's programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from etude.core.errors import EtudeError
from etude.launch.launcher import LocalLauncher, Program, locked
from etude.serve.process import TOKEN_VARIABLE
from etude.serve.tokens import MIN_SECRET_CHARS, SECRET_VARIABLE, Scope, TokenAuthority

SECRET = "mine for all runs, and long enough"

CREDENTIALS = (TOKEN_VARIABLE, SECRET_VARIABLE)
PYTHONS = ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")
NAMES = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", *PYTHONS, "HOME", *CREDENTIALS)
SHOW = f"import json, os; print(json.dumps({{name: os.environ.get(name) for name in {NAMES!r}}}))"


async def shown(folder: Path, **more: Any) -> dict[str, str]:
    with locked(folder) as lock:
        launcher = LocalLauncher(folder, threads=3, resume="", lock=lock)
        await launcher.run_to_end(Program("show", (sys.executable, "-c", SHOW), **more))
    found: dict[str, str] = json.loads((folder / "logs" / "show.log").read_text().splitlines()[-1])
    return found


async def test_threads_and_a_secret_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    first = await shown(tmp_path / "a", makes_tokens=True)
    second = await shown(tmp_path / "b", makes_tokens=True)
    assert (first["OMP_NUM_THREADS"], first["GOMP_SPINCOUNT"], first["HOME"]) == (
        "3",
        "10000",
        "/somewhere",
    )
    assert [first[name] for name in PYTHONS] == ["1", "1"], (
        "or the last words of a process that is killed, or that crashes, are lost"
    )
    assert first[SECRET_VARIABLE] != second[SECRET_VARIABLE]
    assert len(first[SECRET_VARIABLE]) >= MIN_SECRET_CHARS


async def test_what_the_user_says_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    found = await shown(tmp_path, makes_tokens=True)
    assert (found["GOMP_SPINCOUNT"], found[SECRET_VARIABLE]) == ("7", SECRET)


async def test_each_has_the_token_that_it_needs_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.setenv(TOKEN_VARIABLE, "an admin's, of another gateway")
    trainer = await shown(tmp_path / "trainer")
    assert (trainer[TOKEN_VARIABLE], trainer[SECRET_VARIABLE]) == (None, None)
    worker = await shown(tmp_path / "worker", scope=Scope.WORKER)
    assert worker[SECRET_VARIABLE] is None
    claims = TokenAuthority(SECRET).verify(worker[TOKEN_VARIABLE])
    assert (claims.scope, claims.subject) == (Scope.WORKER, "show")


async def test_a_secret_that_could_be_guessed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "hunter2")
    with pytest.raises(EtudeError, match="openssl rand -hex 32"):
        await shown(tmp_path)
