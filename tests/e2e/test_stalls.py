"""The real processes, really stopped (SIGSTOP): an alarm names each, the run goes on as far as it
can and fully once the process is back, no session's grade is affected, and the ledger balances."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.core.types import Trajectory
from etude.store.runs import Run
from tests.e2e.agents import WAIT_S
from tests.e2e.runs import MODULES, ONE_REGION, TINY, Etude, check_books

pytestmark = pytest.mark.e2e

STOPPED_S = float(os.environ.get("ETUDE_STOPPED_S", "0"))
"""Least time for which a process is stopped; by default only until an alarm names it."""
SILENCE_S = 10.0 if STOPPED_S else 2.0
LONG = ("steps = 14", "steps = 4000")  # longer than any test
AGENT = Path(__file__).parent / "agents.py"


def two_regions() -> str:
    common, _, _, rl = TINY.read_text().split("[[stage]]")
    return common + "[[stage]]" + rl.replace("steps = 4", "steps = 4000")


class Screen:
    """The output of a run, read while it runs."""

    def __init__(self, etude: Etude, config: str) -> None:
        self.etude = etude
        self._path = etude.toml.with_suffix(".screen")
        etude.write(f"heartbeat_timeout_s = {SILENCE_S}\n{config}")
        with self._path.open("w") as file:
            self.process = subprocess.Popen(etude.argv, stdout=file, stderr=subprocess.STDOUT)
        etude.started.append(self.process)

    def text(self) -> str:
        return self._path.read_text()

    def until(self, pattern: str, start: int = 0) -> None:
        while not re.search(pattern, self.text()[start:]):
            assert self.process.poll() is None, self.text()
            time.sleep(0.05)

    def go_on(self) -> None:
        """Wait until more groups are finished than could have been under way."""
        self.etude.wait_for_groups(len(self.etude.groups()) + 3, self.process)

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait()
        assert self.etude.processes() == {}
        check_books(self.etude, finished=False)

    def pid(self, name: str) -> int:
        if name == "launcher":
            return self.process.pid
        if name == "zygote":
            return zygote_of(self.pid("controller"))
        mark = MODULES.get(name) or f"--region {name.removeprefix('worker-')}"
        (pid,) = [pid for pid, line in self.etude.processes().items() if mark in line]
        return pid


def zygote_of(controller: int) -> int:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            line = stat.with_name("cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == controller and b"etude.sandbox.zygote" in line:
            return int(stat.parent.name)
    raise AssertionError("no zygote")


@pytest.fixture
def stopped() -> Iterator[list[int]]:
    """Stopped processes, which are continued at the end in any case."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def trajectories(etude: Etude) -> list[Trajectory]:
    run = Run.open(f"file:{etude.directory}", create=False)
    return [trajectory for name in run.groups() for trajectory in run.group(name).trajectories]


def test_whatever_is_stopped_is_named_and_the_run_goes_on(
    etude: Etude, isolation: str, stopped: list[int]
) -> None:
    screen = Screen(etude, two_regions())
    etude.wait_for_groups(2, screen.process)
    names = ["worker-east", "trainer", "gateway", "controller", "zygote", "worker-west"]
    for name in names if isolation == "namespaces" else set(names) - {"zygote"}:
        start = len(screen.text())
        stopped.append(screen.pid(name))
        os.kill(stopped[-1], signal.SIGSTOP)
        began = time.monotonic()
        screen.until(rf"alarm: the {name} has been silent for \d+ s", start)
        print(f"{name}: named after {time.monotonic() - began:.1f} s")
        if name.startswith("worker") or name == "zygote":
            screen.go_on()  # the other worker does its work; another zygote takes its place
        time.sleep(max(0.0, began + STOPPED_S - time.monotonic()))
        os.kill(stopped[-1], signal.SIGCONT)
        screen.until(rf"the {name} responds again after \d+ s of silence", start)
        screen.go_on()
    stopped.append(screen.pid("launcher"))
    os.kill(stopped[-1], signal.SIGSTOP)
    time.sleep(max(STOPPED_S, 2 * SILENCE_S))
    screen.go_on()
    os.kill(stopped[-1], signal.SIGCONT)
    screen.go_on()
    screen.end()


def test_no_session_is_graded_for_it(etude: Etude, stopped: list[int]) -> None:
    """In one region, so that every request has to wait for longer than the agent's limit."""
    screen = Screen(
        etude,
        ONE_REGION.replace(*LONG).replace("[harness]", f'[harness]\nagent = "{AGENT}:Impatient"'),
    )
    waited = {}
    try:
        etude.wait_for_groups(1, screen.process)
        for name in ("worker-east", "gateway", "controller"):
            start = len(screen.text())
            stopped.append(screen.pid(name))
            os.kill(stopped[-1], signal.SIGSTOP)
            screen.until(f"alarm: the {name} has been silent", start)
            time.sleep(WAIT_S + SILENCE_S)
            os.kill(stopped[-1], signal.SIGCONT)
            screen.until(f"the {name} responds again", start)
            screen.go_on()
            waited[name] = [t.error for t in trajectories(etude) if t.status == "failed"]
        screen.end()
    finally:
        print(screen.text())
    found = trajectories(etude)
    assert {trajectory.status for trajectory in found} <= {"done", "failed"}
    assert all(
        (trajectory.reward is None) == (trajectory.status == "failed") for trajectory in found
    )
    assert "agent: its time ran out while it waited for the model" in waited["worker-east"]
