"""`etude realtime`: train the model of a run on its users, and the commands that control this."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from etude.commands.run_file import read_run_file
from etude.commands.terminal import say
from etude.core import traffic
from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.ledger import Ledger
from etude.core.traffic import Change
from etude.core.updates import versions_that_saw
from etude.launch.check import check_start
from etude.launch.launcher import is_stopped
from etude.launch.place import RunPlace
from etude.launch.realtime import check_realtime, described, execute
from etude.launch.screen import print_line
from etude.realtime.cycle import (
    AwaitVersion,
    Collect,
    Compare,
    Done,
    Evaluate,
    Gate,
    Held,
    Next,
    Refuse,
    Start,
)
from etude.run.realtime_process import open_loop, realtime_settings
from etude.store.realtime import TrafficLog, UpdateLog
from etude.store.runs import Run

TRIES = 10
SHOWN = 20


def decide(run: Run, make: Callable[[Change], Change], console: Console) -> int:
    """Enter a person's decision. If the loop enters one at the same time, the decision is made
    again from the new state."""
    log = TrafficLog(run.objects)
    for _ in range(TRIES):
        last = log.newest()
        if last is None:
            raise _not_started(run)
        try:
            change = make(last)
        except ValueError as e:
            raise EtudeError(str(e)) from e
        if log.append(change):
            print_line(console, described(change))
            return 0
    raise EtudeError(f"{run.objects.url}: other processes keep changing the traffic; try again")


def _not_started(run: Run) -> EtudeError:
    return EtudeError(
        f"{run.objects.url}: no version has been given to users yet: start `etude realtime` first"
    )


def stop(run: Run, console: Console) -> int:
    """Stop training and deployment until `resume`; users are still served."""
    return decide(run, lambda last: traffic.hold(last, time.time(), "stopped by hand"), console)


def resume(run: Run, console: Console) -> int:
    return decide(run, lambda last: traffic.resume(last, time.time()), console)


def rollback(run: Run, console: Console) -> int:
    """Return users to the previous version; then as `stop`."""
    why = "rolled back by hand"
    return decide(run, lambda last: traffic.roll_back(last, time.time(), why, held=True), console)


def pin(run: Run, console: Console, version: int | None) -> int:
    """Keep users on a version, by default the live one; otherwise as `stop`."""

    def pinned(last: Change) -> Change:
        wanted = last.traffic.version if version is None else version
        return traffic.pin(last, wanted, time.time())

    return decide(run, pinned, console)


def status(run: Run, console: Console) -> int:
    """Show the changes so far, the next action, and the outcome of the sessions."""
    config = run.config()
    realtime_settings(config)
    changes = TrafficLog(run.objects).changes()
    for change in changes[-SHOWN:]:
        print_line(console, described(change))
    with contextlib.suppress(EtudeError):  # the file of production mode may be on another machine
        print_line(console, f"next: {in_words(open_loop(run, config).next())}")
    ledger = Ledger(run.ledger.records())
    dropped = ", ".join(f"{count} {why}" for why, count in sorted(ledger.dropped.items()))
    print_line(
        console,
        f"{ledger.issued} sessions = {ledger.trained} trained + {ledger.dropped.total()} dropped "
        f"({dropped or 'none'}) + {ledger.in_flight} pending",
    )
    log = UpdateLog(run)
    bases = {step: record.base for step, record in log.records().items()}
    for forgotten in log.forgotten():
        seen = ", ".join(map(str, versions_that_saw(forgotten.steps, bases))) or "none"
        print_line(console, f"deleted user {forgotten.user}: seen by versions {seen}")
    return 0


def compare(run: Run, console: Console) -> int:
    """Show the effect of all updates together: users against those held out."""
    if TrafficLog(run.objects).newest() is None:
        raise _not_started(run)
    figures = open_loop(run, run.config()).against_heldout()
    if not figures:
        console.print("too few users on either side so far, or no update is live", highlight=False)
    for each in figures:
        console.print(
            f"{each.metric.name}: {100 * each.candidate:.1f} % of users, {100 * each.live:.1f} % "
            f"of held-out users; a gain of {100 * each.gain:+.1f} points ({100 * each.low:+.1f} "
            f"to {100 * each.high:+.1f}, valid at every look)",
            highlight=False,
            soft_wrap=True,
        )
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a start on the command line."""

    dir: str | None
    set: Sequence[str]
    once: bool
    dry_run: bool


def start(file: Path, options: Options, console: Console, *, resume: str) -> int:
    """Serve users and learn from them, starting or resuming the run of this file."""
    config = read_run_file(file, options.set)
    realtime_settings(config)
    place = RunPlace.of(options.dir or config.store or f"runs/{config.name}")
    if options.dry_run:
        return plan(config, place, console)
    if anew := place.begins_anew(config.name, file.parent, fresh=False):
        say(console, anew, indent=2)
    try:
        execute(config, place, console, resume=resume, once=options.once)
    except KeyboardInterrupt as e:
        e.add_note(f"the run is in {place.absolute}")
        raise
    return 0


def in_words(action: Next) -> str:
    """The next action of the loop in words."""
    match action:
        case AwaitVersion(version):
            return f"version {version} is being trained"
        case Start(version):
            return f"users will be given version {version}"
        case Collect(step, base):
            return f"sessions are being collected for version {step}, based on version {base}"
        case Evaluate(version):
            return f"version {version} is evaluated on held-out tasks and probes"
        case Refuse(version, why):
            return f"version {version} is refused: {why}"
        case Gate(candidate, live):
            return f"the gate decides about version {candidate}, against version {live}"
        case Compare(new, old):
            return f"version {new} is compared with version {old} on what users do"
        case Held(why):
            return f"nothing, until `etude realtime resume`: {why}"
        case Done():
            return "nothing: all steps of the stage are done"


def plan(config: RunConfig, place: RunPlace, console: Console) -> int:
    """Show what the loop would do next, without doing it. Unless it is running now, first check
    everything that could prevent a start."""
    realtime = realtime_settings(config)
    if is_stopped(place.directory) or not (place.directory / "lock").exists():
        check_realtime(config, realtime)
        findings = check_start(config, place, look=True)
        assert findings is not None
        if (there := findings.tasks["heldout"]) < config.tasks.heldout:
            print_line(
                console,
                f"warning: there are only {there} of the {config.tasks.heldout} held-out tasks "
                "asked for: with too few, nothing is deployed (docs/realtime.md)",
            )
    run = place.find()
    if run is None or TrafficLog(run.objects).newest() is None:
        print_line(console, f"{place.absolute}: no version has been given to users yet")
    else:
        loop = open_loop(run, config)
        action = loop.next()
        print_line(console, f"next: {in_words(action)}")
        if isinstance(action, Collect):
            found = loop.sort_out(action.base, loop.last.traffic)
            print_line(console, loop.settled(action.step, found))
            for entry in found.dropped:
                console.print(
                    f"would be dropped: {entry.label} {len(entry.samples)}", highlight=False
                )
    canary = realtime.canary
    console.print(
        f"an update every {realtime.every_minutes:g} min or more, from {realtime.min_sessions} "
        f"sessions that are settled after {realtime.horizon_minutes:g} min; then "
        f"{config.tasks.heldout} held-out tasks (margin {realtime.gate.margin:g}), then "
        f"{', '.join(f'{100 * share:g} %' for share in canary.ramp)} of users",
        highlight=False,
        soft_wrap=True,
    )
    return 0
