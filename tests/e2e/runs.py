"""`etude run` as a user would call it, with its real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from etude.run.audit import audit
from etude.store.runs import Run

TINY = Path(__file__).parent / "tiny.toml"
MODULES = {
    "trainer": "etude.trainer.trainer",
    "gateway": "etude.serve.gateway",
    "controller": "etude.run.controller",
}


def one_region(text: str) -> str:
    """Only rl, with enough steps for six restarts, and with as few processes as possible."""
    common, _, _, rl = text.split("[[stage]]")
    return (
        common.replace("[engine]", '[engine]\nregions = ["east"]')
        + "[[stage]]"
        + rl.replace("steps = 4", "steps = 14")
    )


ONE_REGION = one_region(TINY.read_text())


class Etude:
    """`etude run` on one directory, as a user would call it."""

    def __init__(self, directory: Path, policy: Path, isolation: str) -> None:
        self.directory = directory / "run"
        self.toml = directory / "run.toml"
        self.argv = [
            sys.executable,
            "-m",
            "etude",
            "run",
            str(self.toml),
            "--dir",
            str(self.directory),
            "--json",
        ]
        self.argv += ["--set", f"model.path={policy}", "--set", f"sandbox.isolation={isolation}"]
        self.started: list[subprocess.Popen[str]] = []

    def write(self, config: str) -> None:
        self.toml.write_text(config)

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.started.append(process)
        return process

    def finish(self) -> dict[str, object]:
        process = self.start()
        out, err = process.communicate()
        assert process.returncode == 0, err
        summary: dict[str, object] = json.loads(out.splitlines()[-1])
        return summary

    def processes(self) -> dict[int, str]:
        """pid -> command line of every process of the run except the launcher."""
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
        """Kill one process and wait until the launcher has ended too. Return its stderr."""
        if victim in MODULES:
            (pid,) = [pid for pid, line in self.processes().items() if MODULES[victim] in line]
            os.kill(pid, signal.SIGKILL)
        else:
            launcher.send_signal(signal.SIGINT if victim == "ctrl-c" else signal.SIGKILL)
        err = launcher.communicate()[1]
        if victim == "launcher":  # the kernel ends its children
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


def check_books(etude: Etude, *, finished: bool = True) -> None:
    books = audit(Run.open(f"file:{etude.directory}", create=False))
    assert books.violations == []
    assert books.lag_max <= books.lag_bound == 1
    assert books.issued == books.trained + sum(books.dropped.values()) + books.in_flight
    assert books.finished == finished
    assert not finished or books.in_flight == 0
