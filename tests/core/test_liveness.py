"""Silence under a clock that the test moves: the processes that are reported, when, and what does
not count."""

from __future__ import annotations

import math

from etude.core.clock import AwakeClock, ManualClock
from etude.core.events import ProcessHeard, ProcessSilent
from etude.core.liveness import REMIND_S, DisturbanceTracker, Liveness


def test_who_gives_no_sign_is_named_once_and_then_now_and_then() -> None:
    liveness = Liveness(10.0)
    told = []
    for now in range(100):
        if not 20 <= now < 60:
            liveness.heard("west", now)
        liveness.heard("east", now)
        told += [(now, event) for event in liveness.look(now)]
    silent = [(now, event.seconds) for now, event in told if isinstance(event, ProcessSilent)]
    assert [now for now, _ in silent] == list(range(29, 60, int(REMIND_S)))
    assert all(seconds == now - 19 for now, seconds in silent)
    assert [(now, event) for now, event in told if isinstance(event, ProcessHeard)] == [
        (60, ProcessHeard(process="west", seconds=41))
    ]
    assert {event.process for _, event in told} == {"west"} and liveness.all_heard


def test_one_that_starts_has_its_time_but_only_until_its_first_word() -> None:
    liveness = Liveness(10.0)
    liveness.heard("worker", 60.0)
    assert liveness.look(69.0) == []
    liveness.heard("other", 60.0)
    liveness.heard("other", 1.0)
    assert liveness.look(11.0) == [ProcessSilent(process="other", seconds=10.0)]
    assert not liveness.all_heard


def test_nobody_waits_for_one_that_is_forgotten() -> None:
    liveness = Liveness(10.0)
    liveness.heard("worker", 0.0)
    assert len(liveness.look(10.0)) == 1
    liveness.forget("worker")
    assert liveness.look(11.0) == [ProcessHeard(process="worker", seconds=11.0)]
    assert liveness.look(99.0) == []


def test_a_clock_that_is_awake_counts_no_pause() -> None:
    clock = ManualClock(5.0)
    awake = AwakeClock(clock, blink_s=2.0)
    for _ in range(10):
        clock.move(1.5)
        awake.now()
    assert awake.now() == 20.0 and not awake.slept_since(5.0)
    clock.move(92.0)
    assert awake.slept_since(20.0), "also if it is the first to look"
    assert awake.now() == 20.5
    clock.move(1.0)
    assert awake.now() == 21.5
    assert awake.slept_since(20.4) and not awake.slept_since(20.5)


def test_a_listener_that_was_stopped_itself_blames_nobody() -> None:
    clock = ManualClock()
    awake, liveness = AwakeClock(clock), Liveness(10.0)
    liveness.heard("worker", awake.now())
    clock.move(90.0)
    assert liveness.look(awake.now()) == []
    told = []
    for _ in range(10):
        clock.move(1.0)
        told += liveness.look(awake.now())
    assert told == [ProcessSilent(process="worker", seconds=10.5)]


def test_trouble_is_what_sessions_may_have_suffered_from() -> None:
    trouble = DisturbanceTracker(10.0, now=0.0)
    assert trouble.look(1.0, {"zygote": 1.0}, []) == []
    assert trouble.last(2.0) == -math.inf
    trouble.look(2.0, {"zygote": 0.0}, ["east"])
    assert trouble.last(3.0) == 2.0
    assert trouble.look(3.0, {"zygote": 0.0, "sandbox 7": 9.0}, []) == []
    assert trouble.look(4.0, {"zygote": 0.0, "sandbox 7": 10.0}, []) == [
        ProcessSilent(process="sandbox 7", seconds=10.0)
    ]
    assert trouble.last(5.0) == 4.0
    assert trouble.look(5.0, {"zygote": 0.0}, []) == [
        ProcessHeard(process="sandbox 7", seconds=11.0)
    ]
    assert trouble.last(14.9) == 4.0
    # No look for 10 s: the gateway, which each look queries, does not answer, or we were stopped.
    assert trouble.last(15.0) == 15.0
    assert trouble.look(20.0, {"zygote": 0.0}, []) == []
    assert trouble.last(21.0) == 20.0
