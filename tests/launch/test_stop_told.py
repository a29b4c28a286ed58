"""Messages about a stop on the terminal, while the processes of a run are still ending."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from etude.core.config import parse
from etude.launch.launcher import LocalLauncher, locked
from etude.launch.local import open_launcher
from etude.launch.place import RunPlace
from tests.launch.test_launcher import FOREVER, noted, noting_its_pid, program

RUN = """
name = "tiny"
[[stage]]
kind = "rl"
steps = 1
"""


@pytest.fixture
def shown() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def launcher(tmp_path: Path, shown: io.StringIO) -> Iterator[LocalLauncher]:
    """A launcher as commands create it."""
    console = Console(file=shown, width=40)
    with locked(tmp_path) as lock:
        yield open_launcher(parse(RUN), RunPlace.of(str(tmp_path)), "etude", lock, console)


async def test_who_stops_a_run_is_told_what_it_waits_for(
    launcher: LocalLauncher, shown: io.StringIO, tmp_path: Path
) -> None:
    """Before any process has ended: this process ends only after the message."""
    told, ended = tmp_path / "told", tmp_path / "ended"
    patient = f"""
import os, signal, time
def end(*of):
    while not os.path.exists({str(told)!r}): time.sleep(0.01)
    open({str(ended)!r}, "w").close()
    raise SystemExit
signal.signal(signal.SIGTERM, end)
"""
    programs = [
        program("gateway", patient + noting_its_pid(tmp_path) + FOREVER, serves=True),
        program("loop", FOREVER),
    ]
    running = asyncio.create_task(launcher.run_all(programs, until="loop"))
    while len(launcher._alive) < 2 or noted(tmp_path) is None:
        await asyncio.sleep(0.01)
    running.cancel()
    while not shown.getvalue() and not running.done():
        await asyncio.sleep(0.01)
    line = shown.getvalue()
    assert line.startswith("stopping: waiting for ") and line.endswith(" (at most 5 s each)\n")
    assert "gateway" in line and "loop" in line and line.count("\n") == 1
    assert not ended.exists()
    told.touch()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_an_end_of_its_own_needs_no_such_line(
    launcher: LocalLauncher, shown: io.StringIO
) -> None:
    programs = [program("gateway", FOREVER, serves=True), program("loop", "")]
    await launcher.run_all(programs, until="loop")
    assert shown.getvalue() == ""
