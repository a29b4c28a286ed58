"""The terminal view of a run. It reads the events in the store, and nothing depends on it.

On a terminal a page that redraws itself; otherwise plain lines, one for each thing worth telling.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live as Page
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from etude.core.alarms import Alarm
from etude.core.events import (
    EvalDone,
    Event,
    FitStep,
    OverlongSkipped,
    ProcessHeard,
    StageDone,
    StageStarted,
    StepDone,
)
from etude.core.types import Json
from etude.dash.reader import RunView
from etude.run.evaluate import Report
from etude.store.runs import Run
from etude.store.telemetry import EventReader

REFRESH_S = 0.5
BARS = "▁▂▃▄▅▆▇█"


async def watch(run: Run, console: Console, *, title: str, lag_bound: int) -> None:
    """Shows the run until it is cancelled."""
    events, view = EventReader(run), RunView()
    for stamped in await asyncio.to_thread(events.new):  # what happened before somebody looked
        view.apply(stamped.t, stamped.record)
    if not console.is_terminal:
        while True:
            for stamped in await asyncio.to_thread(events.new):
                begun = view.apply(stamped.t, stamped.record)
                for line in lines(stamped.record, view, begun):
                    _print(console, line)
            _tell_damage(events, console)
            await asyncio.sleep(REFRESH_S)
    with Page(console=console, auto_refresh=False, transient=True) as page:
        while True:
            for stamped in await asyncio.to_thread(events.new):
                view.apply(stamped.t, stamped.record)
            _tell_damage(events, console)
            page.update(draw(view, title, lag_bound), refresh=True)
            await asyncio.sleep(REFRESH_S)


def _tell_damage(events: EventReader, console: Console) -> None:
    while events.damaged:
        _print(console, f"alarm: {events.damaged.pop(0)}: what it told is left out")


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def lines(event: Event, view: RunView, begun: Sequence[Alarm]) -> Iterator[str]:
    """The lines for an event that the view has applied."""
    if line := event_line(event):
        to_go = isinstance(event, FitStep | StepDone) and view.eta_s
        yield line + (f"  {clock(to_go)} to go" if to_go else "")
    yield from (f"alarm: {alarm}" for alarm in begun)


def event_line(event: Event) -> str | None:
    """An event as a line, if it is worth one."""
    match event:
        case StageStarted():
            return f"{event.stage} begins" + (
                f", {event.done} steps of it were done before" if event.done else ""
            )
        case ProcessHeard():
            return f"the {event.process} is heard again after {event.seconds:.0f} s of silence"
        case StageDone():
            return f"{event.stage} is done after {event.seconds:.0f} s: version {event.version}"
        case FitStep() if event.step % 25 == 0 or event.step == event.steps:
            speed = f"{event.tokens_per_s:,.0f} tokens/s"
            seen = "".join(f"  {name} {value:.3f}" for name, value in event.metrics.items())
            return (
                f"{event.stage} step {event.step}/{event.steps}  loss {event.loss:.3f}{seen}  "
                f"{speed}"
            )
        case OverlongSkipped():
            return (
                f"{event.stage} leaves out {event.count} sessions that are too long: "
                f"{', '.join(event.where)} ..."
            )
        case StepDone():
            reward = f"  reward {event.reward:.3f}" if event.reward is not None else ""
            teacher = (
                f"  KL to the teacher {event.teacher_kl:.3f}"
                if event.teacher_kl is not None
                else ""
            )
            return (
                f"version {event.step}  loss {event.loss:+.4f}{reward}  lag {event.lag}  "
                f"entropy {event.entropy:.3f}  k3 {event.k3_mean:.5f}{teacher}  "
                f"{event.seconds:.2f} s after {event.wait_s:.2f} s of waiting"
            )
        case EvalDone():
            return f"{event.split} tasks solved after {event.stage}: {share(event)}"
        case _:
            return None


def share(result: EvalDone | Report) -> str:
    interval = f"{result.low:.1%} - {result.high:.1%}"
    return f"{result.solved / result.total:.1%} ({interval}) {result.solved}/{result.total}"


def draw(view: RunView, title: str, lag_bound: int) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("stage", _stage(view))
    if view.loss is not None:
        speed = f"   {view.tokens_per_s:,.0f} tokens/s" if view.tokens_per_s is not None else ""
        table.add_row("loss", f"{view.loss:.4f}{speed}")
    if view.reward_curve or view.solve_rate is not None:
        now = (
            f"{view.solve_rate:.1%} of recent training sessions"
            if view.solve_rate is not None
            else ""
        )
        table.add_row("reward", Text(sparkline(view.reward_curve) + "  " + now, style="green"))
        table.add_row(
            "sessions",
            f"{view.sessions_per_s:.1f}/s   slots {view.window_slots[0]} of {view.window_slots[1]}",
        )
    if view.lag is not None:
        table.add_row("lag", f"{view.lag} now, {view.lag_max} at most, {lag_bound} allowed")
    if view.trainer_busy is not None:
        table.add_row("trainer", f"{view.trainer_busy:.0%} busy" + _mfu(view.step))
    if view.step is not None:
        table.add_row("policy", _policy(view.step))
    for name, region in view.regions.items():
        version = f"version {region.version}" if region.version >= 0 else "no weights yet"
        table.add_row(
            name,
            f"{version}   {region.busy:.0%} busy   {region.running} running, {region.waiting} "
            f"waiting",
        )
    if view.evaluating is not None:
        doing = view.evaluating
        what = f"{doing.stage} on {doing.split}, {doing.solved} solved {doing.done}/{doing.total}"
        table.add_row("evaluating", _bar(what, doing.done, doing.total, view.eval_eta_s))
    for (stage, split), result in view.evals.items():
        table.add_row(f"{split} after {stage}", share(result))
    for alarm in view.alarms.active.values():
        table.add_row(Text("alarm", style="red"), Text(str(alarm), style="red"))
    elapsed = view.now - view.began if view.began is not None else 0.0
    return Panel(
        table,
        title=title,
        subtitle=f"{clock(elapsed)} · Ctrl-C stops, the same command resumes",
        expand=False,
    )


def _stage(view: RunView) -> RenderableType:
    count = f" {view.done}/{view.steps}" if view.steps else ""
    return _bar(view.stage + count, view.done, view.steps, view.eta_s)


def _bar(what: str, done: int, total: int, eta_s: float | None) -> RenderableType:
    line = Table.grid(padding=(0, 1))
    eta = f"  {clock(eta_s)} to go" if eta_s is not None else ""
    line.add_row(
        Text(what, style="bold"), ProgressBar(total=max(total, 1), completed=done, width=30), eta
    )
    return line


def _mfu(step: StepDone | None) -> str:
    return f"   {step.mfu:.1%} of the device's arithmetic" if step and step.mfu is not None else ""


def _policy(step: StepDone) -> str:
    """How the policy moves, and its mismatch with the one that sampled."""
    routers = (
        f"   router mismatch {step.router_mismatch_frac:.2%}"
        if step.router_mismatch_frac is not None
        else ""
    )
    return (
        f"entropy {step.entropy:.3f}   k3 {step.k3_mean:.5f}   truncated "
        f"{step.truncated_frac:.2%}, zero gradient {step.zero_grad_frac:.2%}   "
        f"gradient {step.grad_norm:.2f}{routers}"
    )


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """Rewards lie between 0 and 1, and so does the scale: a small rise must not look like a large
    one."""
    shown = values[-width:]
    return "".join(BARS[min(len(BARS) - 1, max(0, int(value * len(BARS))))] for value in shown)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def results(reports: Sequence[Report]) -> RenderableType:
    """Solve rates after each stage."""
    splits = list(dict.fromkeys(report.split for report in reports))
    table = Table(title="tasks solved (95 % interval)", title_justify="left")
    table.add_column("after")
    table.add_column("version", justify="right")
    for split in splits:
        table.add_column(
            {"heldout": "held-out", "novel": "novel templates"}.get(split, split), no_wrap=True
        )
    found = {(report.version, report.split): report for report in reports}
    for version in sorted({report.version for report in reports}):
        of_version = [found.get((version, split)) for split in splits]
        stage = next(report.stage for report in of_version if report is not None)
        table.add_row(
            stage, str(version), *(share(report) if report else "" for report in of_version)
        )
    return table


def session(messages: Sequence[dict[str, Json]]) -> RenderableType:
    """A whole session, so that a person can read it."""
    lines: list[RenderableType] = []
    for message in messages:
        if message["role"] == "assistant":
            said = [message["content"]] if message.get("content") else []
            said += [_call(call["function"]) for call in message.get("tool_calls") or []]
            lines += [Text(f"model  {line}", style="bold") for line in said or ["(says nothing)"]]
        else:
            style = "cyan" if message["role"] == "user" else "dim"
            text = str(message["content"]).replace("\n", "\n       ")
            lines.append(Text(f"{message['role']:<6} {text}", style=style))
    return Panel(Group(*lines), title="a solved session", title_align="left", expand=False)


def _call(function: dict[str, Json]) -> str:
    arguments = json.loads(function["arguments"])
    return f"{function['name']}({', '.join(repr(value) for value in arguments.values())})"
