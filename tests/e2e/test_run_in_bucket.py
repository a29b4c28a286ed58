"""A whole run in a bucket of a real S3 server: started, killed, resumed, and read by every command
from its URL alone (`make test-s3`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.launch.place import RunPlace
from etude.run.audit import audit
from etude.store.runs import Run
from tests.e2e.runs import TINY
from tests.weights.conftest import reached_by, s3_port  # noqa: F401

pytestmark = pytest.mark.s3


def etude(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-X", "faulthandler", "-P", "-m", "etude", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, cwd=folder, stdout=pipe, stderr=pipe, text=True)


def said(*arguments: str, folder: Path) -> str:
    process = etude(*arguments, folder=folder)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def test_a_run_in_a_bucket_is_killed_and_goes_on(
    s3_port: int,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    policy: Path,
) -> None:
    url = f"{reached_by(s3_port, monkeypatch)}/team/tiny"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    toml = tmp_path / "run.toml"
    toml.write_text(f'store = "{url}"\n{TINY.read_text()}')
    isolation = os.environ.get("ETUDE_ISOLATION", "namespaces")
    run = ("run", str(toml), "--json", "--set", f"model.path={policy}")
    run += ("--set", f"sandbox.isolation={isolation}")
    first = etude(*run, folder=tmp_path)
    while not Run.open(url).groups():
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    first.communicate()

    summary = json.loads(said(*run, folder=tmp_path).splitlines()[-1])
    assert summary["in_flight"] == 0 and summary["lag_max"] <= summary["lag_bound"] == 1
    audited = audit(RunPlace.of(url).open())
    assert audited.finished and audited.violations == []

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert "the ledger balances" in said("audit", url, folder=elsewhere)
    shown = said("show", url, folder=elsewhere)
    assert f"tiny in {url}: finished" in shown
    cost = next(line for line in shown.splitlines() if line.startswith("store: "))
    assert "requests a step" in cost and " 0 requests" not in cost
    print(cost)
    saved = Run.open(url).checkpoints()[-1]
    assert saved in said("show", f"{url}/checkpoints/{saved}", folder=elsewhere)
    assert "reader" in said("weights", "log", url, folder=elsewhere)
    assert said("sessions", url, folder=elsewhere)
    assert "no rollout is waiting" in said("doctor", url, folder=elsewhere)
    assert not (elsewhere / "runs").exists(), "who only looks leaves nothing behind"
