"""The targets for newcomers, from the output of `make -n`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def told(*argv: str) -> str:
    """The commands that make would run if no target existed."""
    given = ["make", "-n", "-B", *argv]
    return subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["demo", "models/smollm2-135m"])
def test_the_environment_may_lie_elsewhere(target: str, tmp_path: Path) -> None:
    done = told(target, f"VENV={tmp_path}/place")
    assert f"-m venv {tmp_path}/place " in done and f"{tmp_path}/place/bin/etude " in done
    assert ".venv" not in done


def test_what_the_shell_calls_venv_is_not_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VENV", str(tmp_path))
    assert str(tmp_path) not in told("clean")


@pytest.mark.parametrize("place", [".venv-vllm", ".venv-wheels", ".venv-dash", ".venv-openenv"])
def test_an_environment_is_made_where_it_stays(place: str) -> None:
    """Programs of an environment that was moved, such as `vllm`, do not start."""
    done = told(f"{place}/.installed")
    assert f"-m venv {place}\n" in done and "mv " not in done
