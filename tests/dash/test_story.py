"""A run from its first event to its last, with the texts of the page and the log after each event.

`story.txt` contains the expected texts. After a change of them, write it again and review the diff:

    ETUDE_WRITE_ANSWERS=1 python -m pytest tests/dash/test_story.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from etude.core.events import (
    AttemptDone,
    AttemptsInterrupted,
    BatchReady,
    EvalDone,
    EvalProgress,
    Event,
    FewTasks,
    FitStep,
    FleetStatus,
    GroupDone,
    Launched,
    OverlongSkipped,
    ProcessDied,
    ProcessHeard,
    ProcessRestarted,
    ProcessSilent,
    RegionQuarantined,
    RegionStatus,
    RunDone,
    StageDone,
    StageStarted,
    StepDone,
    StepPassedOver,
    StepProgress,
    StoreUsed,
    WeightsLive,
)
from etude.dash.page import Page, Teller, beginning, describe
from etude.dash.reader import RunView

STORY = Path(__file__).with_name("story.txt")
STEP = StepDone(
    step=1, loss=0.1, lag=0, k1=0.0, k3_mean=1e-4, k3_p99=2e-4, entropy=1.5, grad_norm=0.7,
    tokens=90, seconds=3.0, wait_s=1.0,
)  # fmt: skip
EAST = RegionStatus(version=0, busy=0.25, running=2, waiting=1)
IDLE = replace(EAST, busy=0.0, running=0, waiting=0)
USED = StoreUsed(
    process="trainer", reads=30, writes=8, lists=2, read_bytes=9_000_000, written_bytes=4_000_000
)


def ended(group: int, number: int, reward: float | None = 0.0, status: str = "done") -> AttemptDone:
    error = None if reward is not None else f"sandbox: no room for {number}"
    return AttemptDone(
        id=f"g{group}.{number}", task=f"t{group % 4}", split="train", status=status, reward=reward,
        error=error, seconds=2.0,
    )  # type: ignore[arg-type]  # fmt: skip


def done(group: int, *rewards: float, kept: bool = False, failed: int = 0) -> GroupDone:
    return GroupDone(
        group=f"g{group}", task=f"t{group % 4}", admitted=0, rewards=rewards, failed=failed,
        kept=kept, seconds=2.0,
    )  # fmt: skip


def fleet(active: int, sessions: int, **regions: RegionStatus) -> FleetStatus:
    return FleetStatus(regions=regions, active=active, capacity=3, sessions=sessions)


def evaluation(stage: str, solved: int, version: int) -> Iterator[Event]:
    for count in (0, 4):
        yield EvalProgress(stage=stage, split="heldout", done=count, total=8, solved=count // 2)
    yield EvalDone(stage=stage, split="heldout", version=version, solved=solved, total=8,
                   low=0.1, high=0.6)  # fmt: skip


def story() -> Iterator[tuple[float, Event]]:
    """Events, each with the number of seconds after the one before."""
    yield 0.0, Launched(resumed=False)
    yield 1.0, FewTasks(split="heldout", wanted=20, given=8)
    yield 0.0, FewTasks(split="novel", wanted=3, given=1)
    for event in evaluation("start", 1, 0):
        yield 4.0, event
    yield 1.0, OverlongSkipped(stage="sft", count=3, where=("a", "b"))
    yield 1.0, StageStarted(stage="sft", steps=50)
    for number in (1, 2, 25, 50):
        yield 10.0, FitStep(stage="sft", step=number, steps=50, loss=4.0 / number,
                            tokens_per_s=1234.5, metrics={"margin": 0.5})  # fmt: skip
    yield 1.0, StageDone(stage="sft", version=1, seconds=45.0)
    yield 1.0, StageStarted(stage="rl", steps=20, groups_per_step=2)
    yield 1.0, fleet(1, 0, east=replace(EAST, version=-1))
    yield 1.0, fleet(1, 4, east=IDLE)
    yield 1.0, ended(1, 0, None, "failed")
    yield 11.0, fleet(1, 3, east=IDLE)
    yield 1.0, ended(1, 1, None, "failed")
    yield 1.0, done(1, failed=2)
    yield 2.0, replace(done(2, 0.0, 0.0), untrainable={"g2.0": "top_k", "g2.1": "top_k"})
    yield 2.0, done(2, 0.5, 0.5)
    yield 2.0, done(3, 1.0, 1.0)
    yield 40.0, ended(3, 0, 1.0, "timeout")
    yield 0.0, ended(3, 1, 1.0, "truncated")
    yield 2.0, replace(done(4, 1.0, 0.0, kept=True), quarantined={"g4.0": "trick"})
    yield 1.0, fleet(3, 0, east=EAST)
    yield 1.0, BatchReady(step=2, lag=1)
    yield 1.0, StepProgress(step=2, done=1, total=4)
    yield 3.0, replace(STEP, step=2, lag=1, mfu=0.25, tokens_per_s=99.5, reward=0.5)
    yield 1.0, WeightsLive(version=2)
    yield 1.0, USED
    yield 1.0, replace(USED, reads=40, read_bytes=10_000_000)
    yield 1.0, replace(USED, reads=3, writes=1, lists=1, read_bytes=5, written_bytes=7)
    yield 1.0, ProcessSilent(process="trainer", seconds=30.0)
    yield 1.0, ProcessHeard(process="trainer", seconds=31.0)
    yield 1.0, ProcessRestarted(process="worker", how="exit status 1", limit=3)
    yield 1.0, fleet(2, 3, east=EAST, west=replace(EAST, quarantined=True))
    yield 1.0, RegionQuarantined(region="west", step=2, factor=4.0)
    for number in range(100, 113):
        yield 0.0, done(number, 1.0, 0.0, kept=True)
    for number in range(3, 16):
        yield 1.0, ended(number, 0, 1.0)
        yield 1.0, done(number, 1.0, number / 20, kept=True)
        yield 1.0, BatchReady(step=number)
        yield 4.0, replace(STEP, step=number, router_mismatch_frac=0.125, teacher_kl=0.5,
                           loss=1.0 / number, entropy=1.0 / number)  # fmt: skip
    yield 1.0, StepPassedOver(step=16)
    yield 1.0, fleet(2, 9, **{f"w{n}": replace(EAST, version=n, busy=n / 10) for n in range(9)})
    yield 1.0, ended(16, 0, None, "failed")
    yield 1.0, AttemptsInterrupted(samples=("g16.0", "g16.1"))
    yield 9999.0, Launched(resumed=True)
    yield 2.0, StageStarted(stage="rl", steps=20, done=15, groups_per_step=2)
    yield 2.0, ended(17, 0, 1.0)
    yield 5.0, replace(STEP, step=17, k3_mean=0.5)
    yield 1.0, StageDone(stage="rl", version=17, seconds=60.0)
    for event in evaluation("rl", 6, 17):
        yield 4.0, event
    yield 1.0, ProcessDied(process="trainer", how="exit status 1", advice="look at its log")
    yield 1.0, RunDone(version=17)


def shown(page: Page) -> Iterator[str]:
    line = page.headline
    yield f"{line.label}: {line.text} {line.tone}".rstrip()
    if page.advice:
        yield f"do: {page.advice}"
    yield from (f"alarm {alarm.name}: {alarm.what}" for alarm in page.alarms)
    for each in page.progress:
        to_go = "" if each.eta_s is None else f" {each.eta_s:.2f} s to go"
        yield f"[{each.done} of {each.total}] {each.what}{to_go}"
    yield from (f"{line.label} | {line.text} {line.tone}".rstrip() for line in page.lines)
    for curve in page.curves:
        values = " ".join(f"{value:.3g}" for value in curve.values)
        yield f"{curve.name} from {curve.low:.3g} to {curve.high:.3g}: {values}"
    yield "newest: " + " ".join(session.id for session in page.sessions)
    yield "legend: " + ", ".join(term for term, _ in page.legend)


def told() -> Iterator[str]:
    """The new lines of the page and the lines of the log after each event."""
    view, teller, t = RunView(), Teller(), 1000.0
    before = list(shown(describe(view, 2)))
    yield from (f"  {line}" for line in before)
    for after_s, event in story():
        t += after_s
        begun = view.apply(t, event)
        yield f"{type(event).__name__}"
        yield from (f"> {line}" for line in teller.tell(t, event, view, begun))
        now = list(shown(describe(view, 2)))
        yield from (f"  {line}" for line in now if line not in before)
        if isinstance(event, Launched):
            yield f"  log: {beginning(view)}"
        before = now


def test_every_word_is_what_it_was() -> None:
    found = [line.rstrip() for line in told()]
    if os.environ.get("ETUDE_WRITE_ANSWERS"):
        STORY.write_text("\n".join(found) + "\n")
    assert found == STORY.read_text().splitlines()
