"""The reason why each unfinished rollout waits, folded from the ledger and the events. Pure: the
caller passes entries and events in, entries first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from etude.core.events import AttemptDone, Event, GroupDone
from etude.core.ledger import Batched, Dropped, Entry, Issued, Trained
from etude.core.updates import is_of_user
from etude.dash.page import clock
from etude.dash.reader import Ending

STOPPED_S = 60.0
"""An unfinished run without any event for this long has probably been stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One rollout that is neither trained on nor dropped."""

    id: str
    task: str
    group: str
    waits_for: str
    seconds: float


@dataclass(slots=True)
class _Open:
    task: str
    group: str
    since: float
    slot: int
    ended: bool = False
    step: int | None = None
    is_of_user: bool = False


class Waits:
    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._groups: defaultdict[str, set[str]] = defaultdict(set)
        """Group -> its open rollouts."""
        self._trained = 0
        self._slots = 0
        """Number of groups that were ever issued."""
        self.told = 0.0
        """The time of the newest event."""
        self._ending = Ending()
        self._has_users = False

    def enter(self, t: float, entry: Entry) -> None:
        match entry:
            case Issued():
                for sample in entry.samples:
                    of_user = is_of_user(sample)
                    self._has_users |= of_user
                    self._open[sample] = _Open(
                        entry.task, entry.group, t, self._slots, is_of_user=of_user
                    )
                    self._groups[entry.group].add(sample)
                self._slots += 1
            case Batched():
                for sample in entry.samples:
                    if (found := self._open.get(sample)) is not None:
                        found.step = entry.step
                        found.since = t
            case Dropped():
                self._settle(entry.samples)
            case Trained():
                self._trained = max(self._trained, entry.step)
                self._settle(
                    [
                        sample
                        for sample, found in self._open.items()
                        if found.step is not None and found.step <= self._trained
                    ]
                )

    def apply(self, t: float, event: Event) -> None:
        self.told = max(self.told, t)
        self._ending.apply(event)
        if isinstance(event, AttemptDone) and (found := self._open.get(event.id)) is not None:
            found.ended = True
            found.since = max(found.since, t)
        if isinstance(event, GroupDone):
            for sample in self._groups.get(event.group, ()):
                self._open[sample].since = max(self._open[sample].since, t)

    def _settle(self, samples: Sequence[str]) -> None:
        for sample in samples:
            if (found := self._open.pop(sample, None)) is not None:
                self._groups[found.group].discard(sample)
                if not self._groups[found.group]:
                    del self._groups[found.group]

    @property
    def finished(self) -> bool:
        return self._ending.reached

    def silent_s(self, now: float) -> float:
        return max(0.0, now - self.told) if self.told else 0.0

    def stopped(self, now: float) -> bool:
        """True if the run seems to have been stopped. Never for real-time RL, which may be silent
        for hours between two updates."""
        if self._has_users:
            return False
        return not self.finished and self.silent_s(now) > STOPPED_S

    def waiting(self, now: float, reorder_window: int = 1) -> list[Waiting]:
        """Unfinished rollouts, the longest wait first. `reorder_window` is that of the stage."""
        stopped = self.stopped(now)
        running = {
            group: sum(not self._open[sample].ended for sample in samples)
            for group, samples in self._groups.items()
        }
        under_way = (
            each
            for each in self._open.values()  # in the order of issue
            if each.step is None and not each.ended and not each.is_of_user
        )
        oldest = next(under_way, None)
        behind = None if oldest is None else (oldest.group, oldest.slot + reorder_window)
        found = [
            Waiting(
                id=sample,
                task=each.task,
                group=each.group,
                waits_for=self._reason(each, running[each.group], stopped, behind),
                seconds=max(0.0, now - each.since),
            )
            for sample, each in self._open.items()
        ]
        return sorted(found, key=lambda each: -each.seconds)

    def _reason(
        self, each: _Open, running: int, stopped: bool, behind: tuple[str, int] | None
    ) -> str:
        """The reason in words. `behind` is the oldest group under way, with the first slot that may
        not overtake it."""
        if stopped:
            whole = each.step is not None or not running
            return "the run to resume" + ("" if whole else ", which issues its task again")
        if each.step is not None:
            return f"the trainer, for step {each.step}"
        if each.is_of_user:
            return "feedback from its user, until its horizon ends; then for a batch"
        if not each.ended:
            return "its own session, which is still running"
        if running:
            return "other attempts of its group, which are still running"
        if behind is not None and each.slot >= behind[1]:
            return f"the older group {behind[0]}, which is still running (reorder_window)"
        return "a batch: enough finished groups with signal"

    def advice(self, now: float) -> str | None:
        """Advice if the run seems to have been stopped."""
        if not self.stopped(now):
            return None
        return (
            f"no events for {clock(self.silent_s(now))}: the run was stopped or killed, or "
            "cannot reach its store; start it again with the same command"
        )


def summed_up(waiting: Sequence[Waiting]) -> list[tuple[str, int, float]]:
    """(reason, number of rollouts, longest wait in seconds), the most frequent first."""
    counts = Counter(each.waits_for for each in waiting)
    longest: dict[str, float] = {}
    for each in waiting:
        longest[each.waits_for] = max(longest.get(each.waits_for, 0.0), each.seconds)
    return [(reason, count, longest[reason]) for reason, count in counts.most_common()]
