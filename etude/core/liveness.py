"""Liveness: the processes that have been silent for too long. Pure: the time is passed in, and no
process is stopped or started here.

A process that was stopped, or whose host is gone, closes no connection: the only sign of it is
silence. So every process sends heartbeats, and counts as silent after `heartbeat_timeout_s` without
one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from etude.core.events import ProcessHeard, ProcessSilent

REMIND_S = 5.0
"""Time between two events about the same silence."""


class Liveness:
    """The last heartbeat of each process, and which of them are silent."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._heard: dict[str, float] = {}
        self._silent: dict[str, float] = {}  # name -> since when
        self._told: dict[str, float] = {}  # name -> time of the last event about it

    def heard(self, name: str, now: float) -> None:
        """Record a heartbeat. A time in the future means: not silent before then."""
        self._heard[name] = now

    def forget(self, name: str) -> None:
        """Stop watching a process."""
        self._heard.pop(name, None)

    def look(self, now: float) -> list[ProcessSilent | ProcessHeard]:
        """Return the events that are due: for processes that are silent, at first and then from
        time to time, and for processes that are heard again."""
        silent = {
            name: then
            for name, then in self._heard.items()
            if now - then >= self._heartbeat_timeout_s
        }
        back = {name: now - since for name, since in self._silent.items() if name not in silent}
        due = [
            name
            for name in silent
            if name not in self._silent or now - self._told[name] >= REMIND_S
        ]
        self._silent = silent
        self._told |= dict.fromkeys(due, now)
        return [
            *(ProcessHeard(process=name, seconds=seconds) for name, seconds in back.items()),
            *(ProcessSilent(process=name, seconds=now - silent[name]) for name in due),
        ]

    @property
    def all_heard(self) -> bool:
        """True if no process was silent at the last look."""
        return not self._silent


class DisturbanceTracker:
    """The last time that a process which sessions need was silent, as far as their controller can
    see: a process of the sandboxes, a worker (reported by the gateway), the gateway, or the
    controller itself."""

    def __init__(self, heartbeat_timeout_s: float, now: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._liveness = Liveness(heartbeat_timeout_s)
        self._owing: set[str] = set()
        self._looked = now
        self._last = -math.inf

    def look(
        self, now: float, owing: Mapping[str, float], silent_regions: Sequence[str]
    ) -> list[ProcessSilent | ProcessHeard]:
        """Return the events about processes that owe an answer (`owing`: process -> seconds). Call
        this often. Events about the other processes come from the process that started them."""
        for name, seconds in owing.items():
            self._liveness.heard(name, now - seconds)
        for name in self._owing - owing.keys():
            self._liveness.forget(name)
        self._owing = set(owing)
        told = self._liveness.look(now)
        self._last = now if silent_regions or not self._liveness.all_heard else self.last(now)
        self._looked = now
        return told

    def last(self, now: float) -> float:
        """The time of the last silence. An overdue look counts as one: it waits for the gateway, or
        the controller itself was stopped."""
        return now if now - self._looked >= self._heartbeat_timeout_s else self._last
