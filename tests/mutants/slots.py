"""Copies of the tree in which forks of this process work in parallel, without leaving processes
behind."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from tests.mutants import lines

ROOT = Path(__file__).parents[2]
PR_SET_CHILD_SUBREAPER = 36

Job = tuple[Callable[[Path], int], Callable[[Path, int], None]]
"""The work of a process in a copy of the tree, and a callback here for its exit status."""


class Slots:
    """Copies of the tree, each used by at most one of our processes at a time."""

    def __init__(self, number: int, folder: Path) -> None:
        self._free = [folder / str(index) for index in range(number)]
        self._busy: dict[int, tuple[Path, Callable[[int], None]]] = {}
        for copy in self._free:
            _copy_tree(copy)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._busy:
            os.kill(pid, signal.SIGKILL)
        while self._busy:
            self._wait()

    def run(self, jobs: Iterable[Job], until: float) -> None:
        """Run all jobs. Jobs that still run at the time `until` are ended by SIGKILL."""
        for work, done in jobs:
            while not self._free:
                self._wait(until)
            if time.monotonic() > until:
                break
            self._start(self._free.pop(), work, done)
        while self._busy:
            self._wait(until)

    def _start(
        self, copy: Path, work: Callable[[Path], int], done: Callable[[Path, int], None]
    ) -> None:
        shutil.rmtree(copy / "tmp", ignore_errors=True)
        (copy / "tmp").mkdir()
        sys.stdout.flush()
        if pid := os.fork():
            self._busy[pid] = copy, lambda code: done(copy, code)
            return
        code = 99
        try:
            os.setsid()  # Ctrl-C is for the parent, which ends this process and drops its result
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            log = os.open(copy / "tmp" / "log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.chdir(copy)
            sys.path[:0] = [str(copy)]
            os.environ.update(PYTHONPATH=f"{copy / 'hook'}:{copy}", TMPDIR=str(copy / "tmp"))
            tempfile.tempdir = None  # drop the cached value
            code = work(copy)
        finally:
            os._exit(code)

    def _wait(self, until: float = float("inf")) -> None:
        """Wait until a process has ended; after `until` kill them all."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in self._busy:
                copy, done = self._busy.pop(pid)
                self._end_orphans()
                done(os.waitstatus_to_exitcode(status))
                self._free.append(copy)
                return
            if not pid:
                if time.monotonic() > until:
                    for busy in self._busy:
                        os.kill(busy, signal.SIGKILL)
                time.sleep(0.02)

    def _end_orphans(self) -> None:
        """Kill processes that a test has left running, which are now children of this one."""
        while orphans := [pid for pid in _children() if pid not in self._busy]:
            for pid in orphans:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def _children() -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                yield int(path.parent.name)


def _copy_tree(copy: Path) -> None:
    ignored = shutil.ignore_patterns(
        ".*", "__pycache__", "runs", "models", "build", "dist", "*.egg-info"
    )
    shutil.copytree(ROOT, copy, ignore=ignored)
    for name in (".venv", "models"):
        if (ROOT / name).exists():
            (copy / name).symlink_to((ROOT / name).resolve())
    (copy / "hook").mkdir()
    (copy / "hook" / "sitecustomize.py").write_text(lines.HOOK)
