"""`etude show`: a page about a run, or about a checkpoint and its lineage."""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from etude.core.alarms import SILENT, Alarm
from etude.core.errors import EtudeError
from etude.core.events import Launched
from etude.core.ledger import Batched
from etude.core.types import Json
from etude.core.updates import is_of_user
from etude.dash.reader import RunView, StoreCost
from etude.dash.session import said
from etude.launch import screen
from etude.launch.launcher import is_stopped
from etude.launch.place import RunPlace
from etude.launch.plan import plan
from etude.model.directory import MODEL_FILES
from etude.run.audit import Audit, audit, evaluated_versions, is_finished
from etude.run.evaluate import Report, reports
from etude.run.journal import group_of
from etude.run.task_record import recorded_counts
from etude.store import checkpoints
from etude.store.checkpoints import Checkpoint
from etude.store.rollouts import RolloutLog
from etude.store.runs import Run
from etude.store.telemetry import EventReader
from etude.weights.manifest import find_newest

T = TypeVar("T")

NAMED = 10
"""Limit on the damaged objects that are listed; of the others, only the number is."""


def show(path: str, console: Console, *, everything: bool = False) -> bool:
    """Show a run, given as its directory or URL, or a checkpoint, given as RUN/checkpoints/NAME.
    Returns False if a part of it is missing or damaged."""
    above, _, name = path.rstrip("/").rpartition("/checkpoints/")
    if above:
        run = RunPlace.of(above).open()
        if name not in run.checkpoints():
            there = ", ".join(run.checkpoints()) or "none"
            raise EtudeError(f"{path} is not a checkpoint: the run has {there}")
        _print(console, about_checkpoint(checkpoints.read(run, name), run))
        return True
    place = RunPlace.of(path)
    run = Run.open(place.store, create=False)
    if not run.objects.exists("config.json") and not _has_work(run):
        run.config()  # raises the error that this is not a run
    damage = find_damage(run)
    for line in damage[:NAMED]:
        console.print(Text(f"missing: {line}", style="red"), soft_wrap=True)
    if len(damage) > NAMED:
        console.print(Text(f"missing: {len(damage) - NAMED} more", style="red"))
    if damage:
        _print_rest(run, console)
    else:
        page(run, place, console, everything=everything)
    return not damage


def page(run: Run, place: RunPlace, console: Console, *, everything: bool = False) -> Audit:
    """Print state, scores, the outcome of the sessions, and alarms; with `everything` also the
    plan, an example session, and the lineage of the newest checkpoint."""
    config = run.config()
    found = reports(run)
    audited = audit(run)
    newest, saved = find_newest(run.objects), run.checkpoints()
    if everything:
        _print(console, plan(config, place, recorded=recorded_counts(run)) + "\n")
    finished, last = is_finished(run, config), max(evaluated_versions(config))
    state = _state(finished, newest.version if newest else None, last, place, _command(run))
    _print(console, f"{config.name} in {place}: {state}")
    if found:
        console.print(screen.results(found, evaluated_versions(config)))
    if everything:
        print_example(run, console)
    if everything and saved:
        _print(console, about_checkpoint(checkpoints.read(run, saved[-1]), run))
    _print(
        console,
        f"sessions: {audited.equation}; lag {audited.lag_max} at most, {audited.lag_bound} allowed",
    )
    stopped = is_stopped(place.directory)
    if stopped and audited.unended and config.realtime is None:
        _print(
            console,
            f"when the run resumes, the {audited.unended} in unfinished groups are dropped as "
            "interrupted, and their tasks are issued again",
        )
    if run.objects.is_bucket:
        _print(console, f"store: {store_cost(run)}")
    alarms = audited.alarms
    if (finished or stopped) and not everything:
        # the process has been heard again, or has ended
        alarms = [alarm for alarm in alarms if not alarm.name.startswith(SILENT)]
    for line in _alarm_lines(alarms, everything=everything):
        _print(console, line)
    return audited


def print_next(run: Run, place: RunPlace, console: Console) -> None:
    """Print the next commands for a finished run, each on a line that can be copied."""
    quoted = shlex.quote(str(place))
    commands = [
        f"dash {quoted}",
        f"sessions {quoted}",
        f"show {quoted} --all",
        f"audit {quoted}",
        *_comparison(run, place),
        f"weights export {quoted} {shlex.quote(f'{run.config().name}-trained')}",
    ]
    _print(console, "\n  etude ".join(["next steps:", *commands]))


def _comparison(run: Run, place: RunPlace) -> list[str]:
    """The commands that compare the first evaluated version with the newest. If only one version
    was evaluated, the initial model has to be evaluated first."""
    for split, option in (("heldout", []), ("novel", ["--split", "novel"])):
        versions = {report.version for report in reports(run) if report.split == split}
        if not any(versions):
            continue
        begun = ["eval", str(place), "--version", "0", *option]
        first = min(versions) if len(versions) > 1 else 0
        compared = ["compare", f"{place}@{first}", str(place), *option]
        words = [compared] if first in versions else [begun, compared]
        return [shlex.join(each) for each in words]
    return []


def store_cost(run: Run) -> StoreCost:
    """The cost of the run's bucket so far, from its own events."""
    view = RunView()
    for stamped in EventReader(run).new():
        view.apply(stamped.t, stamped.record)
    return view.store


def _command(run: Run) -> str:
    """The command that resumes the run: the last one given, in a form that works in any folder."""
    told = [
        stamped.record for stamped in EventReader(run).new() if isinstance(stamped.record, Launched)
    ]
    runs = [each for each in told if each.command and not each.command.startswith("etude eval")]
    if not runs:
        return "etude run FILE" if run.config().realtime is None else "etude realtime FILE"
    last, here = runs[-1], run.objects.url
    command = f"cd {shlex.quote(last.folder)} && {last.command}" if last.folder else last.command
    is_moved = last.store not in ("", here)
    return f"{command} --dir {shlex.quote(here.removeprefix('file:'))}" if is_moved else command


def _state(finished: bool, newest: int | None, last: int, place: RunPlace, command: str) -> str:
    version = f"newest version {'none' if newest is None else newest}"
    if finished:
        return f"finished; {version}"
    if is_stopped(place.directory):
        return f"stopped; {version} of {last}; resume with: {command}"
    running = "running" if (place.directory / "lock").exists() else "not finished"
    return f"{running}; {version} of {last}"


def _alarm_lines(alarms: Sequence[Alarm], *, everything: bool) -> Iterator[str]:
    """All alarms, or the newest of each kind."""
    if everything:
        yield from (f"alarm: {alarm}" for alarm in alarms)
        return
    counts = Counter(alarm.name for alarm in alarms)
    for name, alarm in {alarm.name: alarm for alarm in alarms}.items():
        often = f" ({counts[name]} times; this is the newest)" if counts[name] > 1 else ""
        yield f"alarm{often}: {alarm}"


def find_damage(run: Run) -> list[str]:
    """Missing or damaged objects, each with advice."""
    found: list[str] = []
    looked_at: set[str] = set()

    def read(get: Callable[[], T]) -> T | None:
        try:
            return get()
        except EtudeError as e:
            found.append(str(e))
            return None

    if not run.objects.exists("config.json"):
        found.append(
            f"{run.objects.url}: config.json is missing, and the run cannot resume without it: "
            "restore it from a backup"
        )
    else:
        read(run.config)
    found += _missing_files(run)
    read(lambda: find_newest(run.objects))
    for name in run.checkpoints()[-1:]:
        if (saved := read(lambda: checkpoints.read(run, name))) is not None:  # noqa: B023
            there = {part for of, part in run.checkpoint_parts() if of == name}
            found += [
                f"{run.objects.url}: checkpoints/{name}/{part} is missing, so the run cannot "
                "resume from this checkpoint: restore it from a backup, or delete the checkpoint "
                "to resume from the previous one"
                for part in saved.parts
                if part not in there
            ]
    for name in run.evals():
        read(lambda: run.eval(name, Report))  # noqa: B023
    for entry in read(run.ledger.records) or ():
        if isinstance(entry, Batched):
            read(lambda: run.batch(entry.step))  # noqa: B023
            # A user's session is in the store of production mode, not in a group.
            rollouts = (sample for sample in entry.samples if not is_of_user(sample))
            for group in {group_of(sample) for sample in rollouts} - looked_at:
                looked_at.add(group)
                read(lambda: run.group(group))  # noqa: B023
    read(RolloutLog(run.objects).rows)
    return found


def _missing_files(run: Run) -> list[str]:
    """Missing files of the model, if the run has work in its store. Without work, they may not have
    been written yet."""
    if not _has_work(run):
        return []
    return [
        f"{run.objects.url}: model/{name} is missing: restore it from a backup"
        for name in MODEL_FILES
        if not run.objects.exists(f"model/{name}")
    ]


def _has_work(run: Run) -> bool:
    return bool(run.checkpoints() or run.groups() or run.ledger.end())


def _print_rest(run: Run, console: Console) -> None:
    """Print the readable parts of a damaged run."""
    counts = {
        "checkpoints": len(run.checkpoints()),
        "groups": len(run.groups()),
        "batches": len(run.batches()),
        "evaluations": len(run.evals()),
    }
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    _print(console, f"there are {told}; `etude sessions` shows the sessions that are complete")
    if found := _whole_reports(run):
        console.print(screen.results(found))


def _whole_reports(run: Run) -> list[Report]:
    """The evaluation reports that can be read."""
    found = []
    for name in run.evals():
        with contextlib.suppress(EtudeError):
            found.append(run.eval(name, Report))
    return found


def about_checkpoint(checkpoint: Checkpoint, run: Run) -> str:
    made = f"version {checkpoint.version}" + (
        f" and {checkpoint.step} steps" if checkpoint.step else ""
    )
    size = run.checkpoint_bytes(checkpoint.name)
    ranks = f"{len(checkpoint.parts)} rank{'s' if len(checkpoint.parts) > 1 else ''}"
    lines = [f"checkpoint {checkpoint.name}: {made}, by {ranks}, {size / 1e6:.1f} MB; its lineage:"]
    for origin in checkpoint.lineage:
        told = ", ".join(f"{key} {value}" for key, value in origin.config.items() if key != "kind")
        lines += [
            f"  {origin.stage} from {origin.parent}",
            f"    data    {origin.data}",
            f"    config  {told}",
            f"    code    {origin.code}",
        ]
    return "\n".join(lines)


def print_example(run: Run, console: Console) -> None:
    """Print a solved session, if there is one."""
    if messages := solved_session(run, reports(run)):
        lines: list[RenderableType] = []
        for block in said(messages):
            text = block.text.replace("\n", "\n       ")
            style = {"model": "bold", "call": "bold", "user": "cyan"}.get(block.who, "dim")
            lines.append(Text(f"{block.who:<6} {text}", style=style))
        title = "a solved session"
        console.print(Panel(Group(*lines), title=title, title_align="left", expand=False))


def solved_session(run: Run, found: Sequence[Report]) -> list[Json]:
    """The messages of a session that is worth reading: from the last evaluation that solved any
    task, otherwise from training."""
    examples = (report.example for report in reversed(found) if report.example)
    trained = (
        t.messages
        for name in reversed(run.groups())
        for t in run.group(name).trajectories
        if t.reward == 1.0
    )
    return next(examples, None) or next(trained, [])


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
