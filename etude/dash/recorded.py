"""A run read from its store, in whatever state: dead, running or on another machine. Nothing is
written, and apart from events, ledger and rows everything is read on demand."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_args

from etude.core.alarms import Alarms
from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.events import AttemptDone, EvalDone, Event, Launched
from etude.core.ledger import Batched, Entry, Ledger, Unbalanced
from etude.core.stages import RolloutStageConfig
from etude.core.types import Trajectory
from etude.core.updates import is_of_user
from etude.dash.history import History
from etude.dash.reader import RunView
from etude.dash.session import CUT_SHORT
from etude.dash.table import RolloutTable, cause_of
from etude.dash.waits import Waits
from etude.store.codec import Stamped
from etude.store.log import Log
from etude.store.objects import Missing
from etude.store.rollouts import RolloutReader, RolloutRow
from etude.store.runs import Run
from etude.store.sessions import SessionReader
from etude.store.telemetry import EventReader

T = TypeVar("T")

FRESH_S = 0.4
"""Time for which everything read counts as fresh and is not read again."""
LOOK_S = 30.0
"""Time between two searches for missing objects."""


class RecordedRun:
    """A run's state and history from its store. `refresh` reads new events, entries and rows; it is
    the only method that changes anything but caches."""

    def __init__(self, name: str, run: Run, *, now: Callable[[], float] = time.time) -> None:
        self.name = name
        self.run = run
        self.view = RunView(alarms=Alarms(run.place))
        self.history = History()
        self.table = RolloutTable()
        self.ledger = Ledger()
        self.waits = Waits()
        self.revision = 0
        self.damage: list[str] = []
        self.now = now
        self.lock = threading.RLock()
        self._events = EventReader(run)
        self._rows = RolloutReader(run.objects)
        self.sessions = SessionReader(run)
        self._log: Log[Entry] = Log(
            run.objects, "ledger", get_args(Entry), durable=True, skipped=self._damaged
        )
        self._entered = 0
        self._batched: dict[int, frozenset[str]] = {}
        """Step -> the groups of its batch; sessions of users do not belong to a group."""
        self._config: RunConfig | None = None
        self._read: float | None = None
        self._looked: float | None = None
        self._missing: list[str] = []
        self._reports: dict[str, EvalDone] = {}
        self._causes: dict[str, tuple[str, str]] = {}
        self._memos: dict[str, tuple[int, Any]] = {}
        self._unsettled: set[str] = set()
        """Rollouts that are known only from their events."""

    def refresh(self) -> None:
        with self.lock:
            if self._read is not None and time.monotonic() < self._read + FRESH_S:
                return
            # An attempt is issued before it has events: read the events first, so that the ledger
            # contains all their attempts, and apply the ledger first.
            events = self._events.new()
            entries, self._entered = self._log.read(self._entered)
            rows = self._rows.new()
            self._enter(entries)
            self._apply(events)
            self.table.add(rows)
            self._unsettled -= {row.id for row in rows}
            self._settle()
            self.table.advance(self.ledger.trained_step)
            for each in (self._events.damaged, self._rows.damaged):
                while each:
                    self._damaged(each.pop(0))
            if events or entries or rows:
                self.revision += 1
            self._read = time.monotonic()

    def _damaged(self, e: EtudeError) -> None:
        self.damage.append(str(e))

    def _enter(self, entries: Sequence[Stamped[Entry]]) -> None:
        for stamped in entries:
            self.waits.enter(stamped.t, stamped.record)
            if isinstance(stamped.record, Batched):
                samples = stamped.record.samples
                groups = frozenset(group_of(each) for each in samples if not is_of_user(each))
                self._batched[stamped.record.step] = groups
            try:
                self.ledger.apply(stamped.record)
            except Unbalanced as e:
                self.damage.append(f"{self.run.objects.url}: the ledger does not balance: {e}")

    def _apply(self, events: Sequence[Stamped[Event]]) -> None:
        ended: list[RolloutRow] = []
        for stamped in events:
            begun = self.view.apply(stamped.t, stamped.record)
            self.history.apply(stamped.t, stamped.record, begun)
            self.waits.apply(stamped.t, stamped.record)
            if isinstance(stamped.record, Launched):
                self._config = None
            if isinstance(stamped.record, AttemptDone) and stamped.record.id not in self.table:
                ended.append(_of_event(stamped.record, self.view.stage))
        self.table.add(ended)
        self._unsettled |= {row.id for row in ended}

    def _settle(self) -> None:
        """Set the fate of rollouts without a stored row. Those of a group that was cut short never
        get one."""
        for id in list(self._unsettled):
            fate = self._fate(id)
            if fate is not None:
                self._unsettled.discard(id)
                row = self.row(id)
                step, dropped = (fate, None) if isinstance(fate, int) else (None, fate)
                self.table.add([replace(row, step=step, dropped=dropped)])

    def _fate(self, id: str) -> int | str | None:
        try:
            return self.ledger.fate(id)
        except KeyError:  # it belongs to an evaluation, or the entry that issued it is lost
            return None

    def memo(self, name: str, compute: Callable[[], T]) -> T:
        """The cached value of this name, computed again if anything new was read since."""
        found = self._memos.get(name)
        if found is None or found[0] != self.revision:
            found = self._memos[name] = (self.revision, compute())
        value: T = found[1]
        return value

    @property
    def config(self) -> RunConfig | None:
        """The run's configuration, which is written when a run is launched; None if it cannot be
        read."""
        if self._config is None:
            with contextlib.suppress(EtudeError):
                self._config = self.run.config()
        return self._config

    @property
    def reorder_window(self) -> int:
        """The reorder window of the current stage."""
        stages = config.stage if (config := self.config) else ()
        loops = (
            s for s in stages if isinstance(s, RolloutStageConfig) and s.name == self.view.stage
        )
        return next((stage.reorder_window for stage in loops), 1)

    @property
    def lag_bound(self) -> int:
        stages = config.stage if (config := self.config) else ()
        return max((s.max_lag for s in stages if isinstance(s, RolloutStageConfig)), default=0)

    def missing(self) -> list[str]:
        """Messages about missing or damaged objects of the run, as far as a listing shows them."""
        with self.lock:
            if self._looked is None or time.monotonic() > self._looked + LOOK_S:
                self._missing = list(self._look())
                self._looked = time.monotonic()
            return [*dict.fromkeys(self.damage), *self._missing]

    def evaluations(self) -> list[EvalDone]:
        """Evaluations by version: the reports, and events that came after the last search for
        reports. In older runs only reports contain the number of attempts at each task."""
        self.missing()
        reports = list(self._reports.values())
        known = {(each.version, each.split, each.solved, each.total) for each in reports}
        told = [
            each
            for each in self.history.evals
            if (each.version, each.split, each.solved, each.total) not in known
        ]
        return sorted([*reports, *told], key=lambda each: (each.version, each.samples))

    def _look_for_reports(self) -> None:
        for name in self.run.evals():
            if name not in self._reports:
                try:
                    self._reports[name] = self.run.eval(name, EvalDone)
                except EtudeError as e:
                    self._damaged(e)

    def _look(self) -> list[str]:
        self._look_for_reports()
        url, found = self.run.objects.url, []
        if self.config is None:
            try:
                self.run.config()
            except EtudeError as e:
                found.append(str(e))
        if (gap := self._log.lost()) is not None:
            found.append(str(gap))
        groups, batches = set(self.run.groups()), set(self.run.batches())
        lost = sorted(set().union(*self._batched.values()) - groups)
        if lost:
            found.append(f"{url}: {len(lost)} trained groups are missing, such as {lost[0]}")
        if gone := sorted(self._batched.keys() - batches):
            found.append(f"{url}: {len(gone)} batches are missing, such as that of step {gone[0]}")
        if groups and not self.run.objects.exists("model/tokenizer.json"):
            found.append(f"{url}: model/tokenizer.json is missing: tokens cannot be shown as text")
        return found

    def row(self, id: str) -> RolloutRow:
        if (row := self.table.get(id)) is None:
            raise Missing(f"{self.run.objects.url} has no session {id!r}")
        return row

    def session(self, id: str) -> Trajectory:
        """The whole session, with its tokens as far as they are stored."""
        return self.sessions.session(self._key(id), id)

    def conversation(self, id: str) -> Trajectory:
        key = self._key(id)
        for t in self.sessions.conversations(key, {id}):
            return t
        raise Missing(f"{self.run.objects.url}: {key} has no session {id!r}")

    def group(self, group: str) -> list[Trajectory]:
        return self.sessions.conversations(f"groups/{group}")

    def _key(self, id: str) -> str:
        row = self.row(id)
        key = row.object or f"groups/{row.group}"
        if row.object is None and not self.run.objects.exists(key):
            raise Missing(
                f"the conversation of {id} is not stored: groups are stored when all their "
                "attempts have ended"
                + (f", and this one was {row.dropped} before that" if row.dropped else "")
            )
        return key

    def causes(self, rows: Sequence[RolloutRow], budget_s: float) -> dict[str, tuple[str, str]]:
        """Id -> (cause by the evidence, last error of a tool), for as many of these rows as can be
        read within the budget; rows that were read before are cached."""
        until = time.monotonic() + budget_s
        unread: defaultdict[str, set[str]] = defaultdict(set)
        for row in rows:
            if row.id not in self._causes and row.object:
                unread[row.object].add(row.id)
        for key, ids in unread.items():
            if time.monotonic() >= until:
                break
            try:
                found = self.sessions.conversations(key, ids)
            except EtudeError as e:
                self._damaged(e)
                self._causes |= dict.fromkeys(ids, ("unreadable", ""))
                continue
            self._causes |= {t.id: (evidence_of(t), last_tool_error(t)) for t in found}
        return {row.id: self._causes[row.id] for row in rows if row.id in self._causes}


def group_of(sample: str) -> str:
    return sample.rpartition(".")[0]


def _of_event(event: AttemptDone, stage: str) -> RolloutRow:
    """The provisional row of a rollout that has ended. Its stored row is written when its group is
    settled."""
    return RolloutRow(
        id=event.id,
        task=event.task,
        kind=event.split,
        group=group_of(event.id),
        slot=None,
        stage=stage,
        status=event.status,
        error=event.error,
        reward=event.reward,
        parts={},
        flags=(),
        length=0,
        turns=0,
        versions=(),
        prompt_tokens=0,
        sampled_tokens=0,
        seconds=event.seconds,
        calls=0,
        source="",
        policy="",
        object=None,
    )


def evidence_of(t: Trajectory) -> str:
    """The reason why an attempt did not earn the full reward: its error, or else a line from the
    evidence of the first score part below 1, namely the last line about an error, or the first
    line if there is none."""
    if t.error is not None:
        return cause_of(t.error)
    parts = t.score.parts if t.score else ()
    for part in parts:
        if part.value < 1.0 and part.evidence.strip():
            lines = [line.strip() for line in part.evidence.strip().split("\n") if line.strip()]
            line = _last_wrong(lines) or lines[0]
            return cause_of(f"{part.name}: {line.rpartition('; its last words: ')[2]}")
    if t.status in CUT_SHORT:
        return CUT_SHORT[t.status]
    return "no evidence"


_WRONG = ("error", "traceback", "fail", "exception", "no such", "not found")
_OF_A_FILE = re.compile(r"\s*\d+\t")
"""A numbered line of a file, as the tool `read` prints it: "error" in it is not an error."""


_RAISED = re.compile(r"E   (AssertionError\b|[\w.]+(?:: .*)?$)")
"""A raised exception, as pytest prints it. The values that an assertion compared are not matched,
since they differ from test to test."""
_COUNTS = re.compile(r"\d+ (failed|errors?|passed)\b.* in [\d.]+s|!+ .* failures !+$")
"""The summary line of pytest, which counts failures without their reasons."""


def _last_wrong(lines: Iterable[str]) -> str:
    wrong = [line for line in lines if any(word in line.lower() for word in _WRONG)]
    raised = [found[1] for line in wrong if (found := _RAISED.match(line))]
    telling = [line for line in wrong if not _COUNTS.search(line)]
    return (raised or telling or wrong or [""])[-1]


def last_tool_error(t: Trajectory) -> str:
    """The last line about an error, from the last tool answer that has one; empty if none has."""
    for message in reversed(t.messages):
        if message.get("role") == "tool":
            text = str(message.get("content") or "").strip()
            lines = [line for line in text.split("\n") if not _OF_A_FILE.match(line)]
            if line := _last_wrong(lines):
                return cause_of(line)
    return ""


def clusters(causes: Sequence[tuple[str, str]], *, most: int = 20) -> list[dict[str, str | int]]:
    """Count equal causes, most frequent first."""
    counts = Counter(causes)
    return [
        {"evidence": evidence, "tool": tool, "count": count}
        for (evidence, tool), count in counts.most_common(most)
    ]
