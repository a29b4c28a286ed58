"""`etude compare`: two evaluated versions, of one run or of two, on the tasks both have tried."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from etude.core.errors import EtudeError
from etude.core.statistics import PairedComparison, compare_paired
from etude.core.types import Json
from etude.dash.page import share
from etude.launch.place import RunPlace
from etude.run.evaluate import Report, reports

FEWEST_TASKS = 6
"""With fewer, no difference is significant: p of the sign-flip test is at least 2 / 2**tasks."""


def compare(before: str, after: str, split: str, console: Console) -> dict[str, Json]:
    """Show the comparison, and return what `--json` prints. Each side is a run's directory, with
    `@VERSION` for another version than the newest that was evaluated."""
    first, second = find_report(before, split), find_report(after, split)
    if first.samples != second.samples:
        raise EtudeError(
            f"{before} was evaluated with {first.samples} attempts at each task, {after} with "
            f"{second.samples}: evaluate both alike (etude eval --samples N)"
        )
    there, here = first.solved_by_task, second.solved_by_task
    if not (common := sorted(there.keys() & here.keys())):
        raise EtudeError(f"{before} and {after} have no {split} task in common: nothing to compare")
    found = compare_paired(
        {task: there[task] for task in common},
        {task: here[task] for task in common},
        first.samples,
    )
    left_out = len(there.keys() | here.keys()) - len(common)
    console.print(table([(before, first), (after, second)]))
    console.print(verdict(found, left_out))
    if first == second:
        console.print(f"both are one evaluation, of version {first.version}: name another @VERSION")
    fields = ("num_tasks", "before", "after", "difference", "low", "high", "p_value")
    return {name: getattr(found, name) for name in (*fields, "gained", "lost")}


def find_report(side: str, split: str) -> Report:
    """The evaluation with the most attempts of the version that `RUN[@VERSION]` names."""
    path, _, wanted = side.rpartition("@") if "@" in side else (side, "", "")
    run = RunPlace.of(path).open()
    found = [report for report in reports(run) if report.split == split]
    if wanted:
        if not wanted.isdecimal():
            raise EtudeError(f"{side}: {wanted!r} is no version; write RUN@NUMBER")
        found = [report for report in found if report.version == int(wanted)]
    if not found:
        option = f" --version {wanted}" if wanted else ""
        raise EtudeError(
            f"{side} has no evaluation on {split} tasks. Make one: "
            f"etude eval {path}{option} --split {split}"
        )
    return max(found, key=lambda report: (report.version, report.samples))


def table(sides: Sequence[tuple[str, Report]]) -> Table:
    """Quality beside cost, one side a row."""
    made = Table(
        title="tasks solved (95 % interval), and what an attempt used", title_justify="left"
    )
    for name in ("", "version", "solved", "sampled tokens", "seconds", "calls"):
        made.add_column(name, justify="left" if name in ("", "solved") else "right")
    for name, report in sides:
        cost, total = report.cost, report.total
        made.add_row(
            name,
            str(report.version),
            share(report.solved, total, report.low, report.high),
            f"{cost.sampled_tokens / total:.0f}",
            f"{cost.seconds / total:.1f}",
            f"{cost.calls / total:.1f}",
        )
    return made


def verdict(found: PairedComparison, left_out: int) -> str:
    points = [100 * each for each in (found.difference, found.low, found.high)]
    interval = (
        f"95 % interval {points[1]:+.1f} to {points[2]:+.1f}"
        if found.num_tasks >= FEWEST_TASKS
        else f"of too few tasks for an interval ({FEWEST_TASKS} at least)"
    )
    lines = [
        f"difference: {points[0]:+.1f} points, {interval}",
        f"p = {found.p_value:.2g} (exact sign-flip test over {found.num_tasks} tasks)",
        f"{found.gained} tasks solved more often, {found.lost} less often",
    ]
    if left_out:
        lines.append(f"{left_out} tasks that only one of them has tried are left out")
    return "\n".join(lines)
