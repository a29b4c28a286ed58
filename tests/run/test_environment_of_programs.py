"""What the programs of a run find in their environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from etude.launch.launcher import Launcher, Program, locked
from etude.serve.process import TOKEN_VARIABLE

NAMES = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "PYTHONUNBUFFERED", TOKEN_VARIABLE, "HOME")
SHOW = f"import json, os; print(json.dumps({{name: os.environ.get(name) for name in {NAMES!r}}}))"


async def shown(folder: Path) -> dict[str, str]:
    with locked(folder) as lock:
        launcher = Launcher(folder, threads=3, resume="", lock=lock)
        await launcher.run_to_end(Program("show", (sys.executable, "-c", SHOW)))
    found: dict[str, str] = json.loads((folder / "logs" / "show.log").read_text().splitlines()[-1])
    return found


async def test_threads_and_a_token_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    first, second = await shown(tmp_path / "a"), await shown(tmp_path / "b")
    assert (first["OMP_NUM_THREADS"], first["GOMP_SPINCOUNT"], first["HOME"]) == (
        "3",
        "10000",
        "/somewhere",
    )
    assert first["PYTHONUNBUFFERED"] == "1", (
        "or the last words of a process that is killed are lost"
    )
    assert first[TOKEN_VARIABLE] != second[TOKEN_VARIABLE] and len(first[TOKEN_VARIABLE]) > 20


async def test_what_the_user_says_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv(TOKEN_VARIABLE, "mine-for-all-runs")
    found = await shown(tmp_path)
    assert (found["GOMP_SPINCOUNT"], found[TOKEN_VARIABLE]) == ("7", "mine-for-all-runs")
