from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import Etude
from tests.namespaces import need_namespaces


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory = shared / "policy"
    # made once by parallel test processes
    with (shared / "policy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "model.safetensors").exists():
            subprocess.run([sys.executable, "-m", "tests.e2e.policy", str(directory)], check=True)
    return directory


@pytest.fixture(scope="session")
def isolation() -> str:
    """Isolation of the sandboxes. Processes are killed and stopped in these tests, so without
    namespaces they are skipped, unless ETUDE_ISOLATION asks for another isolation."""
    if (asked := os.environ.get("ETUDE_ISOLATION", "namespaces")) == "namespaces":
        need_namespaces()
    return asked


@pytest.fixture
def etude(tmp_path: Path, policy: Path, isolation: str) -> Iterator[Etude]:
    made = Etude(tmp_path, policy, isolation)
    yield made
    for process in made.started:
        process.kill()
        process.wait()
