"""Drift of a run's regions, computed from the trainer's measurements in its events."""

from __future__ import annotations

import time

from etude.core.events import EVENTS, Launched, MismatchMeasured, RegionQuarantined
from etude.core.quarantine import RegionDrift
from etude.store.codec import Damaged
from etude.store.runs import Run
from etude.store.telemetry import Emit


class DriftWatch:
    """Puts regions whose mismatch has drifted into quarantine. All measurements since the last
    launch of the run count, across restarts of this process: a region that was repaired comes back
    with the next launch."""

    def __init__(self, run: Run, factor: float, emit: Emit) -> None:
        self._log = run.events("trainer", EVENTS, _leave_out)
        self._read = 0
        self._drift = RegionDrift(factor)
        self._emit = emit
        launches, _ = run.events("launcher", EVENTS, _leave_out).read(0)
        times = [each.t for each in launches if isinstance(each.record, Launched)]
        self._since = max(times, default=time.time())

    def look(self) -> list[str]:
        """The regions that are in quarantine now."""
        events, self._read = self._log.read(self._read)
        for each in events:
            event = each.record
            if each.t < self._since or not isinstance(event, MismatchMeasured):
                continue
            if (region := self._drift.add(event)) is not None:
                factor = self._drift.quarantined[region]
                self._emit(RegionQuarantined(region=region, step=event.step, factor=factor))
        return sorted(self._drift.quarantined)


def _leave_out(damage: Damaged) -> None:
    """Ignore the damage: the programs that show the run report it."""
