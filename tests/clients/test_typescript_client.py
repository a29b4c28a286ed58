"""The TypeScript client for environments by URL, in node: it follows the protocol, and a product
built on it is trained on: `make test-typescript`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.run.audit import audit
from etude.store.runs import Run
from tests.clients.conformance import check_service

pytestmark = [
    pytest.mark.typescript,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
]
ROOT = Path(__file__).parents[2]
CHECKED = ROOT / "clients" / "typescript" / "dist" / "checks" / "service.js"
JUKEBOX = ROOT / "examples" / "by_url" / "dist" / "service.js"


@contextlib.contextmanager
def node(*argv: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a service in node during the block; yields its URL."""
    process = subprocess.Popen(["node", *map(str, argv)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_it_keeps_to_the_protocol() -> None:
    with node(CHECKED) as (url, _):
        check_service(url, capacity=3)


def mean_rewards(run: Run) -> list[float]:
    return [reward for step in run.batches() if (reward := run.batch(step).reward) is not None]


def test_a_run_is_trained_on_it_and_survives_its_death(tmp_path: Path) -> None:
    """The reward rises. The service is killed and restarted in the middle, twice: every settled
    sample stays settled, and no attempt fails."""
    port, directory = free_port(), tmp_path / "run"
    argv = [sys.executable, "-m", "etude", "run", str(ROOT / "examples" / "by_url" / "run.toml")]
    argv += ["--dir", str(directory), "--json"]
    argv += ["--set", f"tasks.environment=http://127.0.0.1:{port}"]
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        _, service = stack.enter_context(node(JUKEBOX, port))
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
        )
        stack.callback(process.kill)
        for groups in (30, 80):
            while len(list((directory / "groups").glob("*"))) < groups:
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.01)
            service.send_signal(signal.SIGKILL)
            service.wait()
            time.sleep(1.0)
            _, service = stack.enter_context(node(JUKEBOX, port))
        out, err = process.communicate()
        assert process.returncode == 0, err
    run = Run.open(f"file:{directory}", create=False)
    books = audit(run)
    rewards = mean_rewards(run)
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    print(f"{time.monotonic() - began:.0f} s; reward {first:.3f} -> {last:.3f}; {books}")
    print(json.loads(out.splitlines()[-1]))
    assert books.violations == [] and books.finished and books.in_flight == 0
    assert books.issued == books.trained + sum(books.dropped.values())
    assert "failed" not in books.dropped
    assert last > first + 0.2
