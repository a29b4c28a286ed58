"""Tracing of the lines of the package that each test runs, in pytest's process and in every Python
process that it starts.

Each line that runs is attributed to a *context*: a test, a fixture that several tests share or,
before the first test, the import of the test's file. The number of the current context is in a
shared memory page, so that a server which an earlier test started notices when another test sends
it a request. Each process appends every line that is new in a context to one file at once, because
many of them end by SIGKILL.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER = "ETUDE_MUTANTS_LINES"


class Tracer:
    def __init__(self, folder: Path, package: str) -> None:
        self._package = package
        self._file = os.open(folder / "seen", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with (folder / "context").open("r+b") as page:
            self._context = mmap.mmap(page.fileno(), 8)
        self._now = bytes(8)
        self._missing: dict[CodeType, set[int]] = {}
        self._foreign: set[CodeType] = set()

    def start(self) -> None:
        if sys.version_info >= (3, 12):
            self._monitor()
        else:
            threading.settrace(self.called)
            sys.settrace(self.called)

    if sys.version_info >= (3, 12):

        def _monitor(self) -> None:
            """Trace like `sys.settrace`, but only the package's code: other code is not slowed
            down."""
            watch, event = sys.monitoring, sys.monitoring.events
            tool, entered = watch.COVERAGE_ID, event.PY_START | event.PY_RESUME
            watch.use_tool_id(tool, "lines")

            def enters(code: CodeType, _: int) -> object:
                if not code.co_filename.startswith(self._package):
                    return watch.DISABLE
                if self._context[:] != self._now:
                    self._now = self._context[:]
                    self._missing.clear()
                    watch.restart_events()
                if code not in self._missing:
                    self._missing[code] = set()
                    self._write(code, code.co_firstlineno)
                    watch.set_local_events(tool, code, event.LINE)
                return None

            def steps(code: CodeType, line: int) -> object:
                self._write(code, line)
                return watch.DISABLE  # until the context changes

            watch.register_callback(tool, event.PY_START, enters)
            watch.register_callback(tool, event.PY_RESUME, enters)
            watch.register_callback(tool, event.LINE, steps)
            watch.set_events(tool, entered)

    def called(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if code in self._foreign:
            return None
        if self._context[:] != self._now:
            self._now = self._context[:]
            self._missing.clear()
        missing = self._missing.get(code)
        if missing is None:
            if not code.co_filename.startswith(self._package):
                self._foreign.add(code)
                return None
            missing = self._missing[code] = {line for *_, line in code.co_lines() if line}
            self._see(frame, missing)
        return self.stepped if missing else None

    def stepped(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if event == "line":
            missing = self._missing.get(frame.f_code)
            if missing is None:  # the context has changed while this frame waited
                return self.called(frame, event, None)
            self._see(frame, missing)
            if not missing:
                frame.f_trace_lines = False
        return self.stepped

    def _see(self, frame: FrameType, missing: set[int]) -> None:
        if frame.f_lineno in missing:
            missing.remove(frame.f_lineno)
            self._write(frame.f_code, frame.f_lineno)

    def _write(self, code: CodeType, line: int) -> None:
        context, file = int.from_bytes(self._now, "little"), code.co_filename[len(self._package) :]
        os.write(self._file, f"{context} {file} {line}\n".encode())


def follow() -> None:
    """Start tracing in a Python process below the tests (see `HOOK`)."""
    if folder := os.environ.get(FOLDER):
        Tracer(Path(folder), str(Path(__file__).parents[2]) + os.sep + "etude" + os.sep).start()


HOOK = "from tests.mutants.lines import follow\n\nfollow()\n"
"""Contents of the `sitecustomize.py` that comes first on the path of every child."""


def read(folder: Path) -> dict[str, Any]:
    """Read the results of a traced run of pytest: the tests, and the lines by context and file."""
    run = json.loads((folder / "tests.json").read_text())
    lines: dict[str, dict[str, set[int]]] = {name: {} for name in run["names"]}
    for context, file, line in _seen(folder):
        lines[run["names"][context]].setdefault(file, set()).add(line)
    for test in run["tests"].values():
        test["shares"] = [name for name in test["shares"] if lines.get(name)]
    return {
        "tests": run["tests"],
        "lines": {
            name: {file: sorted(of) for file, of in files.items()} for name, files in lines.items()
        },
    }


def _seen(folder: Path) -> Iterator[tuple[int, str, int]]:
    with (folder / "seen").open() as file:
        for line in file:
            context, _, place = line.partition(" ")
            name, _, number = place.rpartition(" ")
            yield int(context), name, int(number)
