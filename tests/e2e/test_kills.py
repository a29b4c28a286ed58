"""The real processes, really killed: whatever dies, `etude run` goes on, and the books balance."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.events import EVENTS, Metered
from etude.run.audit import audit
from etude.run.launch import locked
from etude.store.runs import Run
from etude.worlds.pool import open_worlds

pytestmark = pytest.mark.e2e

TINY = Path(__file__).parent / "tiny.toml"
MODULES = {"trainer": "etude.run.trainer", "gateway": "etude.serve.gateway", "controller": "etude.run.director"}


def one_region(text: str) -> str:
    """Only rl, longer than six lives take, and with as few processes as there can be."""
    common, _, _, rl = text.split("[[stage]]")
    return (
        common.replace("[engine]", '[engine]\nregions = ["east"]') + "[[stage]]" + rl.replace("steps = 4", "steps = 14")
    )


ONE_REGION = one_region(TINY.read_text())


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory = shared / "policy"
    with (shared / "policy.lock").open("w") as lock:  # test processes that run side by side make it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "model.safetensors").exists():
            subprocess.run([sys.executable, "-m", "tests.e2e.policy", str(directory)], check=True)
    return directory


@pytest.fixture(scope="session")
def isolation() -> str:
    try:
        open_worlds("namespaces")
    except EtudeError:
        return "process"
    return "namespaces"


class Etude:
    """`etude run` on one directory, as a user would call it."""

    def __init__(self, directory: Path, policy: Path, isolation: str) -> None:
        self.directory, self.toml = directory / "run", directory / "run.toml"
        self.argv = [sys.executable, "-m", "etude", "run", str(self.toml), "--dir", str(self.directory), "--json"]
        self.argv += ["--set", f"model.path={policy}", "--set", f"worlds.isolation={isolation}"]
        self.started: list[subprocess.Popen[str]] = []

    def write(self, config: str) -> None:
        self.toml.write_text(config)

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(self.argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    def finish(self) -> dict[str, object]:
        process = self.start()
        out, err = process.communicate()
        assert process.returncode == 0, err
        summary: dict[str, object] = json.loads(out.splitlines()[-1])
        return summary

    def processes(self) -> dict[int, str]:
        """pid -> command line of everything that works on the run, the launcher excepted."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if f"file:{self.directory}" in line:
                    found[int(entry.name)] = line
        return found

    def strike(self, victim: str, launcher: subprocess.Popen[str]) -> str:
        """Ends one process, and waits until the launcher has ended too; what it said."""
        if victim in MODULES:
            (pid,) = [pid for pid, line in self.processes().items() if MODULES[victim] in line]
            os.kill(pid, signal.SIGKILL)
        else:
            launcher.send_signal(signal.SIGINT if victim == "ctrl-c" else signal.SIGKILL)
        err = launcher.communicate()[1]
        if victim == "launcher":  # nobody waits for its children any more: the kernel ends them
            while self.processes():
                time.sleep(0.01)
        return err

    def groups(self) -> set[str]:
        folder = self.directory / "groups"
        return {path.name for path in folder.iterdir()} if folder.exists() else set()

    def wait_for_groups(self, count: int, process: subprocess.Popen[str]) -> None:
        while len(self.groups()) < count:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)


@pytest.fixture
def etude(tmp_path: Path, policy: Path, isolation: str) -> Iterator[Etude]:
    made = Etude(tmp_path, policy, isolation)
    yield made
    for process in made.started:
        process.kill()
        process.wait()


def check_books(etude: Etude, *, finished: bool = True) -> None:
    books = audit(Run.open(f"file:{etude.directory}", create=False))
    assert books.violations == []
    assert books.lag_max <= books.lag_bound == 1
    assert books.issued == books.trained + sum(books.dropped.values()) + books.in_flight
    assert books.finished == finished
    assert not finished or books.in_flight == 0


def check_agreement(run: Run) -> None:
    """Each step was compared with the engines, token by token and region by region."""
    metered = [event for event in run.events("trainer", EVENTS).records() if isinstance(event, Metered)]
    assert [event.step for event in metered] == run.batches()
    for event in metered:
        batch = run.batch(event.step)
        assert [len(row.logprobs) for row in run.recomputed(event.step)] == [sum(row.mask) for row in batch.rows]
        assert sum(gap.num_tokens for gap in event.by_region.values()) == event.all.num_tokens
        assert event.by_region.keys() <= {"west", "east"} and all(worst.text for worst in event.worst)


def test_three_stages_in_two_regions_of_which_one_dies(etude: Etude) -> None:
    etude.write(TINY.read_text())
    process = etude.start()
    etude.wait_for_groups(1, process)
    (pid,) = [pid for pid, line in etude.processes().items() if "--region east" in line]
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == 0, err
    summary = json.loads(out.splitlines()[-1])
    check_books(etude)
    assert etude.processes() == {}
    assert summary["in_flight"] == 0 and summary["regions"] == 2 and summary["lag_bound"] == 1
    assert summary["solve_rate"].keys() == {"midtrain", "sft", "rl"}
    run = Run.open(f"file:{etude.directory}", create=False)
    assert run.evals() == [f"{v:06d}.{split}" for v in (1, 2, 6) for split in ("heldout", "novel")]
    assert run.batches() == [3, 4, 5, 6]
    check_agreement(run)
    assert etude.finish() == summary, "a finished run is shown, not run again"


def test_whatever_is_killed_the_next_start_goes_on(etude: Etude) -> None:
    etude.write(ONE_REGION)
    seed = int(os.environ.get("ETUDE_SEED", Random().randrange(2**32)))
    print(f"ETUDE_SEED={seed} python -m pytest {__file__} -k whatever_is_killed")
    rng = Random(seed)
    victims = ["trainer", "gateway", "controller", "launcher", "ctrl-c"]
    rng.shuffle(victims)
    for victim in victims:
        before = etude.groups()
        process = etude.start()
        etude.wait_for_groups(len(before) + 1, process)
        time.sleep(rng.uniform(0, 0.5))
        err = etude.strike(victim, process)
        assert etude.processes() == {}, f"left behind after the end of the {victim}"
        check_books(etude, finished=False)
        if victim in MODULES:
            assert process.returncode == 2
            assert f"the {victim} was killed by SIGKILL" in err and "Go on with: etude run" in err
        if victim == "ctrl-c":
            assert process.returncode == 130
            assert "stopped; resume with: etude run" in err and "Traceback" not in err
    finished = etude.groups()
    assert etude.finish()["in_flight"] == 0
    check_books(etude)
    assert finished <= etude.groups()


def test_one_run_has_one_launcher(etude: Etude) -> None:
    etude.write(ONE_REGION)
    with locked(etude.directory):
        process = etude.start()
        assert f"is being run by process {os.getpid()}" in process.communicate()[1]
        assert process.returncode == 2


def test_the_tiny_configs_are_configs() -> None:
    assert [stage.kind for stage in parse(ONE_REGION).stage] == ["rl"]
