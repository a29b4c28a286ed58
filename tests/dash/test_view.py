"""Contents of the screen, from events written by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import re
from asyncio import to_thread
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from etude.core.events import (
    EVENTS,
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
    ProcessHeard,
    ProcessSilent,
    RegionStatus,
    RunDone,
    StageStarted,
    StepDone,
    StepProgress,
    WeightsLive,
)
from etude.core.types import Status
from etude.dash.page import (
    LEGEND,
    TELL_ERRORS,
    TELL_S,
    Line,
    Page,
    Teller,
    beginning,
    clock,
    describe,
)
from etude.dash.plot import plot
from etude.dash.reader import RunView
from etude.dash.recorded import RecordedRun
from etude.dash.table import cause_of
from etude.launch import screen
from etude.launch.screen import draw, layout
from etude.store.runs import Run


def printed(page: RenderableType) -> str:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(page)
    return capture.get()


def step(number: int, lag: int = 0) -> StepDone:
    return StepDone(
        step=number, loss=0.1, lag=lag, k1=0.0, k3_mean=0.0, k3_p99=0.0, entropy=1.0, grad_norm=1.0,
        tokens=9, seconds=1.0, wait_s=3.0,
    )  # fmt: skip


def group(*rewards: float) -> GroupDone:
    return GroupDone(
        group="g", task="t", admitted=2, rewards=rewards, failed=0, kept=True, seconds=1.0
    )


def attempt(
    status: Status = "done", reward: float | None = 1.0, error: str | None = None
) -> AttemptDone:
    return AttemptDone(
        id="g.0", task="t", split="train", status=status, reward=reward, error=error, seconds=1.0
    )


def view_of(*events: tuple[float, Event]) -> RunView:
    view = RunView()
    for t, event in events:
        view.apply(t, event)
    return view


def test_a_stage_with_its_time_to_go() -> None:
    view = view_of(
        (0.0, StageStarted(stage="midtrain", steps=10)),
        (4.0, FitStep(stage="midtrain", step=2, steps=10, loss=3.0, tokens_per_s=100.0)),
    )
    assert (view.stage, view.done, view.steps, view.eta_s) == ("midtrain", 2, 10, 16.0)


def test_the_clock_stands_still_while_nothing_runs() -> None:
    hours = 7 * 3600.0
    view = view_of(
        (100.0, Launched(resumed=False)),
        (101.0, StageStarted(stage="rl", steps=20)),
        *[(130.0, attempt())] * 2,
        (130.0, group(1.0, 0.0)),
        (131.0, step(1)),
        (hours, Launched(resumed=True)),
        (hours + 2.0, StageStarted(stage="rl", steps=20, done=1)),
        *[(hours + 4.0, attempt())] * 2,
        (hours + 4.0, group(1.0, 0.0)),
        (hours + 6.0, step(2)),
    )
    assert view.began is not None and view.now - view.began == 31.0 + 6.0
    assert "0:37 · Ctrl-C stops" in printed(draw(view, "run", lag_bound=0))
    assert view.eta_s == 4.0 * 18
    assert view.sessions_per_s == 4 / 15


def test_a_finished_run_that_goes_on_is_not_finished() -> None:
    evaluated = EvalDone(
        stage="rl", split="heldout", version=4, solved=1, total=2, low=0.1, high=0.9
    )
    before: list[tuple[float, Event]] = [
        (0.0, Launched(resumed=False)),
        (0.0, StageStarted(stage="rl", steps=4)),
        (1.0, attempt("failed", None, "agent: KeyError: 'x'")),
        (2.0, group(1.0, 0.0)),
        *((2.0, step(number)) for number in range(1, 5)),
        (3.0, evaluated),
        (4.0, RunDone(version=4)),
    ]
    again: list[tuple[float, Event]] = [
        (90.0, Launched(resumed=True)),
        (91.0, StageStarted(stage="rl", steps=8, done=4)),
    ]
    ended, goes_on = (
        printed(draw(view_of(*events), "run", lag_bound=0)) for events in (before, before + again)
    )
    assert "the run is complete" in ended and "newest error" in ended and "after rl" in ended
    assert "the run is complete" not in goes_on and "newest error" not in goes_on
    assert "1/2 at version 4" in goes_on and "after rl" not in goes_on
    starts = printed(draw(view_of(*before, again[0]), "run", lag_bound=0))
    assert "rl 4/4" in ended and "4/4" not in starts and "to go" not in starts
    assert "━" in ended and "━" not in starts


def test_a_finished_run_that_is_evaluated_is_at_its_end_again() -> None:
    doing = EvalProgress(stage="rl", split="heldout", done=0, total=2, solved=0)
    result = EvalDone(stage="rl", split="heldout", version=4, solved=1, total=2, low=0.1, high=0.9)
    again = ((90.0, Launched(resumed=True)), (91.0, doing), (92.0, result))
    stage, done = (0.0, StageStarted(stage="rl", steps=4)), (4.0, RunDone(version=4))
    assert not view_of(stage, done, *again[:2]).finished
    assert view_of(stage, done, *again).finished
    broke_off = view_of(stage, done, *again[:2], *again)
    assert broke_off.finished, "the evaluation before had no result"
    assert not view_of(stage, *again).finished, "it was stopped before its end"
    more = (89.0, StageStarted(stage="rl", steps=8, done=4))
    assert not view_of(stage, done, more, *again).finished


def test_few_tasks_are_a_notice_and_no_alarm() -> None:
    view, teller, told = RunView(), Teller(), list[str]()
    events = [
        Launched(resumed=False),
        FewTasks(split="train", wanted=64, given=6),
        FewTasks(split="heldout", wanted=16, given=1),
        StageStarted(stage="rl", steps=8),
        step(1),
    ]
    for t, event in enumerate(events):
        told += teller.tell(t, event, view, view.apply(t, event))
    few = [
        "6 train tasks (up to 64 requested)",
        "1 held-out task (up to 16 requested)",
    ]
    assert [line for line in told if "requested" in line] == few
    page = describe(view, 0)
    assert not page.alarms and Line("tasks", ", ".join(few), "dim") in page.lines
    view.apply(9.0, Launched(resumed=True))
    assert all(line.label != "tasks" for line in describe(view, 0).lines)


def test_rl_counts_from_its_own_start_also_when_resumed() -> None:
    view = view_of(
        (0.0, StageStarted(stage="rl", steps=20, done=5)), (2.0, step(8)), (4.0, step(9))
    )
    assert (view.done, view.first_step, view.eta_s) == (7, 2, 26.0)


def test_rewards_lag_and_how_busy_the_trainer_is() -> None:
    view = view_of(
        (0.0, StageStarted(stage="rl", steps=4)),
        (1.0, group(1.0, 0.0)), (1.0, group(0.5, 0.5)), (2.0, step(3)),
        (3.0, group(0.0, 0.0)), (4.0, step(4, lag=1)), (5.0, step(5)),
        (5.0, WeightsLive(version=5)), (6.0, RunDone(version=5)),
    )  # fmt: skip
    assert view.reward_curve == [0.5, 0.0] and view.solve_curve == [0.25, 0.0]
    assert (view.mean_reward, view.solve_rate) == (2 / 6, 1 / 6)
    assert (view.lag, view.lag_max, view.trainer_busy, view.live, view.finished) == (
        0,
        1,
        0.25,
        5,
        True,
    )


def test_a_trainer_that_works_as_long_as_it_waits_is_half_busy() -> None:
    even = replace(step(3), seconds=2.0, wait_s=2.0)
    assert view_of((0.0, StageStarted(stage="rl", steps=4)), (2.0, even)).trainer_busy == 0.5


def test_the_lag_of_a_batch_counts_before_its_step_is_done_also_after_a_stop() -> None:
    view = view_of(
        (0.0, StageStarted(stage="rl", steps=4)),
        (1.0, BatchReady(step=1)),
        (2.0, BatchReady(step=2, lag=1)),
        (3.0, step(1)),
        (9.0, Launched(resumed=True)),
        (10.0, StageStarted(stage="rl", steps=4, done=1)),
    )
    assert "0 now, at most 1, 2 allowed" in printed(draw(view, "run", lag_bound=2))


def test_how_sessions_ended_is_counted_and_the_newest_error_kept() -> None:
    failed = attempt("failed", None, "agent: KeyError: 'x'")
    evaluated = dataclasses.replace(attempt(), split="heldout")
    same = dataclasses.replace(group(0.0, 0.0), kept=False)
    view = view_of(
        (1.0, attempt()), (2.0, attempt("timeout", 0.0)), (2.0, attempt("truncated", 0.0)),
        (3.0, failed), (4.0, evaluated),
        (5.0, group(1.0, 0.0)), (5.0, same), (6.0, same),
    )  # fmt: skip
    ended = {"done": 1, "timeout": 1, "truncated": 1, "failed": 1}
    assert view.ended == ended, "of training alone"
    assert (view.groups.done, view.groups.with_signal, view.groups.sessions_without) == (3, 1, 4)
    assert view.failure is not None and view.failure.error == failed.error
    assert view.sessions_per_s == 5 / 15
    text = printed(draw(view, "etude", lag_bound=0))
    for words in (
        "1 finished, 1 failed, 1 timed out, 1 truncated, 4 without signal",
        "3 done, 1 with signal",
        "0:03 ago, g.0: agent: KeyError: 'x'",
    ):
        assert words in text, words


def test_an_error_with_a_traceback_is_told_by_what_was_raised() -> None:
    frames = '  File "/work/agent.py", line 4, in main\n    argv[1]\n' * 9
    said = "agent: the program ended with exit code 1; its last words: "
    raised = "IndexError: list index out of range"
    error = f"{said}Traceback (most recent call last):\n{frames}{raised}"
    failed = attempt("failed", None, error)
    one, four = view_of((0.0, attempt()), (1.0, failed)), view_of(*[(1.0, failed)] * 4)
    for view in (one, four):
        small, wide = (
            " ".join(line.plain for line in layout(describe(view, 0), "x", 1.0, width, 50))
            for width in (80, 260)
        )
        assert "range" in small and "Traceback" not in small
        assert f"{said}{raised}" in wide and "Traceback" not in wide
    begun = four.alarms.active.values()
    assert [alarm.what for alarm in begun] == [
        f"4 of the last 4 sessions failed, most recently with: {said}{raised}"
    ]
    assert [*Teller().tell(1.0, failed, one, [])] == [f"session g.0 failed: {said}{raised}"]
    assert cause_of(error).endswith(raised)


def test_tasks_that_teach_nothing_are_named_where_they_are_most_of_the_work() -> None:
    def of(task: str, *rewards: float) -> GroupDone:
        return dataclasses.replace(group(*rewards), task=task, kept=len(set(rewards)) > 1)

    def told(view: RunView) -> list[str]:
        return [line.text for line in describe(view, 0).lines if line.label == "no signal"]

    hard = [(1.0, of(f"hard-{n}", 0.0, 0.0)) for n in range(6)]
    easy = (2.0, of("easy", 0.0, 1.0))
    started = (0.0, StageStarted(stage="rl", steps=4)), (0.5, attempt())
    assert told(view_of(*started, *hard[:3])) == [], "so few say nothing"
    view = view_of(*started, *hard, easy)
    assert told(view) == ["6 of 7 tasks taught nothing yet: hard-0, hard-1, hard-2, hard-3, ..."]
    assert describe(view, 0).headline.text == (
        "first sessions have ended: 1 group with signal so far, a step needs more"
    )
    view.apply(3.0, of("hard-0", 0.0, 1.0))
    assert told(view)[0].startswith("5 of 7 tasks taught nothing yet: hard-1")
    for n in range(5):
        view.apply(4.0 + n, easy[1])
    assert told(view) == [], "most sessions teach now"


def test_attempts_that_were_dropped_for_sampling_are_not_without_signal() -> None:
    greedy = dataclasses.replace(
        group(0.0, 0.0), kept=False, untrainable={f"g.{n}": "temperature 0" for n in range(2)}
    )
    view = view_of((1.0, attempt()), (1.0, attempt()), (2.0, greedy))
    assert (view.groups.sessions_without, view.groups.untrainable) == (0, 2)
    told = next(line.text for line in describe(view, 0).lines if line.label == "sessions")
    assert told.endswith("0 without signal, 2 dropped for sampling")
    assert (
        "all attempts were dropped for their sampling parameters" in describe(view, 0).headline.text
    )
    mixed = dataclasses.replace(greedy, rewards=(0.0, 0.0, 0.0), untrainable={"g.0": "top_p"})
    view.apply(3.0, mixed)
    assert (view.groups.sessions_without, view.groups.untrainable) == (2, 3)


def test_suspects_are_not_without_signal() -> None:
    caught = dataclasses.replace(group(0.0), kept=False, quarantined={"g.0": "bytecode"})
    view = view_of((1.0, attempt()), (1.0, attempt()), (2.0, caught))
    assert (view.groups.sessions_without, view.groups.quarantined) == (1, 1)
    assert (view.mean_reward, view.solve_rate) == (0.0, 0.0)
    told = next(line.text for line in describe(view, 0).lines if line.label == "sessions")
    assert told.endswith("1 without signal (100%), 1 quarantined")


def test_curves_are_those_of_one_stage() -> None:
    rl = StageStarted(stage="rl", steps=4)
    fit = FitStep(stage="sft", step=1, steps=2, loss=3.0, tokens_per_s=1.0)
    view = view_of((0.0, StageStarted(stage="sft", steps=2)), (1.0, fit), (2.0, rl))
    assert view.loss_curve == []
    view.apply(3.0, group(1.0))
    view.apply(4.0, step(1))
    view.apply(5.0, rl)
    assert view.reward_curve == [1.0], "a stage that goes on keeps them"


def headline(*events: tuple[float, Event]) -> tuple[str, str]:
    said = describe(view_of(*events), 0).headline
    return said.label, said.text


def test_the_headline_says_what_is_going_on() -> None:
    failed = attempt("failed", None, "agent: KeyError: 'x'")
    same = dataclasses.replace(group(0.0, 0.0), kept=False)
    rl = (0.0, StageStarted(stage="rl", steps=9))
    fleet = FleetStatus(regions={}, active=1, capacity=1, sessions=7)
    doing = EvalProgress(stage="start", split="heldout", done=0, total=60, solved=0)
    fit = FitStep(stage="sft", step=1, steps=2, loss=3.0, tokens_per_s=1.0)
    four = [(float(n), e) for n in range(4) for e in (*[group(n / 4, n / 4)] * 4, step(n + 1))]
    thin = [(float(n), e) for n in range(15) for e in (group(n / 15, n / 15), step(n + 1))]
    steps = [(float(n), e) for n in range(8) for e in (*[group(n / 8, n / 8)] * 2, step(n + 1))]

    assert headline() == ("starting", "preparing model, workers and trainer")
    assert headline((0.0, fit), (1.0, dataclasses.replace(fit, loss=2.0))) == (
        "learning",
        "loss 3.000 at first, 2.000 now",
    )
    assert headline((0.0, doing)) == ("evaluating", "heldout tasks, before any training")
    assert headline(rl, (1.0, fleet)) == ("sampling", "the first 7 sessions are under way")
    assert headline(rl, (1.0, same)) == (
        "sampling",
        "no group with signal yet: in the first, all attempts earned 0",
    )
    assert headline(rl, (1.0, same), (1.0, same))[1].endswith("in each of 2, all attempts earned 0")
    assert headline(rl, *steps) == (
        "learning",
        "mean reward 0.19 in the first 4 steps, 0.69 in the last",
    )
    uneven = [(n, n % 4 / 4 + n / 99) for n in range(8)]
    jumps = [(float(n), e) for n, r in uneven for e in (*[group(r, r)] * 2, step(n + 1))]
    assert headline(rl, *jumps) == (
        "training",
        "mean reward 0.39 in the first 4 steps, 0.43 in the last",
    ), "a rise that may well be chance"
    early = "; too early to say more"
    assert headline(rl, *four) == (
        "training",
        f"mean reward 0.12 in the first 2 steps, 0.62 in the last{early}",
    )
    assert headline(rl, *thin) == (
        "training",
        f"mean reward 0.13 in the first 5 steps, 0.80 in the last{early}",
    )
    falling = [(float(n), e) for n in range(2) for e in (group(1 - n, 1 - n), step(n + 1))]
    assert headline(rl, *falling) == (
        "training",
        f"mean reward 1.00 in the first step, 0.00 in the last{early}",
    )
    needs_four = (0.0, StageStarted(stage="rl", steps=9, groups_per_step=4))
    assert headline(needs_four, (1.0, attempt()), (1.0, group(1.0, 0.0))) == (
        "sampling",
        "first sessions have ended: 1 group with signal so far, a step needs 4",
    )
    label, text = headline(rl, *[(1.0, failed)] * 4)
    assert label == "failing" and text.startswith("4 of the last 4 sessions failed")
    label, text = headline(rl, *[(1.0, same)] * 8)
    assert label == "no signal" and "no learning signal yet" in text
    assert describe(view_of(rl, *[(1.0, same)] * 8), 0).advice.startswith("the tasks are too")
    assert headline(*steps, (9.0, RunDone(version=4)))[0] == "finished"


def test_a_resumed_run_is_starting_until_something_of_it_is_under_way() -> None:
    stage = StageStarted(stage="rl", steps=9)
    again = (50.0, Launched(resumed=True))
    before = [(0.0, stage), (1.0, group(0.0, 1.0)), (2.0, step(1))]
    label, text = headline(*before, again)
    assert (label, text) == (
        "starting",
        "preparing model, workers and trainer, at step 1 of rl",
    )
    assert headline(*before, again, (60.0, dataclasses.replace(stage, done=1)))[0] == "training"


def full_page() -> Page:
    error = "agent: KeyError in /home/somebody/project/agent.py, line 41: " + "x" * 300
    failed = attempt("failed", None, error)
    steps = [(float(n), e) for n in range(9) for e in (attempt(), group(n / 9, 1.0), step(n + 1))]
    regions = {
        name: RegionStatus(version=3, busy=0.5, running=4, waiting=1) for name in ("east", "west")
    }
    view = view_of(
        (0.0, StageStarted(stage="rl", steps=9)),
        *steps,
        (9.0, FleetStatus(regions=regions, active=3, capacity=8, sessions=7)),
        (9.0, dataclasses.replace(step(10), k3_mean=0.5)),
        *[(9.0, failed)] * 30,
    )
    return describe(view, 2)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (100, 12), (40, 60), (36, 60)])
def test_a_page_fits(width: int, height: int) -> None:
    lines = [line.plain for line in layout(full_page(), "etude", 60.0, width, height)]
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_a_small_screen_is_complete_and_a_wide_one_shows_more() -> None:
    small, wide = (
        "\n".join(line.plain for line in layout(full_page(), "etude", 60.0, *size))
        for size in ((80, 23), (200, 49))
    )
    for words in ("failing", "what to do", "alarm", "k3 is 0.5000", "rl 10/9", "east",
                  "9 finished, 30 failed", "solve rate", "mean reward", "2 allowed"):  # fmt: skip
        assert words in small, words
    assert small.index("failing") < small.index("alarm") < small.index("9 finished")
    for words in ("newest sessions", "entropy by step", "k3 ", "how differently trainer"):
        assert words in wide, words


def test_figures_that_do_not_explain_themselves_are_in_the_legend() -> None:
    told = dict(full_page().legend)
    assert {"lag", "slots", "entropy", "k3", "corrected", "zero gradient"} <= told.keys()
    assert all(screen.LABEL + len(meaning) <= 80 for meaning in LEGEND.values())


def test_curves_stand_beside_each_other() -> None:
    lines = [line.plain for line in layout(full_page(), "etude", 60.0, 200, 49)]
    (top,) = (n for n, line in enumerate(lines) if line.count(" by step, now ") > 1)
    starts = [found.start() for found in re.finditer(r"\S+( \S+)? by step, now", lines[top])]
    rows = lines[top + 1 : lines.index("", top)]
    assert all(row[start - 2 : start].isspace() for row in rows for start in starts[1:])
    assert len(rows[0].split("┤")) == 1 + len(starts)


def test_the_page_says_all_of_it() -> None:
    view = view_of(
        (0.0, StageStarted(stage="rl", steps=4)),
        (1.0, group(1.0, 0.0)),
        (2.0, step(3)),
        (
            2.0,
            FleetStatus(
                regions={"east": RegionStatus(version=3, busy=0.5, running=4, waiting=1)},
                active=3,
                capacity=8,
            ),
        ),
        (
            3.0,
            EvalDone(
                stage="sft", split="heldout", version=2, solved=30, total=100, low=0.2, high=0.4
            ),
        ),
    )
    text = printed(draw(view, "etude", lag_bound=2))
    for words in (
        "mean reward    0.500   solve rate 50.0%   (first group)",
        "rl 1/4",
        "2 allowed",
        "east",
        "version 3",
        "50% busy",
        "slots 3 of 8",
        "30.0%",
        "25% busy",
        "gradient 1.00",
    ):
        assert words in text, words


def test_the_page_shows_how_the_policy_is_and_what_is_alarming() -> None:
    far = dataclasses.replace(
        step(3), k3_mean=0.5, corrected_frac=0.25, mfu=0.125, router_mismatch_frac=0.01
    )
    text = printed(
        draw(view_of((0.0, StageStarted(stage="rl", steps=4)), (2.0, far)), "etude", lag_bound=2)
    )
    for words in (
        "k3 0.50000",
        "corrected 25.0%",
        "12.5% MFU",
        "mismatch 1.00%",
        "step 3: k3 is 0.5000",
    ):
        assert words in text, words
    assert "alarm  " not in printed(draw(view_of((0.0, step(3))), "etude", lag_bound=2))


def test_an_evaluation_is_told_by_its_stage_unless_that_goes_on() -> None:
    def evaluated(stage: str, version: int) -> EvalDone:
        return EvalDone(
            stage=stage, split="heldout", version=version, solved=1, total=4, low=0.1, high=0.6
        )

    view = view_of(
        (0.0, evaluated("sft", 1)),
        (1.0, StageStarted(stage="rl", steps=4)),
        (2.0, step(1)),
        (3.0, evaluated("rl", 2)),
    )
    (line,) = (line.text for line in describe(view, 2).lines if line.label == "heldout solved")
    assert line.startswith("25.0% after sft, ") and line.endswith("1/4 at version 2")


def test_the_clock_counts_minutes_and_hours() -> None:
    told = {0: "0:00", 59: "0:59", 60: "1:00", 3599.9: "59:59", 3600: "1:00:00", 90061: "25:01:01"}
    assert {seconds: clock(seconds) for seconds in told} == told


def test_an_evaluation_has_its_time_to_go() -> None:
    doing = EvalProgress(stage="sft", split="novel", done=0, total=60, solved=0)
    view = view_of((5.0, doing), (9.0, dataclasses.replace(doing, done=20, solved=3)))
    assert view.eval_eta_s == 8.0
    assert "novel 20/60, 3 solved" in printed(draw(view, "etude", lag_bound=0))


def test_lines_end_with_the_time_to_go_and_alarms_have_lines_of_their_own() -> None:
    view = view_of((0.0, StageStarted(stage="midtrain", steps=100)))
    fit = FitStep(stage="midtrain", step=25, steps=100, loss=3.0, tokens_per_s=100.0)
    assert [*Teller().tell(50.0, fit, view, view.apply(50.0, fit))] == [
        "midtrain step 25/100  loss 3.000  100 tokens/s  2:30 to go"
    ]
    far = dataclasses.replace(step(1), k3_mean=0.5)
    told = [*Teller().tell(51.0, far, view, view.apply(51.0, far))]
    assert len(told) == 2 and told[1].startswith("alarm: step 1: k3 is 0.5000")


def test_a_silent_process_is_named_and_named_again_when_it_is_heard() -> None:
    view = view_of((0.0, StageStarted(stage="rl", steps=4)))
    silent, back = (
        ProcessSilent(process="trainer", seconds=10.0),
        ProcessHeard(process="trainer", seconds=92.0),
    )
    teller = Teller()
    (line,) = teller.tell(12.0, silent, view, view.apply(12.0, silent))
    assert line.startswith("alarm: the trainer has been silent for 10 s")
    later = dataclasses.replace(silent, seconds=15.0)
    assert [*teller.tell(17.0, later, view, view.apply(17.0, later))] == []
    assert "the trainer has been silent for 15 s" in printed(draw(view, "etude", lag_bound=0))
    assert [*teller.tell(94.0, back, view, view.apply(94.0, back))] == [
        "the trainer responds again after 92 s of silence"
    ]
    assert "silent" not in printed(draw(view, "etude", lag_bound=0))


def test_a_log_tells_how_a_run_begins() -> None:
    view, teller = view_of((0.0, Launched(resumed=False))), Teller()
    tried = EvalProgress(stage="start", split="heldout", done=0, total=3, solved=0)
    evaluated = EvalDone(
        stage="start", split="heldout", version=0, solved=0, total=3, low=0.0, high=0.5
    )
    fleet = FleetStatus(regions={}, active=4, capacity=4, sessions=16)
    begun = "the first 16 sessions are under way"
    expected: list[tuple[Event, list[str]]] = [
        (tried, ["evaluating on 3 heldout tasks, before any training"]),
        (fleet, []),
        (evaluated, ["heldout tasks solved before any training: 0.0% (0.0% - 50.0%) 0/3"]),
        (fleet, [begun]),
        (fleet, []),
        (attempt(), []),
    ]
    assert beginning(view) == "preparing model, workers and trainer; Ctrl-C stops"
    for event, lines in expected:
        assert [*teller.tell(1.0, event, view, view.apply(1.0, event))] == lines
    assert ", at step 1 of rl" in beginning(
        view_of((0.0, StageStarted(stage="rl", steps=4)), (1.0, step(2)))
    )


def test_a_trainer_that_may_be_at_work_is_not_said_to_wait() -> None:
    begun: list[tuple[float, Event]] = [(0.0, StageStarted(stage="rl", steps=4)), (1.0, attempt())]
    without, with_some = (
        printed(draw(view_of(*begun, *more), "run", lag_bound=0))
        for more in ((), ((2.0, group(1.0, 0.0)),))
    )
    assert "waiting for the first batch of groups with signal" in without
    assert "at step 1, or waiting for more" in with_some


def test_a_straggler_that_holds_the_window_is_told() -> None:
    def window(status: FleetStatus) -> list[str]:
        stage = StageStarted(stage="rl", steps=4)
        lines = describe(view_of((0.0, stage), (1.0, attempt()), (2.0, status)), 2).lines
        return [line.text for line in lines if line.label == "window"]

    held = FleetStatus(regions={}, active=6, capacity=6, sessions=1, held=5)
    (told,) = window(held)
    assert told.startswith(
        "full: 5 finished groups wait for an older one that is still under way; a"
    )
    assert window(dataclasses.replace(held, active=5)) == []
    assert window(dataclasses.replace(held, held=0)) == []


def test_a_long_step_of_the_trainer_is_said_to_be_one() -> None:
    full = FleetStatus(regions={}, active=4, capacity=4, sessions=0)
    begun: list[tuple[float, Event]] = [
        (0.0, Launched(resumed=False)),
        (0.0, StageStarted(stage="rl", steps=4)),
        (1.0, attempt()),
        (2.0, group(1.0, 0.0)),
        (3.0, BatchReady(step=1)),
    ]

    def trainer(*more: tuple[float, Event]) -> str:
        lines = describe(view_of(*begun, *more), 1).lines
        return next(line.text for line in lines if line.label == "trainer")

    assert trainer((4.0, dataclasses.replace(full, sessions=3))) == "at step 1 for 0:01"
    assert trainer((166.0, full)) == "at step 1 for 2:43; sampling waits for it (max_lag 1)"
    far = (160.0, StepProgress(step=1, done=12, total=32))
    assert trainer(far, (166.0, full)).startswith("at step 1 for 2:43 (12 of 32 rows); sampling")
    assert headline(*begun, far, (166.0, full)) == (
        "training",
        "the first step is running (12 of 32 rows), and sampling waits for it",
    )
    assert headline(*begun, (4.0, dataclasses.replace(full, sessions=3))) == (
        "training",
        "the first step is running, and sampling continues",
    )
    resumed: list[tuple[float, Event]] = [
        (20.0, BatchReady(step=2)),
        (30.0, step(1)),
        (900.0, Launched(resumed=True)),
        (910.0, StageStarted(stage="rl", steps=4, done=1)),
    ]
    assert trainer(*resumed, (915.0, full)).startswith("at step 2 for 0:05; sampling waits")
    late = trainer(*resumed, (913.0, BatchReady(step=2)), (915.0, full))
    assert late.startswith("at step 2 for 0:02; sampling waits"), "as soon as there is a batch"
    before_any = trainer((900.0, Launched(resumed=True)), (905.0, attempt()))
    assert before_any == "preparing", "no step goes on while the trainer is started"
    assert trainer(*resumed, (920.0, step(2))).startswith("25% busy  loss")
    later = trainer(*resumed, (920.0, step(2)), (930.0, StepProgress(step=3, done=1, total=32)))
    assert later.endswith("at step 3 (1 of 32 rows)")


def test_sessions_that_a_stop_cut_short_are_no_finished_ones() -> None:
    def ended(id: str) -> AttemptDone:
        return dataclasses.replace(attempt(), id=id)

    view = view_of(
        (0.0, StageStarted(stage="rl", steps=4)),
        (1.0, ended("a.0")),
        (2.0, ended("a.1")),
        (3.0, dataclasses.replace(group(1.0, 0.0), group="a")),
        (4.0, ended("b.1")),
        (9.0, Launched(resumed=True)),
        (9.5, AttemptsInterrupted(samples=("b.0", "b.1", "c.0", "c.1"))),
        (10.0, ended("d.0")),
    )
    assert view.ended == {"done": 3, "interrupted": 4}
    assert describe(view, 0).lines[0] == Line(
        "sessions", "3 finished, 0 failed, 0 timed out, 0 without signal (0%), 4 interrupted"
    )


def test_sessions_are_told_now_and_then_and_each_error_once() -> None:
    view, teller = view_of((0.0, StageStarted(stage="rl", steps=4))), Teller()

    def told(t: float, event: Event) -> list[str]:
        return [*teller.tell(t, event, view, view.apply(t, event))]

    same = dataclasses.replace(group(0.0, 0.0), kept=False)
    assert all(told(1.0, attempt()) == [] for _ in range(3))
    assert told(2.0, attempt("failed", None, "agent: a")) == ["session g.0 failed: agent: a"]
    assert told(3.0, attempt("failed", None, "agent: a")) == []
    assert told(4.0, same) == []
    assert told(1.5 + TELL_S, attempt()) == [
        "sessions: 4 finished, 2 failed, 0 timed out, 2 without signal (100%); no group with "
        "signal yet: in the first, all attempts earned 0; newest error: agent: a"
    ]
    assert told(9.0 + 2 * TELL_S, same) == [], "no session ended since"
    for n in range(9):
        told(40.0, attempt("failed", None, f"agent: {n}"))
    assert told(40.0, attempt("failed", None, "agent: new")) == [], f"after {TELL_ERRORS}"


def test_a_step_has_its_solve_rate_beside_the_mean_reward() -> None:
    view = view_of((0.0, StageStarted(stage="rl", steps=4)), (1.0, group(1.0, 0.5, 0.0, 0.0)))
    done = dataclasses.replace(step(1), reward=0.375)
    (line,) = Teller().tell(2.0, done, view, view.apply(2.0, done))
    assert "mean reward 0.375 (its groups)  solve rate 25.0% (first group)" in line


def test_a_curve_has_axes_and_a_fixed_scale() -> None:
    assert plot([0.0, 1.0], width=16, height=3, low=0.0, high=1.0, first=7) == [
        "1.00 ┤     ⣀⡠⠔⠒⠉",
        "0.00 ┤⣀⠤⠔⠊⠉     ",
        "      7        8",
    ]
    assert plot([1.0, 0.0], width=16, height=3, low=0.0, high=1.0)[:2] == [
        "1.00 ┤⠉⠒⠢⢄⣀     ",
        "0.00 ┤     ⠉⠑⠢⠤⣀",
    ]
    flat = plot([0.5] * 500, width=30, height=4, low=0.0, high=1.0)
    assert all(len(line) <= 30 for line in flat) and flat[1] == "     │" + "⠤" * 24
    assert plot([0.5], width=12, height=3, low=0.0, high=1.0)[-1].split() == ["1"]
    assert "nan" not in "".join(plot([2.0, 2.0], width=12, height=3, low=2.0, high=2.0))


async def test_a_terminal_is_drawn_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.open(f"file:{tmp_path}")
    events = run.events("controller", EVENTS)
    pages: list[str] = []

    class Enough(Exception):
        pass

    async def pause(seconds: float) -> None:
        """Add an event, which must be on the next page."""
        if len(pages) == 2:
            raise Enough
        events.append(StageStarted(stage="rl", steps=4))
        events.flush()

    def drawn(view: RunView, *more: Any) -> RenderableType:
        pages.append(printed(draw(view, *more)))
        assert len(pages) <= 2, "without a pause"
        return pages[-1]

    monkeypatch.setattr(screen, "asyncio", SimpleNamespace(sleep=pause, to_thread=to_thread))
    monkeypatch.setattr(screen, "draw", drawn)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    with pytest.raises(Enough):
        await screen.watch(run, console, title="etude", lag_bound=0)
    assert ["rl 0/4" in page for page in pages] == [False, True]


async def test_advice_names_the_run_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.open(f"file:{tmp_path}/runs/my own")
    events = run.events("controller", EVENTS)
    events.append(*[attempt("failed", None, "agent: KeyError: 'x'")] * 4)
    events.flush()
    recorded = RecordedRun("mine", run)
    recorded.refresh()
    (advice,) = (alarm.advice for alarm in recorded.view.alarms.active.values())
    assert f"`etude sessions '{tmp_path}/runs/my own' --failed`" in advice
    monkeypatch.chdir(tmp_path)
    page = io.StringIO()
    console = Console(file=page, force_terminal=True, width=120, height=24)
    watching = asyncio.create_task(screen.watch(run, console, title="etude", lag_bound=0))
    while "what to do" not in page.getvalue():
        assert not watching.done()
        await asyncio.sleep(0)
    watching.cancel()
    assert "`etude sessions 'runs/my own' --failed`" in page.getvalue()


def test_the_page_of_the_docs_shows_the_captured_screens() -> None:
    docs = Path(__file__).parent.parent.parent / "docs"
    blocks = re.findall(
        r"<!-- (screens/[\w.-]+) -->\n```\n(.*?)```", (docs / "screen.md").read_text(), re.DOTALL
    )
    assert len(blocks) == 3
    for name, text in blocks:
        assert (docs / name).read_text() == text, "run `make screens`"
