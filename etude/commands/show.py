"""`etude show`: a page about a run, or about a checkpoint and the lineage that led to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from etude.core.errors import EtudeError
from etude.core.types import Json
from etude.launch import screen
from etude.launch.local import RunDirectory, plan
from etude.run.audit import Audit, audit, is_finished
from etude.run.evaluate import Report, reports
from etude.store import checkpoints
from etude.store.checkpoints import Checkpoint
from etude.store.runs import Run
from etude.weights.manifest import find_newest


def show(path: Path, console: Console) -> None:
    """`path` is a run's directory, or that of a checkpoint within: RUN/checkpoints/NAME."""
    if path.parent.name == "checkpoints":
        run = RunDirectory(path.parent.parent).open()
        if path.name not in run.checkpoints():
            there = ", ".join(run.checkpoints()) or "none"
            raise EtudeError(f"{path} is no checkpoint: the run has {there}")
        _print(console, about_checkpoint(checkpoints.read(run, path.name), run))
    else:
        place = RunDirectory(path)
        page(place.open(), place, console)


def page(run: Run, place: RunDirectory, console: Console) -> Audit:
    """Print stages, scores, a session, where the newest weights come from, and the audit."""
    config, found, audited = run.config(), reports(run), audit(run)
    newest, saved = find_newest(run.objects), run.checkpoints()
    _print(console, plan(config, place))
    state = "finished" if is_finished(run, config) else "not finished"
    _print(console, f"\n{state}; newest version {'none' if newest is None else newest.version}")
    if found:
        console.print(screen.results(found))
    if example := solved_session(run, found):
        console.print(screen.session(example))
    if saved:
        _print(console, about_checkpoint(checkpoints.read(run, saved[-1]), run))
    _print(
        console, f"{audited.equation}; lag {audited.lag_max} at most, {audited.lag_bound} allowed"
    )
    for alarm in audited.alarms:
        _print(console, f"alarm: {alarm}")
    return audited


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


def solved_session(run: Run, found: Sequence[Report]) -> list[Json]:
    """One that a person can learn from: of the last evaluation that solved any task, otherwise of
    training."""
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
