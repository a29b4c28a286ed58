"""Captures the screens of docs/screen.md from real runs in a real terminal (`make screens`).

Each run is started on a pseudo-terminal of 80x24, captured when it shows what it is meant to show,
and captured again when the terminal has become 200x50.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import pyte

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SIZES = ((80, 24), (200, 50))
SETTLE_S = 3.0
"""For a resized screen to be drawn anew."""
QUIET_S = 0.2
"""Without output between two frames."""
LIMIT_S = 240.0

SLOW = ("harness.concurrency=4", "stage.rl.group_size=4", "stage.rl.groups_per_step=2")
RUNS = {
    "healthy": (("stage.rl.max_lag=0",), r"rl (1[5-9]|2\d|3\d)/40"),
    "failing": (("harness.agent=runs.py:Failing", *SLOW), r"(1\d|2\d) of the last \d+ sessions"),
    "no-signal": (("tasks.environment=runs.py:Unmoved", *SLOW), r"in each of (1[2-9]|[2-9]\d)"),
}
"""Name -> (what is changed in examples/custom_env.toml, the text that is waited for)."""


class Terminal:
    """A program on a pseudo-terminal, and what stands on its screen."""

    def __init__(self, argv: list[str], cwd: Path) -> None:
        master, slave = pty.openpty()
        self._master = master
        self.resize(*SIZES[0])
        environment = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": f"{ROOT}:{cwd}"}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self.screen)

    def read(self, seconds: float) -> None:
        """Take in what the program writes in that time, or until it ends."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._master], [], [], left)[0]:
                try:
                    self._stream.feed(os.read(self._master, 65536))
                except OSError:  # the program is gone
                    return

    def settle(self) -> None:
        """Until a resized screen is drawn anew, and no frame is half written."""
        self.read(SETTLE_S)
        while select.select([self._master], [], [], QUIET_S)[0]:
            self.read(QUIET_S)

    @property
    def text(self) -> str:
        lines = [line.rstrip() for line in self.screen.display]
        return "\n".join(lines).rstrip() + "\n"

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not re.search(pattern, " ".join(self.text.split())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{pattern!r} was never seen; the screen is\n{self.text}")
            self.read(0.2)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            while self.process.poll() is None:
                self.read(0.2)
        os.close(self._master)


def capture(name: str, changes: tuple[str, ...], pattern: str, project: Path) -> None:
    sets = [word for change in changes for word in ("--set", change)]
    argv = [sys.executable, "-m", "etude", "run", "run.toml", "--set", f"name={name}", *sets]
    terminal = Terminal(argv, project)
    try:
        terminal.wait_for(pattern)
        for width, height in SIZES:
            terminal.resize(width, height)
            terminal.settle()
            path = HERE / f"{name}-{width}x{height}.txt"
            path.write_text(terminal.text)
            print(path.relative_to(ROOT), flush=True)
    finally:
        terminal.close()


def show_in_page() -> None:
    """The small screens stand in the page itself."""
    page = ROOT / "docs" / "screen.md"

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}\n```\n{(HERE / found[2]).read_text()}```\n"

    marked = r"(<!-- screens/([\w.-]+) -->)\n```\n.*?```\n"
    page.write_text(re.sub(marked, block, page.read_text(), flags=re.DOTALL))


def main() -> None:
    project = Path(tempfile.gettempdir()) / "project"
    shutil.rmtree(project, ignore_errors=True)
    project.mkdir()
    for source in (ROOT / "examples" / "custom_env.py", HERE / "runs.py"):
        shutil.copy(source, project)
    shutil.copy(ROOT / "examples" / "custom_env.toml", project / "run.toml")
    for name in sys.argv[1:] or RUNS:
        capture(name, *RUNS[name], project)
    show_in_page()
    shutil.rmtree(project)


if __name__ == "__main__":
    main()
