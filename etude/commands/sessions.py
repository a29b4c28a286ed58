"""`etude sessions`: the conversations of agent and model in a run in any state, from its store
alone."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches

from rich.console import Console
from rich.text import Text

from etude.commands.terminal import say
from etude.core.errors import EtudeError, error_line
from etude.core.events import AttemptDone
from etude.core.ledger import Batched, Dropped, Entry, Reason, Trained
from etude.core.types import Status, Trajectory
from etude.dash.session import STATUS, Block, read_session
from etude.launch.launcher import is_stopped
from etude.launch.place import RunPlace
from etude.model.directory import MODEL_FILES
from etude.model.tokenizer import ChatTokenizer
from etude.store.rollouts import RolloutLog, RolloutRow, group_rows
from etude.store.runs import Run
from etude.store.sessions import SessionReader
from etude.store.telemetry import EventReader

LISTED = 20
"""Number of sessions in the table."""
ERROR_WIDTH = 100
"""Characters of an error in the table; the session below shows all of it."""
NEAREST = 5
"""Number of similar names to suggest for a name that was not found."""
STYLES = {
    "user": "cyan",
    "model": "bold",
    "call": "bold yellow",
    "score": "green",
    "error": "red",
    "timed out": "red",
    "truncated": "red",
}
UNDER_WAY, STOPPED = "under way", "stopped"
ENDED_EARLY: tuple[Reason, ...] = ("interrupted", "cancelled")
"""Outcomes of sessions whose group never ended: a stop cut it short, or the last step was completed
without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One session as a line of the table."""

    id: str
    task: str
    split: str
    status: Status
    reward: float | None
    error: str | None
    seconds: float
    t: float = 0.0
    """Time at which it ended; 0 if unknown, since no event was recorded."""
    turns: int | None = None
    became: str = UNDER_WAY
    """Its use: trained on, dropped, or not decided yet; or the run stopped before its group had
    ended."""
    object: str | None = None
    """The object that contains its conversation; None if its group has not ended, or never did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A selection of sessions: which to list, and how many to show in full."""

    failed: bool = False
    best: bool = False
    task: str | None = None
    id: str | None = None
    count: int = 1

    def of(self, found: Sequence[Session]) -> list[Session]:
        """The selected sessions, the newest or the best first."""
        chosen = [
            each
            for each in found
            if (not self.failed or each.status == "failed")
            and (not self.best or each.reward is not None)
            and self.task in (None, each.task)
            and self.id in (None, each.id)
        ]
        chosen.sort(key=lambda each: (each.t, each.id), reverse=True)
        if self.best:
            chosen.sort(key=lambda each: -(each.reward or 0.0))
        return chosen


def sessions(directory: str, console: Console, choice: Choice, *, as_json: bool) -> None:
    run = Run.open(directory, create=False)
    found, damage = find_sessions(run)
    if is_stopped(RunPlace.of(directory).directory):
        found = [replace(e, became=STOPPED) if e.became == UNDER_WAY else e for e in found]
    for line in damage:
        console.print(f"damaged: {line}", highlight=False, markup=False, style="red")
    if not found:
        run.check_is_run()
        raise EtudeError(f"{directory} has no sessions yet: evaluations and rl create them")
    chosen = choice.of(found)
    if not chosen and choice.failed:
        console.print(f"none of the {len(found)} sessions failed", highlight=False)
        return
    if not chosen:
        raise EtudeError(_nothing_found(directory, choice, found))
    # a session whose group never ended has no stored conversation
    wholes = ([each for each in chosen if each.object] or chosen)[: choice.count]
    stored = SessionReader(run)
    if as_json:
        for each in wholes:
            print(json.dumps({**asdict(each), "session": _as_json(whole(stored, each))}))
        return
    _print_table(chosen, len(found), console)
    decode = _decoder(run)
    for each in wholes:
        _print_whole(each, whole(stored, each), decode, console)


def _nothing_found(directory: str, choice: Choice, found: Sequence[Session]) -> str:
    if wanted := choice.id or choice.task:
        what = "session" if choice.id else "task"
        names = sorted({each.id if choice.id else each.task for each in found})
        near = ", ".join(get_close_matches(wanted, names, n=NEAREST, cutoff=0.0))
        return (
            f"{directory} has no {what} {wanted}: the closest of {len(names)} are {near}; `etude "
            f"sessions {shlex.quote(directory)}` lists the newest"
        )
    return f"none of the {len(found)} sessions of {directory} has a reward yet"


def find_sessions(run: Run) -> tuple[list[Session], list[str]]:
    """All sessions, and the parts that cannot be read. Sessions come from the rows of settled ones,
    from groups that are not settled, and otherwise from events."""
    found: dict[str, Session] = {}
    damage: list[str] = []
    events = EventReader(run)
    ended = [
        (stamped.t, stamped.record)
        for stamped in events.new()
        if isinstance(stamped.record, AttemptDone)
    ]
    times = {event.id: t for t, event in ended}
    damage += map(str, events.damaged)

    def add(rows: Sequence[RolloutRow]) -> None:
        found.update((row.id, _of_row(row, times.get(row.id, 0.0))) for row in rows)

    def read(add_some: Callable[[], None]) -> None:
        try:
            add_some()
        except EtudeError as e:
            damage.append(str(e))

    fates: dict[str, str] = {}
    read(lambda: fates.update(_fates(run.ledger.records())))
    read(lambda: add(RolloutLog(run.objects).rows()))
    listed = {each.object for each in found.values()}
    for name in run.groups():
        if f"groups/{name}" not in listed:
            read(lambda: add(group_rows(run.group(name))))  # noqa: B023 (called at once)
    for t, event in ended:
        if event.id not in found or found[event.id].object is None:
            found[event.id] = _of_event(t, event)
    settled = (replace(each, became=fates.get(each.id, each.became)) for each in found.values())
    return list(settled), damage


def _fates(entries: Sequence[Entry]) -> dict[str, str]:
    """The outcome of each settled sample, from the ledger. Rows also contain it, but the rows of a
    group are written only with the next batch, and do not tell whether the step is done."""
    trained = max((entry.step for entry in entries if isinstance(entry, Trained)), default=0)
    found: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry, Batched):
            is_done = entry.step <= trained
            became = f"step {entry.step}" if is_done else f"in step {entry.step}, not done yet"
            found.update((sample, became) for sample in entry.samples)
        elif isinstance(entry, Dropped):
            found.update((sample, entry.label) for sample in entry.samples)
    return found


def _of_row(row: RolloutRow, t: float) -> Session:
    became = f"step {row.step}" if row.step is not None else row.dropped
    return Session(
        id=row.id,
        task=row.task,
        split=row.kind,
        status=row.status,
        reward=row.reward,
        error=row.error,
        seconds=row.seconds,
        t=t,
        turns=row.turns,
        became=became or ("waits" if row.kind == "train" else "evaluation"),
        object=row.object,
    )


def _of_event(t: float, event: AttemptDone) -> Session:
    return Session(
        id=event.id,
        task=event.task,
        split=event.split,
        status=event.status,
        reward=event.reward,
        error=event.error,
        seconds=event.seconds,
        t=t,
        became=UNDER_WAY if event.split == "train" else "evaluation",
    )


def whole(stored: SessionReader, session: Session) -> Trajectory | None:
    """The stored trajectory of a session; None if it was not stored."""
    return None if session.object is None else stored.session(session.object, session.id)


def _decoder(run: Run) -> Callable[[Sequence[int]], str] | None:
    """The decoder of the run's tokenizer; None if the model files are missing."""
    try:
        files = {name: run.objects.get_sealed(f"model/{name}") for name in MODEL_FILES}
    except EtudeError:
        return None
    return ChatTokenizer(files).decode


def _print_table(chosen: Sequence[Session], total: int, console: Console) -> None:
    shown = chosen[:LISTED]
    like = f" that match (of {total})" if len(chosen) < total else ""
    console.print(f"{len(shown)} of {len(chosen)} sessions{like}", style="bold", highlight=False)
    head = ("session", "task", "split", "ended", "reward", "turns", "seconds", "became", "error")
    rows = [
        (
            each.id,
            each.task,
            each.split,
            STATUS[each.status],
            "" if each.reward is None else f"{each.reward:.2f}",
            "" if each.turns is None else str(each.turns),
            f"{each.seconds:.1f}",
            each.became,
            textwrap.shorten(error_line(each.error or ""), ERROR_WIDTH, placeholder=" ..."),
        )
        for each in shown
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    widths[-1] = 0  # the rest of the line
    for row in (head, *rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        text = Text(line.rstrip(), style="dim" if row is head else "red" if row[-1] else "")
        say(console, text, indent=4)


def _print_whole(
    session: Session,
    trajectory: Trajectory | None,
    decode: Callable[[Sequence[int]], str] | None,
    console: Console,
) -> None:
    console.print()
    console.rule(Text(f"{session.id}, {session.split} task {session.task}"), align="left")
    if trajectory is None:
        told = session.error or f"{STATUS[session.status]}, reward {session.reward}"
        whole_of = "group" if session.split == "train" else "evaluation"
        why = f"its conversation is stored when all sessions of its {whole_of} have ended"
        if session.became in ENDED_EARLY:
            why = f"its conversation is not stored: its group was {session.became}"
        if session.became == STOPPED:
            why = "its conversation is not stored: the run stopped before its group had ended"
        if session.split != "train" and session.status == "failed":
            why = "its conversation is not stored: evaluations retry failed sessions"
        blocks = [Block("error" if session.error else "score", told), Block("note", why)]
    else:
        blocks = read_session(trajectory, decode)
    for block in blocks:
        first, *others = Text(block.text, STYLES.get(block.who, "")).split("\n", allow_blank=True)
        say(console, Text.assemble((f"{block.who:<9} ", "dim"), first), indent=10)
        for other in others:
            say(console, Text(" " * 10).append_text(other))


def _as_json(trajectory: Trajectory | None) -> object:
    """The trajectory without its tokens, which are useless without the tokenizer."""
    if trajectory is None:
        return None
    return {
        "messages": trajectory.messages,
        "score": None if trajectory.score is None else asdict(trajectory.score),
        "traceback": trajectory.traceback,
        "cost": asdict(trajectory.cost),
    }
