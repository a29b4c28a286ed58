"""The trainer's measurements, read from its events, and their consequences for regions."""

from __future__ import annotations

from etude.core.alarms import Alarms
from etude.core.events import EVENTS, Event, Launched, MismatchMeasured, RegionQuarantined
from etude.run.drift import DriftWatch
from etude.store.runs import Run
from tests.core.test_quarantine import measured


def tell(run: Run, process: str, *events: Event) -> None:
    log = run.events(process, EVENTS)
    log.append(*events)
    log.flush()


def drifting(step: int) -> MismatchMeasured:
    return measured(step, east=1e-5, west=0.1)


def test_a_region_that_drifts_is_named_until_the_next_launch() -> None:
    run = Run.open("memory:")
    told: list[Event] = []
    tell(run, "launcher", Launched(resumed=False))
    watch = DriftWatch(run, 10.0, told.append)
    assert watch.look() == []
    tell(run, "trainer", drifting(1), drifting(2))
    assert watch.look() == [] and told == []
    tell(run, "trainer", drifting(3))
    assert watch.look() == ["west"] and watch.look() == ["west"]
    (event,) = told
    assert isinstance(event, RegionQuarantined) and (event.region, event.step) == ("west", 3)

    assert DriftWatch(run, 10.0, lambda event: None).look() == ["west"], "after a restart too"
    assert DriftWatch(run, 0.0, lambda event: None).look() == []
    tell(run, "launcher", Launched(resumed=True))
    assert DriftWatch(run, 10.0, lambda event: None).look() == [], "it may have been mended"


def test_it_is_an_alarm_as_long_as_it_lasts() -> None:
    alarms = Alarms()
    (alarm,) = alarms.apply(RegionQuarantined(region="west", step=3, factor=1e4))
    assert "the region west has been in quarantine since step 3" in alarm.what
    assert "1e+04 times" in alarm.what and "etude mismatch" in alarm.advice
    assert list(alarms.active.values()) == [alarm]
    alarms.apply(Launched(resumed=True))
    assert alarms.active == {}
