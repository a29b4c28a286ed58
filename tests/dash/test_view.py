"""What the screen shows, from events written by hand."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console, RenderableType

from etude.core.events import (
    EvalDone,
    EvalProgress,
    Event,
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
    WeightsLive,
)
from etude.dash.reader import RunView
from etude.launch.screen import draw, lines, session, sparkline


def printed(page: RenderableType) -> str:
    console = Console(width=120, file=io.StringIO())
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
        (130.0, group(1.0, 0.0)),
        (131.0, step(1)),
        (hours, Launched(resumed=True)),
        (hours + 2.0, StageStarted(stage="rl", steps=20, done=1)),
        (hours + 4.0, group(1.0, 0.0)),
        (hours + 6.0, step(2)),
    )
    assert view.began is not None and view.now - view.began == 31.0 + 6.0
    assert "0:37 · Ctrl-C stops" in printed(draw(view, "run", lag_bound=0))
    assert view.eta_s == 4.0 * 18
    assert view.sessions_per_s == 4 / 15


def test_rl_counts_from_its_own_start_also_when_resumed() -> None:
    view = view_of(
        (0.0, StageStarted(stage="rl", steps=20, done=5)), (2.0, step(8)), (4.0, step(9))
    )
    assert (view.done, view.first_step, view.eta_s) == (7, 2, 26.0)


def test_rewards_lag_and_how_busy_the_trainer_is() -> None:
    view = view_of(
        (0.0, StageStarted(stage="rl", steps=4)),
        (1.0, group(1.0, 0.0)), (1.0, group(1.0, 1.0)), (2.0, step(3)),
        (3.0, group(0.0, 0.0)), (4.0, step(4, lag=1)), (5.0, step(5)),
        (5.0, WeightsLive(version=5)), (6.0, RunDone(version=5)),
    )  # fmt: skip
    assert view.reward_curve == [0.75, 0.0] and view.solve_rate == 0.5
    assert (view.lag, view.lag_max, view.trainer_busy, view.live, view.finished) == (
        0,
        1,
        0.25,
        5,
        True,
    )
    assert view.sessions_per_s == 6 / 15


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
        "rl 1/4",
        "2 allowed",
        "east",
        "version 3",
        "50% busy",
        "slots 3 of 8",
        "30.0%",
        "25% busy",
    ):
        assert words in text, words


def test_the_page_shows_how_the_policy_is_and_what_is_alarming() -> None:
    far = dataclasses.replace(
        step(3), k3_mean=0.5, truncated_frac=0.25, mfu=0.125, router_mismatch_frac=0.01
    )
    text = printed(
        draw(view_of((0.0, StageStarted(stage="rl", steps=4)), (2.0, far)), "etude", lag_bound=2)
    )
    for words in (
        "k3 0.50000",
        "truncated 25.00%",
        "12.5% of the device",
        "mismatch 1.00%",
        "step 3: k3 is 0.5000",
    ):
        assert words in text, words
    assert "alarm" not in printed(draw(view_of((0.0, step(3))), "etude", lag_bound=2))


def test_an_evaluation_has_its_time_to_go() -> None:
    doing = EvalProgress(stage="sft", split="novel", done=0, total=60, solved=0)
    view = view_of((5.0, doing), (9.0, dataclasses.replace(doing, done=20, solved=3)))
    assert view.eval_eta_s == 8.0
    assert "novel, 3 solved 20/60" in printed(draw(view, "etude", lag_bound=0))


def test_lines_end_with_the_time_to_go_and_alarms_have_lines_of_their_own() -> None:
    view = view_of((0.0, StageStarted(stage="midtrain", steps=100)))
    fit = FitStep(stage="midtrain", step=25, steps=100, loss=3.0, tokens_per_s=100.0)
    assert [*lines(fit, view, view.apply(50.0, fit))] == [
        "midtrain step 25/100  loss 3.000  100 tokens/s  2:30 to go"
    ]
    far = dataclasses.replace(step(1), k3_mean=0.5)
    told = [*lines(far, view, view.apply(51.0, far))]
    assert len(told) == 2 and told[1].startswith("alarm: step 1: k3 is 0.5000")


def test_a_silent_process_is_named_and_named_again_when_it_is_heard() -> None:
    view = view_of((0.0, StageStarted(stage="rl", steps=4)))
    silent, back = (
        ProcessSilent(process="trainer", seconds=10.0),
        ProcessHeard(process="trainer", seconds=92.0),
    )
    (line,) = lines(silent, view, view.apply(12.0, silent))
    assert line.startswith("alarm: the trainer has been silent for 10 s")
    later = dataclasses.replace(silent, seconds=15.0)
    assert [*lines(later, view, view.apply(17.0, later))] == []
    assert "the trainer has been silent for 15 s" in printed(draw(view, "etude", lag_bound=0))
    assert [*lines(back, view, view.apply(94.0, back))] == [
        "the trainer is heard again after 92 s of silence"
    ]
    assert "silent" not in printed(draw(view, "etude", lag_bound=0))


def test_a_session_can_be_read() -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "edit", "arguments": '{"line": 2, "text": "return a"}'},
    }
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "fix area.py"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]
    text = printed(session(messages))
    assert (
        "system be brief" in text
        and "user   fix area.py" in text
        and "model  edit(2, 'return a')" in text
        and "tool   ok" in text
    )


def test_a_sparkline_has_a_fixed_scale() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
