"""Every answer of the dashboard's server over two recorded runs, field by field.

`answers.json` contains the expected answers. After a change of them, write it again and review the
diff:

    ETUDE_WRITE_ANSWERS=1 python -m pytest tests/dash/test_whole_answers.py
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude import __version__
from etude.core.events import (
    EVENTS,
    AttemptsInterrupted,
    BatchReady,
    EvalDone,
    EvalProgress,
    FewTasks,
    FitStep,
    FleetStatus,
    GroupDone,
    MismatchMeasured,
    MismatchStats,
    PublishStarted,
    RegionStatus,
    StageDone,
    StageStarted,
    StepProgress,
    StoreUsed,
    WeightsLive,
)
from etude.core.types import Feedback
from etude.dash import recorded as recorded_runs
from etude.dash.guard import Access
from etude.dash.recorded import RecordedRun
from etude.dash.server import create_app
from etude.store.feedback import add_feedback
from etude.store.log import Log
from etude.store.runs import Run
from etude.store.verdicts import Preference, Verdict, add_verdict
from tests.dash.realtime_store import write_realtime
from tests.dash.recorded_store import ask, step, write_run

ANSWERS = Path(__file__).with_name("answers.json")
VIEWS = (
    "overview", "rollouts", "rollouts?status=failed&sort=-reward&limit=1", "failures",
    "groups/g000001", "groups/g000009", "sessions/g000001.1", "sessions/g000003.0",
    "sessions/nobody", "sessions/eval-1-heldout.h1", "sessions/g000001.1/tokens?trainer=true",
    "sessions/g000001.0/tokens",
    "sessions/g000001.0/tokens?segment=1", "sessions/g000001.0/tokens?offset=1&limit=2",
    "ledger", "fleet", "doctor", "review", "compare", "compare?before=0&after=1", "realtime",
    "export?format=jsonl", "export?format=csv", "export?format=atif.jsonl", "export?format=xml",
    "rollouts?limit=-1", "rollouts?sort=color", "rollouts?color=red",
)  # fmt: skip
OF_USERS = (
    "overview", "ledger", "realtime", "rollouts?limit=2", "doctor", "fleet", "review", "compare",
    "failures",
)  # fmt: skip
STATS = MismatchStats(
    num_tokens=4, k1=0.1, k1_p99=0.2, k3=0.3, k3_p99=0.4, k3_max=0.5, ratio_p1=0.6, ratio_p99=0.7,
    ratio_max=0.8, ess=0.9, argmax_flip_frac=None, router_mismatch_frac=0.25,
)  # fmt: skip


class Clock:
    """A clock that advances with every read."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def time(self) -> float:
        self.now += 1.5
        return self.now


def write_more(run: Run) -> None:
    """Write events and records of the kinds that `write_run` does not write."""
    west = RegionStatus(version=1, busy=1.0, running=2, waiting=5, quarantined=True)
    events = run.events("trainer", EVENTS)
    for event in (
        StageStarted(stage="sft", steps=2),
        FitStep(stage="sft", step=1, steps=2, loss=2.0, tokens_per_s=50.0),
        FitStep(stage="sft", step=2, steps=2, loss=1.0, tokens_per_s=70.0),
        EvalProgress(stage="sft", split="heldout", done=3, total=8, solved=2),
        EvalDone(stage="sft", split="heldout", version=1, solved=2, total=8, low=0.1, high=0.5),
        StageDone(stage="sft", version=1, seconds=12.0),
        StageStarted(stage="rl", steps=3, done=1, groups_per_step=2),
        FewTasks(split="heldout", wanted=20, given=8),
        StoreUsed(
            process="trainer", reads=10, writes=4, lists=2, read_bytes=5000, written_bytes=700
        ),
        BatchReady(step=2, lag=2),
        StepProgress(step=2, done=1, total=4),
        MismatchMeasured(step=2, all=STATS, by_lag={1: STATS}, by_region={"east": STATS}, worst=()),
        PublishStarted(version=2, stall_s=0.25),
        replace(step(3), lag=2, wait_s=1.0, tokens_per_s=30.0, mfu=0.125, teacher_kl=0.5, lr=1e-3),
        WeightsLive(version=3),
        FleetStatus(regions={"west": west}, active=3, capacity=4, sessions=5),
        GroupDone(
            group="g000004", task="t4", admitted=1, rewards=(1.0, 1.0), failed=0, kept=False,
            seconds=2.0,
        ),
        AttemptsInterrupted(samples=("g000003.0",)),
        EvalProgress(stage="rl", split="heldout", done=2, total=8, solved=1),
    ):  # fmt: skip
        events.append(event)
    events.flush()
    add_verdict(
        run, Verdict(session="g000001.1", verdict="cheat", who="Ada", note="look", reward=0.0)
    )
    add_verdict(run, Verdict(session="g000001.0", verdict="cheat", who="Ada"))
    add_verdict(run, Preference(left="g000001.0", right="g000001.1", verdict="left", who="Ada"))
    add_feedback(run, "g000001.1", Feedback(kind="thumb", value=0.5, time=1.8e9, text="well"))


def plain(value: Any) -> Any:
    """A value without the parts that depend on the machine or the version, and with numbers rounded
    to nine digits."""
    if isinstance(value, dict):
        return {
            name: "..." if name in ("url", "store", "folder") else plain(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if value < 1e9 else round(value, 3)
    return value.replace(__version__, "VERSION") if isinstance(value, str) else value


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    clock = Clock()
    monkeypatch.setitem(Log.__init__.__kwdefaults__, "now", clock.time)
    run, users = (Run.open(f"file:{tmp_path}/{name}") for name in ("x", "users"))
    write_run(run, "<b>")
    write_more(run)
    write_realtime(users.objects)
    now = clock.now + 60
    monkeypatch.setattr(recorded_runs, "time", SimpleNamespace(monotonic=lambda: 0.0))
    recorded = [
        RecordedRun(name, each, now=lambda: now) for name, each in (("x", run), ("users", users))
    ]
    app = create_app(recorded, Access(host="127.0.0.1"))
    paths = ["/api/runs", *(f"/api/runs/x/{view}" for view in VIEWS)]
    answers = {}
    for path in [*paths, *(f"/api/runs/users/{view}" for view in OF_USERS)]:
        answer = ask(app, path)
        text = answer.body.decode().replace(str(tmp_path), "HERE")
        lines = [json.loads(line) for line in text.splitlines()] if "jsonl" in path else None
        told = text.splitlines() if "csv" in path else lines or json.loads(text)
        answers[path] = {"status": answer.status, "type": answer.headers["content-type"],
                         "body": plain(told)}  # fmt: skip
    return answers


def test_every_answer_is_what_it_was(found: dict[str, Any]) -> None:
    if os.environ.get("ETUDE_WRITE_ANSWERS"):
        text = json.dumps(found, indent=1)
        # innermost lists and objects are written on one line
        flat = re.sub(r"[\[{]\n[^\[\]{}]*[\]}]", lambda m: re.sub(r"\n\s*", " ", m[0]), text)
        ANSWERS.write_text(f"{flat}\n")
    expected = json.loads(ANSWERS.read_text())
    for path, answer in found.items():
        assert answer == expected[path], path
    assert found.keys() == expected.keys()
