"""The targets for newcomers, as `make -n` tells them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", ["demo", "models/smollm2-135m"])
def test_the_environment_may_lie_elsewhere(target: str, tmp_path: Path) -> None:
    argv = ["make", "-n", "-B", target, f"VENV={tmp_path}/place"]
    told = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"-m venv {tmp_path}/place " in told and f"{tmp_path}/place/bin/etude " in told
    assert ".venv" not in told
