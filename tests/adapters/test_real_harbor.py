"""Harbor's own classes read our files, and we read theirs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from etude.core.errors import EtudeError
from etude.factory.harbor import write_task
from etude.factory.harbor_task import read_harbor_task
from tests.factory.test_parts import task

pytestmark = pytest.mark.adapters


def test_harbor_reads_our_tasks(tmp_path: Path) -> None:
    harbor = pytest.importorskip("harbor.models.task.task", reason="harbor wants Python 3.12")
    place = write_task(tmp_path, task(), tmp_path / "archives")
    assert harbor.Task.is_valid_dir(place)
    found = harbor.Task(place)
    assert found.instruction == task().instruction
    assert found.config.environment.network_mode.value == "no-network"
    assert found.config.metadata["etude"]["kind"] == task().kind
    assert found.paths.discovered_test_path_for(found.config.environment.os) is not None


def test_we_read_the_task_that_harbor_makes(tmp_path: Path) -> None:
    harbor = pytest.importorskip("harbor", reason="harbor wants Python 3.12")
    place = tmp_path / "template"
    shutil.copytree(Path(harbor.__file__).parent / "cli" / "template-task", place)
    (place / "instruction.md").write_text("Do it.\n")
    with pytest.raises(EtudeError, match=r"FROM ubuntu:24\.04"):
        read_harbor_task(place)
    found = read_harbor_task(place, ["FROM ubuntu:*"])
    assert (found.spec.workdir, found.verifier_s) == ("/app", 900.0)


def test_we_read_all_that_harbor_writes_of_a_plain_task(tmp_path: Path) -> None:
    config = pytest.importorskip("harbor.models.task.config", reason="harbor wants Python 3.12")
    place = tmp_path / "all"
    (place / "tests").mkdir(parents=True)
    (place / "environment").mkdir()
    (place / "instruction.md").write_text("Do it.\n")
    (place / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    (place / "environment/Dockerfile").write_text(f"FROM python:{version}\nWORKDIR /app\n")
    plain = config.TaskConfig(environment={"network_mode": "no-network"})
    (place / "task.toml").write_text(plain.model_dump_toml())
    assert read_harbor_task(place).spec.workdir == "/app"
