"""The terminal view of a run. It reads the events in the store, and nothing depends on it.

On a terminal it is a page that redraws itself; otherwise plain lines, one for each noteworthy
event. `dash.page` decides on the content; this module lays it out in the available space.
"""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Awaitable, Collection, Sequence
from itertools import zip_longest
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from etude.core.alarms import Alarms
from etude.core.errors import error_line
from etude.core.events import AttemptDone
from etude.dash.page import (
    Curve,
    Line,
    Page,
    Progress,
    Teller,
    beginning,
    clock,
    describe,
    share,
    when,
)
from etude.dash.plot import plot
from etude.dash.reader import RunView
from etude.dash.session import STATUS
from etude.run.evaluate import Report
from etude.store.runs import Run
from etude.store.telemetry import EventReader, flush_s

LABEL = 15
"""Columns for the names of lines."""
WIDE = 150
"""The number of columns from which the newest sessions appear next to the lines."""
PLOT_WIDTH = 39
PLOT_HEIGHTS = (5, 16)
"""Rows of a plot: with fewer there is none, and more are not used."""
LEGEND_LINES = 2
BAR = 30
STYLES = {"": "", "good": "green", "bad": "bold red", "dim": "dim"}


async def watch(run: Run, console: Console, *, title: str, lag_bound: int) -> None:
    """Show the run until cancelled."""
    events, view = EventReader(run), RunView(alarms=Alarms(run.place))
    for stamped in await asyncio.to_thread(events.new):  # events before this screen started
        view.apply(stamped.t, stamped.record)
    if not console.is_terminal:
        teller = Teller()
        print_line(console, f"{title}: {beginning(view)}")
        while True:
            for stamped in await asyncio.to_thread(events.new):
                begun = view.apply(stamped.t, stamped.record)
                for line in teller.tell(stamped.t, stamped.record, view, begun):
                    print_line(console, line)
            _tell_damage(events, console)
            await asyncio.sleep(flush_s(run))
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            for stamped in await asyncio.to_thread(events.new):
                view.apply(stamped.t, stamped.record)
            _tell_damage(events, console)
            live.update(draw(view, title, lag_bound, console.width, console.height), refresh=True)
            await asyncio.sleep(flush_s(run))


async def while_read(watching: Awaitable[None], block: asyncio.Task[Any] | None) -> None:
    """Watch; a pipe that nobody reads any more ends the block, as it ends any program."""
    try:
        await watching
    except BrokenPipeError:
        assert block is not None
        block.cancel()
        raise


def _tell_damage(events: EventReader, console: Console) -> None:
    while events.damaged:
        print_line(console, f"alarm: {events.damaged.pop(0)}: its events are left out")


def print_line(console: Console, line: str) -> None:
    """Print a line without wrapping it, so that it can be copied and pasted."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def draw(
    view: RunView, title: str, lag_bound: int, width: int = 80, height: int = 24
) -> RenderableType:
    elapsed = view.now - view.began if view.began is not None else 0.0
    lines = layout(describe(view, lag_bound), title, elapsed, width, height - 1)
    return Group(*lines)


def layout(page: Page, title: str, elapsed_s: float, width: int, height: int) -> list[Text]:
    """The page in this many columns and at most this many lines."""
    top = [Text(_first_line(title, elapsed_s, width), style="reverse", no_wrap=True)]
    top += _labelled(page.headline, width, bold=True, most=4)
    if page.advice:
        top += _labelled(Line("what to do", page.advice), width, most=3)
    for alarm in page.alarms:
        top += _labelled(Line("alarm", str(alarm), "bad"), width, most=3 if height < 40 else 5)
    top += [_bar(progress, width) for progress in page.progress]

    body = _body(page, width)
    room = height - len(top) - len(body) - 1
    low, high = PLOT_HEIGHTS
    plots: list[Text] = []
    if page.curves and room > low:
        plots = _plots(page.curves, width, min(high, max(low, room - 2 - LEGEND_LINES)))
        room -= len(plots) + 1
    legend = _legend(page.legend, width, room - 1)
    blocks = [block for block in (top, body, plots, legend) if block]
    spaced = [line for block in blocks for line in (Text(""), *block)][1 : height + 1]
    for line in spaced:
        line.truncate(width)
    return spaced


def _first_line(title: str, elapsed_s: float, width: int) -> str:
    """The title, the time and how to stop. A title that is too long keeps its end, the most
    informative part of a path."""
    right = f"{clock(elapsed_s)} · Ctrl-C stops"
    more = ", the same command resumes"
    if len(title) + len(right + more) < width:
        right += more
    room = width - len(right) - 1
    if len(title) > room:
        named, dot, path = title.rpartition(" · ")
        title = f"{named}{dot}…{path[len(title) - room + 1 :]}"
    return title.ljust(width - len(right)) + right


def _body(page: Page, width: int) -> list[Text]:
    if width < WIDE or not page.sessions:
        return [text for line in page.lines for text in _labelled(line, width)]
    half = width // 2
    left = [text for line in page.lines for text in _labelled(line, half - 2, most=3)]
    right = _sessions(page.sessions, width - half)
    rows = [text or Text("") for text, _ in zip_longest(left, right)]
    for text, beside in zip(rows, right, strict=False):
        text.pad_right(half - len(text.plain))
        text.append_text(beside)
    return rows


def _labelled(line: Line, width: int, *, bold: bool = False, most: int = 2) -> list[Text]:
    """A line with its name, wrapped, and cut off after `most` lines."""
    style = STYLES[line.tone]
    rows = textwrap.wrap(line.text, width - LABEL, max_lines=most, placeholder=" ...")
    named = "bold " + style if bold or line.tone == "bad" else "dim"
    first = Text(f"{line.label:<{LABEL}}", style=named.strip())
    shown = [Text(" " * LABEL) for _ in rows]
    shown[:1] = [first]
    for text, row in zip(shown, rows or [""], strict=True):
        text.append(row, style=style)
    return shown


def _bar(progress: Progress, width: int) -> Text:
    total = max(progress.total, 1)
    length = min(width // 3, 2 * BAR)
    done = min(length, length * progress.done // total)
    eta = f"  {clock(progress.eta_s)} to go" if progress.eta_s is not None else ""
    text = Text(f"{progress.what:<{LABEL - 1}} ", style="bold")
    text.append("━" * done, style="green").append("─" * (length - done), style="dim")
    return text.append(eta)


def _plots(curves: Sequence[Curve], width: int, height: int) -> list[Text]:
    """Plots side by side, as many as fit."""
    shown = curves[: max(1, width // PLOT_WIDTH)]
    each = width // len(shown)
    columns = [
        [
            f"{curve.name} by step, now {curve.values[-1]:.3f}",
            *plot(curve.values, width=each - 2, height=height - 1, low=curve.low, high=curve.high),
        ]
        for curve in shown
    ]
    return [
        Text("".join(row.ljust(each) for row in rows).rstrip())
        for rows in zip(*columns, strict=True)
    ]


def _sessions(sessions: Sequence[AttemptDone], width: int) -> list[Text]:
    ids, tasks = (
        min(24, max(len(getattr(each, name)) for each in sessions)) for name in ("id", "task")
    )
    found = [Text("newest sessions", style="dim")]
    for each in sessions:
        reward = f"reward {each.reward:.2f}" if each.reward is not None else ""
        what = STATUS[each.status]
        named = f"{each.id[:ids]:<{ids}}  {each.task[:tasks]:<{tasks}}"
        told = f"{named}  {what:<9} {each.seconds:>5.1f} s  {reward}{error_line(each.error or '')}"
        found.append(Text(_cut(told, width), style="red" if each.error else ""))
    return found


def _legend(legend: Sequence[tuple[str, str]], width: int, height: int) -> list[Text]:
    """Each term on a line of its own, or else as many terms as fit."""
    if len(legend) <= height:
        return [Text(f"{term:<{LABEL}}{meaning}", style="dim") for term, meaning in legend]
    for count in range(len(legend), 0, -1):
        told = " · ".join(f"{term}: {meaning}" for term, meaning in legend[:count])
        if len(rows := textwrap.wrap(told, width)) <= height:
            return [Text(row, style="dim") for row in rows]
    return []


def _cut(text: str, width: int) -> str:
    line = text.replace("\n", " ")
    return line if len(line) <= width else line[: width - 4] + " ..."


def results(reports: Sequence[Report], ends: Collection[int] | None = None) -> RenderableType:
    """Solve rates after each stage. `ends`: the versions that stages end with; other versions lie
    within a stage."""
    splits = list(dict.fromkeys(report.split for report in reports))
    table = Table(title="tasks solved (95 % interval)", title_justify="left")
    table.add_column("")
    table.add_column("version", justify="right")
    for split in splits:
        table.add_column("held-out" if split == "heldout" else split, no_wrap=True)
    found = {
        (each.version, each.split): share(each.solved, each.total, each.low, each.high)
        for each in reports
    }
    stages = {report.version: report.stage for report in reports}
    for version in sorted({report.version for report in reports}):
        rates = (found.get((version, split), "") for split in splits)
        is_end = ends is None or version in ends or version == 0
        stage = when(stages[version]) if is_end else f"within {stages[version]}"
        table.add_row(stage, str(version), *rates)
    return table
