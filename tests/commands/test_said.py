"""The exact output of commands on recorded runs.

`said.json` holds the expected output. After a change to it, write it again, and read what has
changed:

    ETUDE_WRITE_ANSWERS=1 python -m pytest tests/commands/test_said.py
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude import __version__
from etude.cli import main
from etude.core.types import Cost
from etude.dash import recorded as recorded_runs
from etude.run.evaluate import Report
from etude.store.log import Log
from etude.store.runs import Run
from tests.dash.realtime_store import write_realtime
from tests.dash.recorded_store import write_run
from tests.dash.test_whole_answers import Clock, write_more

SAID = Path(__file__).with_name("said.json")
TOML = """
name = "mine"
[[stage]]
kind = "rl"
steps = 40
max_lag = 2
"""
COMMANDS = [
    "show x", "show x --all", "show users", "show nothing",
    "sessions x", "sessions x -n 1", "sessions x --failed", "sessions x --best -n 2",
    "sessions x --task t1 -n 9", "sessions x --id g000001.1", "sessions x --id nobody",
    "sessions x --json -n 2", "sessions users",
    "audit x", "audit users",
    "doctor x", "doctor x --json", "doctor users",
    "compare x@1 x@2", "compare x@1 x@2 --json", "compare x@1 x@9", "compare x@2 x@1 --split novel",
    "realtime status users", "realtime compare users", "realtime status x",
    "plan run.toml --gpus 16 --parameters 7e9 --kv-bytes 131072 --json",
    "plan run.toml --gpus 4 --gpu a100 --parameters 1e9 --active 3e8 --kv-bytes 65536 --tool-s 2",
    "weights log x", "weights verify x", "weights show x",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    clock = Clock()
    monkeypatch.setitem(Log.__init__.__kwdefaults__, "now", clock.time)
    run, users = (Run.open(f"file:{tmp_path}/{name}") for name in ("x", "users"))
    write_run(run, "<b>")
    write_more(run)
    write_realtime(users.objects)
    for version, solved in ((1, (1, 0, 0, 1, 0, 0, 1)), (2, (1, 1, 1, 1, 0, 1, 1))):
        write_evaluation(run, version, solved)
    (tmp_path / "run.toml").write_text(TOML)
    now = clock.now + 60
    clocks = SimpleNamespace(monotonic=lambda: 0.0, time=lambda: now)
    monkeypatch.setattr(recorded_runs, "time", clocks)
    monkeypatch.setitem(recorded_runs.RecordedRun.__init__.__kwdefaults__, "now", lambda: now)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


def write_evaluation(run: Run, version: int, solved: tuple[int, ...]) -> None:
    report = Report(
        stage="rl", split="heldout", version=version, solved=sum(solved), total=len(solved),
        low=0.1, high=0.9, rewards={"checks": sum(solved) / len(solved)},
        example=[{"role": "user", "content": "fix it"}, {"role": "assistant", "content": "done"}],
        solved_by_task={f"h{n}": each for n, each in enumerate(solved)},
        cost=Cost(sampled_tokens=100 * version, seconds=8.0, calls=12),
    )  # fmt: skip
    run.put_eval(report.name, report)


def plain(text: str, folder: Path) -> list[str]:
    """The output without details of this machine, this version or random numbers."""
    text = text.replace(str(folder), "HERE").replace(__version__, "VERSION")
    text = re.sub(r"\d+\.\d{7,}(e-?\d+)?", lambda found: f"{float(found[0]):.6g}", text)
    text = re.sub(r"\b[0-9a-f]{16,}\b", "DIGEST", text)
    text = re.sub(r"\b20\d\d-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?", "TIME", text)
    return [line.rstrip() for line in text.splitlines()]


def test_every_word_is_what_it_was(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = {}
    for command in COMMANDS:
        try:
            status: int | str = main(command.split())
        except SystemExit as e:
            status = f"exit {e.code}"
        told = capfd.readouterr()
        found[command] = {
            "status": status, "out": plain(told.out, folder), "err": plain(told.err, folder)
        }  # fmt: skip
    if os.environ.get("ETUDE_WRITE_ANSWERS"):
        SAID.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    expected = json.loads(SAID.read_text())
    for command, each in found.items():
        assert each == expected[command], command
    assert found.keys() == expected.keys()
