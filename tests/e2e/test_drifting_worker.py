"""A worker whose log-probs differ from those of its model joins a real run: its region is put into
quarantine, and the run goes on without it (`make test-hosts`)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.core.events import EVENTS, RegionQuarantined
from etude.launch.launcher import free_ports
from etude.serve.tokens import Scope, TokenAuthority
from etude.store.runs import Run
from tests.e2e.runs import ONE_REGION, Etude, check_books

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1800)]

SECRET = "a secret of this test, and of nobody else"
DRIFTING = """
from dataclasses import replace
from etude.core.sampling import Sample
from etude.serve import engine_thread, worker

def off(sample):
    return replace(sample, logprobs=tuple(p - 0.3 for p in sample.logprobs))

class Drifting(engine_thread.EngineThread):
    async def sample(self, request):
        return off(await super().sample(request))

    async def stream(self, request):
        async for event in super().stream(request):
            yield off(event) if isinstance(event, Sample) else event

worker.EngineThread = Drifting
worker.main()
"""


def test_it_is_found_and_left_out(
    etude: Etude, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, port = free_ports(2)
    text = ONE_REGION.replace("groups_per_step = 2", "groups_per_step = 4")
    etude.write(text.replace("[engine]", f"[engine]\nport = {gateway}"))
    monkeypatch.setenv("ETUDE_SECRET", SECRET)
    running = etude.start()
    while not (etude.directory / "model" / "tokenizer.json").exists():
        assert running.poll() is None, running.communicate()[1]
        time.sleep(0.1)
    argv = [sys.executable, "-P", "-c", DRIFTING, "--store", f"file:{etude.directory}"]
    argv += ["--region", "south", "--port", str(port), "--gateway", f"http://127.0.0.1:{gateway}"]
    token = TokenAuthority(SECRET).mint(Scope.WORKER, "planted", 3600.0)
    with (tmp_path / "planted.log").open("wb") as log:
        planted = subprocess.Popen(
            argv, env=os.environ | {"ETUDE_TOKEN": token}, stdout=log, stderr=log
        )
    try:
        out, err = running.communicate()
    finally:
        planted.kill()
        planted.wait()
    assert running.returncode == 0, err
    run = Run.open(f"file:{etude.directory}", create=False)
    found = [e for e in run.events("controller", EVENTS).records() if is_quarantine(e)]
    assert [event.region for event in found] == ["south"], (tmp_path / "planted.log").read_text()
    print(found)
    assert "the region south has been in quarantine since step" in out + err
    doctor = [sys.executable, "-m", "etude", "doctor", str(etude.directory)]
    told = subprocess.run(doctor, capture_output=True, text=True, check=False).stdout
    assert "the region south has been in quarantine" in told
    check_books(etude)
    last = found[0].step + 3  # earlier sessions may still end in south
    regions = {
        span.region
        for step in run.batches()
        if step > last
        for row in run.batch(step).rows
        for span in row.regions
    }
    assert regions <= {"east"}


def is_quarantine(event: object) -> bool:
    return isinstance(event, RegionQuarantined)
