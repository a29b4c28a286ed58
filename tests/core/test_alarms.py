"""Alarms: when each starts and ends, and that a healthy run has none."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from etude.core.alarms import (
    FEW_SESSIONS,
    FIRST_STEPS,
    IN_VAIN,
    IN_VAIN_LATER,
    RECENT_GROUPS,
    Alarms,
    RepeatedRows,
    signal_advice,
    what_was_earned,
)
from etude.core.events import (
    AttemptDone,
    Event,
    GroupDone,
    Launched,
    ProcessDied,
    ProcessHeard,
    ProcessRestarted,
    ProcessSilent,
    RegionQuarantined,
    StageStarted,
    StepDone,
)
from etude.core.sampling import VersionSpan
from etude.core.types import Batch, Row

STEP = StepDone(
    step=1, loss=0.1, lag=0, k1=0.0, k3_mean=1e-4, k3_p99=0.0, entropy=1.0, grad_norm=1.0, tokens=9,
    seconds=1.0, wait_s=0.0,
)  # fmt: skip
GROUP = GroupDone(
    group="g", task="t", admitted=0, rewards=(1.0, 0.0), failed=0, kept=True, seconds=1.0
)

ATTEMPT = AttemptDone(
    id="g.0", task="t", split="train", status="done", reward=1.0, error=None, seconds=1.0
)


def begun(alarms: Alarms, *events: Event) -> list[str]:
    return [alarm.name for event in events for alarm in alarms.apply(event)]


def test_a_healthy_run_is_quiet() -> None:
    alarms = Alarms()
    assert begun(alarms, *[STEP] * 50, *[GROUP] * 200, *[ATTEMPT] * 99) == []
    assert alarms.active == {}


def test_k3_begins_once_and_ends() -> None:
    alarms, far = Alarms(), replace(STEP, step=7, k3_mean=0.02)
    (alarm,) = alarms.apply(far)
    assert (
        str(alarm).startswith("step 7: k3 is 0.0200, above 0.01: ")
        and "lower lr or max_lag" in alarm.advice
    )
    assert begun(alarms, far, far) == [] and list(alarms.active) == ["k3"]
    assert begun(alarms, STEP) == [] and alarms.active == {}
    assert begun(alarms, far) == ["k3"]


def test_a_silent_process_is_alarming_until_it_is_heard_again() -> None:
    alarms, silent = Alarms(), ProcessSilent(process="worker-east", seconds=10.4)
    (alarm,) = alarms.apply(silent)
    assert str(alarm).startswith("the worker-east has been silent for 10 s: it has stopped, hangs")
    assert begun(alarms, replace(silent, seconds=15.4)) == []
    (active,) = alarms.active.values()
    assert "for 15 s" in active.what
    assert begun(alarms, StageStarted(stage="rl", steps=9)) == [] and len(alarms.active) == 1, (
        "whatever the stage"
    )
    assert (
        begun(alarms, ProcessHeard(process="worker-east", seconds=92.0)) == []
        and alarms.active == {}
    )
    assert (
        begun(alarms, silent, Launched(resumed=True)) == ["silent worker-east"]
        and alarms.active == {}
    )


def test_entropy_is_compared_with_the_first_steps() -> None:
    alarms, low = Alarms(), replace(STEP, entropy=0.19)
    assert begun(alarms, *[STEP] * FIRST_STEPS, replace(STEP, entropy=0.21)) == []
    assert begun(alarms, low) == ["entropy"]
    assert begun(alarms, StageStarted(stage="rl", steps=9), *[low] * 20) == [], (
        "another stage, another entropy"
    )
    rl = StageStarted(stage="rl", steps=9)
    assert begun(alarms := Alarms(), rl, *[STEP] * FIRST_STEPS, rl, low) == ["entropy"], (
        "stopped and resumed"
    )
    assert begun(alarms, rl, low) == [] and list(alarms.active) == ["entropy"]


def test_a_reward_that_has_nowhere_to_go() -> None:
    solved = replace(GROUP, rewards=(1.0, 1.0))
    alarms = Alarms()
    assert begun(alarms, replace(solved, rewards=())) == [], "also if it is the first"
    assert begun(alarms, *[solved] * (RECENT_GROUPS - 1)) == []
    assert begun(alarms, replace(solved, rewards=())) == [], "a group that failed says nothing"
    assert begun(alarms, solved) == ["reward"]
    assert begun(alarms, *[GROUP] * 10) == [] and alarms.active == {}


def test_a_reward_that_has_fallen() -> None:
    best, worst = replace(GROUP, rewards=(-4.0, 4.0)), replace(GROUP, rewards=(-4.0, -4.0))
    alarms = Alarms()
    assert begun(alarms, *[best] * RECENT_GROUPS, *[worst] * 51) == [], "3.1875 less, of 8.0"
    assert begun(alarms, replace(worst, rewards=())) == [], "a group that failed says nothing"
    assert begun(alarms, worst) == ["reward_drop"]
    told = alarms.active["reward_drop"]
    assert (
        told.what == "group g: the last 64 groups earned -3.250 on average, down from 0.000 at best"
    )
    assert begun(alarms, *[worst] * 99, *[best] * 38) == [], "it does not begin again"
    assert "reward_drop" in alarms.active, "1.625 less"
    assert begun(alarms, best) == [] and alarms.active == {}, "1.5625 less"
    another = StageStarted(stage="another", steps=9)
    assert begun(alarms, another, *[worst] * 99) == []


def test_malformed_attempts_are_shown_with_the_reason() -> None:
    (alarm,) = Alarms().apply(replace(GROUP, malformed={"g.1": "its reward is nan", "g.2": "x"}))
    assert alarm.what == "g.1: its reward is nan (and 1 more of its group)"


def test_attempts_that_cannot_be_recomputed_are_shown_with_the_parameters() -> None:
    alarms = Alarms()
    (alarm,) = alarms.apply(replace(GROUP, untrainable={"g.1": "top_p", "g.2": "grammar"}))
    assert alarm.name == "sampling" and alarm.what == (
        "g.1: sampled with top_p (and 1 more of its group)"
    )
    assert alarms.apply(GROUP) == [] and alarms.active == {}


def test_suspects_are_shown_with_the_trick() -> None:
    alarms = Alarms()
    (alarm,) = alarms.apply(replace(GROUP, quarantined={"g.1": "bytecode, hang"}))
    assert (alarm.name, alarm.what) == ("cheats", "g.1: suspected of bytecode, hang")
    assert alarms.apply(GROUP) == [] and alarms.active == {}


def test_a_payload_that_repeats() -> None:
    row = Row(
        sample="a",
        tokens=(1, 2),
        mask=(False, True),
        logprobs=(0.0, -15.0),
        advantages=(0.0, 1.0),
        versions=(VersionSpan(0, 1),),
    )
    other = replace(row, logprobs=(0.0, -15.0000001))
    repeats = RepeatedRows(steps=2)
    assert repeats.count(Batch(step=1, rows=(row, row), oldest=0)) == 0, (
        "two equal attempts of one batch are no copy"
    )
    assert (
        repeats.count(
            Batch(step=2, rows=(other, replace(row, sample="b", advantages=(0.0, -1.0))), oldest=0)
        )
        == 1
    )
    assert repeats.count(Batch(step=3, rows=(other, row), oldest=0)) == 2
    alarms = Alarms()
    assert begun(alarms, replace(STEP, repeated_rows=2)) == ["repeats"] and list(alarms.active) == [
        "repeats"
    ]
    assert begun(alarms, STEP) == [] and alarms.active == {}


def test_what_a_sure_model_says_twice_is_no_copy() -> None:
    row = Row(
        sample="a",
        tokens=(1, 2),
        mask=(False, True),
        logprobs=(0.0, -0.1),
        advantages=(0.0, 1.0),
        versions=(),
    )
    repeats = RepeatedRows()
    assert [repeats.count(Batch(step=step, rows=(row,), oldest=0)) for step in (1, 2)] == [0, 0]


def test_where_each_alarm_begins() -> None:
    assert begun(Alarms(), replace(STEP, k3_mean=0.01)) == [] and begun(
        Alarms(), replace(STEP, k3_mean=0.0101)
    )
    five = [replace(STEP, entropy=entropy) for entropy in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert begun(Alarms(), *five, replace(STEP, entropy=0.2 * 3.0)) == []
    assert begun(Alarms(), *five, replace(STEP, entropy=0.599)) == ["entropy"]
    assert begun(Alarms(), *five[:4], replace(STEP, entropy=0.001)) == [], (
        "the fifth step is one of the first"
    )
    good, bad = replace(GROUP, rewards=(1.0,)), replace(GROUP, rewards=(0.2,))
    assert begun(Alarms(), *[bad] * 4, *[good] * 60) == ["reward"], "(60 + 4 * 0.2) / 64 is 0.95"
    assert begun(Alarms(), *[bad] * 5, *[good] * 59) == []
    assert begun(Alarms(), *[bad] * 4, *[good] * 59) == [], "63 groups say nothing yet"
    (alarm,) = Alarms().apply(replace(GROUP, malformed={"g.1": "its reward is nan"}))
    assert alarm.what == "g.1: its reward is nan"


def test_copies_are_told_by_everything_that_was_sampled() -> None:
    row = Row(
        sample="a", tokens=(1, 2), mask=(False, True), logprobs=(0.0, -15.0), advantages=(0.0, 1.0),
        versions=(VersionSpan(0, 1),),
    )  # fmt: skip
    for other in (replace(row, tokens=(1, 3)), replace(row, versions=(VersionSpan(1, 1),))):
        repeats = RepeatedRows(steps=1)
        assert [
            repeats.count(Batch(step=n, rows=(each,), oldest=0))
            for n, each in enumerate((row, other, row))
        ] == [0] * 3
    unlikely, likely = replace(row, logprobs=(0.0, -13.82)), replace(row, logprobs=(0.0, -13.81))
    for each, expected in ((unlikely, 1), (likely, 0)):
        repeats = RepeatedRows()
        assert [repeats.count(Batch(step=n, rows=(each,), oldest=0)) for n in range(3)] == [
            0,
            expected,
            expected,
        ]


def test_how_long_a_row_is_remembered() -> None:
    row = Row(
        sample="a",
        tokens=(1, 2),
        mask=(False, True),
        logprobs=(0.0, -15.0),
        advantages=(0.0, 1.0),
        versions=(),
    )
    for gap, expected in ((63, 1), (64, 0)):
        repeats = RepeatedRows()
        repeats.count(Batch(step=0, rows=(row,), oldest=0))
        for step in range(gap):
            repeats.count(Batch(step=step, rows=(), oldest=0))
        assert repeats.count(Batch(step=99, rows=(row,), oldest=0)) == expected


def test_an_alarm_is_active_under_its_own_name() -> None:
    alarms = Alarms()
    alarms.apply(replace(GROUP, malformed={"g.1": "its reward is nan"}))
    for entropy in [1.0] * FIRST_STEPS + [0.1]:
        alarms.apply(replace(STEP, entropy=entropy, k3_mean=1.0, repeated_rows=1))
    for _ in range(RECENT_GROUPS):
        alarms.apply(replace(GROUP, rewards=(1.0,), malformed={"g.1": "its reward is nan"}))
    assert {name: alarm.name for name, alarm in alarms.active.items()} == {
        name: name for name in ("k3", "entropy", "repeats", "malformed", "reward")
    }


def test_sessions_that_fail_are_alarming_from_the_first_few_on() -> None:
    failed = replace(ATTEMPT, status="failed", reward=None, error="agent: KeyError: 'x'")
    alarms = Alarms()
    assert begun(alarms, *[failed] * (FEW_SESSIONS - 1)) == []
    (alarm,) = alarms.apply(failed)
    assert alarm.what == "4 of the last 4 sessions failed, most recently with: agent: KeyError: 'x'"
    assert begun(alarms, *[ATTEMPT] * 5) == [] and alarms.active == {}, "fewer than half"
    assert begun(alarms, *[failed] * 2) == ["failing"]
    assert begun(alarms, Launched(resumed=True), failed) == [] and alarms.active == {}


def test_groups_without_a_difference_are_alarming() -> None:
    alarms, same = Alarms(), replace(GROUP, rewards=(0.0, 0.0), kept=False)
    all_failed = replace(same, rewards=(), failed=2)
    one_suspect = replace(same, rewards=(0.0,), quarantined={"g.1": "hang"})
    all_suspects = replace(one_suspect, rewards=())
    others = [*[all_failed] * 9, *[all_suspects] * 9]
    assert set(begun(alarms, *[same] * (IN_VAIN - 2), one_suspect, *others)) == {"cheats"}
    (alarm,) = alarms.apply(same)
    assert alarm.what == (
        "no learning signal yet: in each of 8 groups, all attempts earned the same reward (all 0)"
    )
    assert alarm.advice.startswith("the tasks are too hard")
    assert begun(alarms, GROUP) == [] and alarms.active == {}
    solved = replace(same, rewards=(1.0, 1.0))
    assert begun(alarms, *[solved] * (IN_VAIN_LATER - 1)) == []
    assert begun(alarms, solved) == ["signal"]
    (active,) = alarms.active.values()
    assert (
        active.what
        == "in the last 32 groups, all attempts of a group earned the same reward (all 1)"
    )
    assert begun(alarms, GROUP, *[same] * IN_VAIN_LATER) == ["signal"]
    (active,) = alarms.active.values()
    assert active.advice.startswith("either the tasks have become harder or the policy has broken")


def test_what_happens_to_a_process_is_told_until_it_is_heard() -> None:
    died = ProcessDied(process="gateway", how="was killed", advice="")
    back = ProcessRestarted(process="gateway", how="was killed", limit=3)
    elsewhere = replace(back, limit=None)
    for event, advice in (
        (died, "the end of its log says why"),
        (replace(died, advice="give it more memory"), "give it more memory"),
        (back, "more than 3 times within a minute"),
        (elsewhere, "as soon as the cluster has room"),
    ):
        alarms = Alarms()
        (alarm,) = alarms.apply(event)
        assert alarm.what.startswith("the gateway was killed") and advice in alarm.advice
        assert begun(alarms, ProcessSilent(process="gateway", seconds=9.0)) == [], "the same one"
        assert begun(alarms, ProcessHeard(process="trainer", seconds=9.0)) == []
        assert list(alarms.active) == ["silent gateway"]
        assert begun(alarms, ProcessHeard(process="gateway", seconds=9.0)) == []
        assert alarms.active == {}


def test_a_drifted_region_is_told_until_the_next_launch() -> None:
    alarms = Alarms()
    (alarm,) = alarms.apply(RegionQuarantined(region="west", step=4, factor=12.34))
    assert alarm.what.startswith(
        "the region west has been in quarantine since step 4: its k3 is 12.3 "
    )
    assert begun(alarms, StageStarted(stage="rl", steps=9), STEP) == []
    assert list(alarms.active) == ["drifted west"]
    assert begun(alarms, Launched(resumed=True)) == [] and alarms.active == {}


def test_commands_that_are_advised_can_be_pasted() -> None:
    failed = replace(ATTEMPT, status="failed", reward=None, error="x")
    alarms = Alarms("my runs/a'b")
    begun(alarms, *[failed] * FEW_SESSIONS, RegionQuarantined(region="west", step=4, factor=12.0))
    for name in ("failing", "drifted west"):
        command = alarms.active[name].advice.partition("`")[2].partition("`")[0]
        assert "my runs/a'b" in shlex.split(command)


def test_a_jump_is_told_with_its_group() -> None:
    alarms = Alarms()
    (alarm,) = alarms.apply(replace(GROUP, jump="from 0.1 to 1.0"))
    assert (alarm.name, alarm.what) == ("jump", "group g: from 0.1 to 1.0")
    assert alarms.apply(GROUP) == [] and alarms.active == {}


@pytest.mark.parametrize(
    ("rewards", "earned", "advice"),
    [
        ([0.0, 0.0], "all 0", "too hard"),
        ([1.0, 1.0], "all 1", "solved already"),
        ([0.5, 0.5], "all 0.5", "temperature"),
        ([0.0, 1.0], "not the same for all tasks", "temperature"),
    ],
)
def test_advice_depends_on_what_was_earned(rewards: list[float], earned: str, advice: str) -> None:
    assert what_was_earned(rewards) == earned and advice in signal_advice(rewards, had_signal=False)
