"""`etude compare`: an evaluated version against another, or against several seeds of it, on the
tasks that all of them have tried."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from etude.core.errors import EtudeError
from etude.core.statistics import PairedComparison, compare_paired
from etude.core.types import Json
from etude.dash.page import share
from etude.launch.place import RunPlace
from etude.run.evaluate import Report, cut_after, reports

FEWEST_TASKS = 6
"""With fewer tasks, no difference is significant: p of the sign-flip test is at least 2 /
2**tasks."""


def compare(
    before: str, after: Sequence[str], split: str, console: Console, *, turns: int | None = None
) -> dict[str, Json]:
    """Show the comparison, and return the data for `--json`. Each side is a run's directory,
    optionally with `@VERSION`; without it, the newest evaluated version is used. If the second side
    has several runs, such as seeds of one recipe, their mean at each task is compared. With
    `turns`, attempts of more turns count as not solved."""
    if twice := next((side for side in after if after.count(side) > 1), None):
        raise EtudeError(f"{twice} is given twice: leave one out")
    sides = {side: find_report(side, split, turns) for side in (before, *after)}
    first, *others = [sides[side] for side in (before, *after)]
    for side, report in sides.items():
        if (report.samples == 1) != (first.samples == 1):
            raise EtudeError(
                f"{before} was evaluated with {first.samples} attempts per task, {side} with "
                f"{report.samples}: a single attempt is sampled at another temperature than "
                "several; evaluate both alike (etude eval --samples N)"
            )
    tried = [report.solved_by_task for report in (first, *others)]
    if not (common := sorted(set.intersection(*map(set, tried)))):
        named = " and ".join(sides)
        raise EtudeError(f"{named} have no {split} task in common: there is nothing to compare")
    seeds = len(others)
    attempts = math.lcm(*(report.samples for report in sides.values()))

    def solved(report: Report, task: str) -> int:
        """Number of solved attempts, scaled to `attempts`."""
        return report.solved_by_task[task] * attempts // report.samples

    found = compare_paired(
        {task: seeds * solved(first, task) for task in common},
        {task: sum(solved(report, task) for report in others) for task in common},
        seeds * attempts,
    )
    left_out = len(set.union(*map(set, tried))) - len(common)
    console.print(table([(before, first), *zip(after, others, strict=True)]))
    is_exact = seeds == 1 and first.samples == others[0].samples
    console.print(verdict(found, left_out, is_exact))
    if turns is not None:
        console.print(
            f"attempts with more than {turns} answers of the model count as unsolved; tokens, "
            "seconds and calls include the whole attempts"
        )
    if first in others:
        console.print(
            f"both sides are the same evaluation, of version {first.version}: name another @VERSION"
        )
    if seeds > 1:
        console.print(
            f"mean of {seeds} seeds for each task; the interval and p-value are over tasks"
        )
    fields = ("num_tasks", "before", "after", "difference", "low", "high", "p_value")
    told = {name: getattr(found, name) for name in (*fields, "gained", "lost")}
    return told if turns is None else {**told, "turns": turns}


def find_report(side: str, split: str, turns: int | None = None) -> Report:
    """The evaluation of `RUN[@VERSION]`, by default of the newest version; the one with the most
    attempts."""
    # a parent folder may contain an @ too, such as the home of ada@example.com
    path, _, wanted = side.rpartition("@") if "@" in side.rpartition("/")[2] else (side, "", "")
    run = RunPlace.of(path).open()
    found = [report for report in reports(run) if report.split == split]
    if wanted:
        if not wanted.isdecimal():
            raise EtudeError(f"{side}: {wanted!r} is not a version; write RUN@NUMBER")
        found = [report for report in found if report.version == int(wanted)]
    if not found:
        option = f" --version {wanted}" if wanted else ""
        raise EtudeError(
            f"{side} has no evaluation on {split} tasks; run one: etude eval {path}{option} "
            f"--split {split}"
        )
    best = max(found, key=lambda report: (report.version, report.samples))
    return best if turns is None else cut_after(best, run.eval_sessions(best.name), turns)


def table(sides: Sequence[tuple[str, Report]]) -> Table:
    """Solve rate and cost of each side, one side per row."""
    made = Table(title="tasks solved (95 % interval), and cost of an attempt", title_justify="left")
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


def verdict(found: PairedComparison, left_out: int, is_exact: bool) -> str:
    """The result in words. `is_exact`: both sides made equally many attempts, so the sign-flip test
    is exact."""
    points = [100 * each for each in (found.difference, found.low, found.high)]
    interval = (
        f"95 % interval {points[1]:+.1f} to {points[2]:+.1f}"
        if found.num_tasks >= FEWEST_TASKS
        else f"too few tasks for an interval (at least {FEWEST_TASKS} needed)"
    )
    test = "exact sign-flip test" if is_exact else "sign-flip test"
    lines = [
        f"difference: {points[0]:+.1f} points, {interval}",
        f"p = {found.p_value:.2g} ({test} over {found.num_tasks} tasks)",
        f"{found.gained} tasks solved more often, {found.lost} less often",
    ]
    if left_out:
        lines.append(f"{left_out} tasks left out that were not attempted on every side")
    return "\n".join(lines)
