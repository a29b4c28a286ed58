"""Description of a run in words, from its `RunView`. Pure: the screen renders a `Page`, and a log
prints the lines of a `Teller`, both in the same words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from etude.core.alarms import Alarm
from etude.core.errors import error_line
from etude.core.events import (
    AttemptDone,
    EvalDone,
    EvalProgress,
    Event,
    FewTasks,
    FitStep,
    FleetStatus,
    OverlongSkipped,
    ProcessHeard,
    StageDone,
    StageStarted,
    StepDone,
)
from etude.dash.reader import RunView

Tone = Literal["", "good", "bad", "dim"]

TELL_S = 10.0
"""Pause between two lines that summarize the sessions, until the first step."""
TELL_SELDOM_S = 60.0
"""The same pause after the first step."""
TELL_ERRORS = 5
"""Limit on distinct errors with a line each; many contain a number that is never the same."""
EARLY_STEPS = 5
EARLY_GROUPS = 16
"""With fewer steps, or fewer groups with a difference, a rise of the mean reward may be chance."""
FEW_REGIONS = 3
"""Most regions that are shown on a line each."""
FEW_GROUPS = 4
"""With fewer groups it is too early to say which tasks teach nothing."""
FEW_TASKS = 4
"""Most tasks that are named."""


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    text: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of something that takes `eta_s` more seconds."""

    what: str
    done: int
    total: int
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class Curve:
    """One value for each step of a stage, with the ends of the scale."""

    name: str
    values: Sequence[float]
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Page:
    """All contents of a screen, the most important first in each list."""

    headline: Line
    advice: str
    """Advice on the headline, if it is an alarm."""
    alarms: tuple[Alarm, ...]
    """Active alarms, except the one in the headline."""
    progress: tuple[Progress, ...]
    lines: tuple[Line, ...]
    curves: tuple[Curve, ...]
    sessions: tuple[AttemptDone, ...]
    """The newest sessions, newest first."""
    legend: tuple[tuple[str, str], ...]


LEGEND = {
    "failed": "something broke: no reward, not trained on",
    "without signal": "all attempts at a task earned the same: nothing to learn",
    "dropped": "sampled in a way that the trainer cannot recompute",
    "quarantined": "suspected of a trick, not trained on",
    "timed out": "out of time; graded on what was done by then",
    "truncated": "out of turns or context; graded on what was done by then",
    "interrupted": "cut short when the run was stopped; their tasks are issued again",
    "solve rate": "share of attempts that earned 1",
    "groups": "a group is all attempts at one task",
    "lag": "steps between the weights that sampled and those being trained",
    "slots": "groups under way or waiting for the trainer, out of those allowed",
    "k3": "how differently trainer and engine rate tokens; alarm above 0.01",
    "entropy": "how varied the model's choices are, in nats per token",
    "corrected": "share of tokens whose importance weight was truncated or masked",
    "zero gradient": "share of tokens that were clipped or masked, and taught nothing",
}
"""Term -> meaning, the most important first: a small screen shows only some."""


MADE_READY = "preparing model, workers and trainer"
HEADLINES = {"failing": "failing", "signal": "no signal"}
"""Alarms that take the place of the headline: name -> label."""


def describe(view: RunView, lag_bound: int) -> Page:
    lines, shown = tuple(_lines(view, lag_bound)), _alarm_shown(view)
    words = " ".join(f"{line.label} {line.text}" for line in lines)
    return Page(
        headline=headline(view),
        advice=shown.advice if shown else "",
        alarms=tuple(alarm for alarm in view.alarms.active.values() if alarm is not shown),
        progress=tuple(_progress(view)),
        lines=lines,
        curves=tuple(_curves(view)),
        sessions=tuple(reversed(view.newest_sessions)),
        legend=tuple((term, meaning) for term, meaning in LEGEND.items() if term in words),
    )


def _alarm_shown(view: RunView) -> Alarm | None:
    """The alarm in the headline, if any."""
    active = view.alarms.active
    return next((active[name] for name in HEADLINES if name in active), None)


def headline(view: RunView) -> Line:
    """The state of the run in one line."""
    if view.finished:
        return Line("finished", "the run is complete", "good")
    if (alarm := _alarm_shown(view)) is not None:
        return Line(HEADLINES[alarm.name], alarm.what, "bad")
    if view.resuming:
        return Line("starting", f"{MADE_READY}{_stands(view)}")
    if view.evaluating is not None:
        return Line("evaluating", f"{view.evaluating.split} tasks, {when(view.evaluating.stage)}")
    if view.reward_curve:
        return _rewarded(view)
    if view.groups.done and not view.groups.with_signal:
        return Line("sampling", no_difference(view))
    if view.ended and view.stepping_since is not None:
        sampling = "waits for it" if _waits_for_trainer(view) else "continues"
        return Line("training", f"the first step is running{_rows(view)}, and sampling {sampling}")
    if view.ended:
        count = view.groups.with_signal
        had = f"{count} group{'s' * (count != 1)} with signal"
        needs = view.groups_per_step or "more"
        return Line("sampling", f"first sessions have ended: {had} so far, a step needs {needs}")
    if view.running:
        return Line("sampling", f"the first {view.running} sessions are under way")
    if view.loss is not None:
        first = view.loss_curve[0] if view.loss_curve else view.loss
        return Line("learning", f"loss {first:.3f} at first, {view.loss:.3f} now", "good")
    return Line("starting", MADE_READY)


def beginning(view: RunView) -> str:
    """The first line of a log: with a large model the next one takes a while."""
    return f"{MADE_READY}{_stands(view)}; Ctrl-C stops"


def _stands(view: RunView) -> str:
    return f", at step {view.done} of {view.stage}" if view.done else ""


def _rewarded(view: RunView) -> Line:
    count = len(view.reward_curve)
    if count == 1:
        return Line("training", f"mean reward {view.reward_curve[0]:.2f} in the first step")
    span = min(5, count // 2)
    first, last = (
        sum(part) / span for part in (view.reward_curve[:span], view.reward_curve[-span:])
    )
    early = count < EARLY_STEPS or view.groups.with_signal < EARLY_GROUPS
    rises = not early and last - first > 2 * _chance(view.reward_curve, span)
    steps = "step" if span == 1 else f"{span} steps"
    text = f"mean reward {first:.2f} in the first {steps}, {last:.2f} in the last"
    text += "; too early to say more" if early else ""
    return Line("learning" if rises else "training", text, "good" if rises else "")


def _chance(curve: Sequence[float], span: int) -> float:
    """The standard error of the difference between the means of the first and the last steps."""
    spread = statistics.variance(curve[:span]) + statistics.variance(curve[-span:])
    return math.sqrt(spread / span)


def no_difference(view: RunView) -> str:
    """The reason why there is nothing to learn from yet, while no group had a difference."""
    earned, count = view.groups.earned, view.groups.done
    if not earned and view.groups.untrainable:
        return (
            f"no group to train on yet: in {count} groups, all attempts were dropped for their "
            "sampling parameters"
        )
    if not earned:
        return f"no group with signal yet: in {count}, all attempts failed"
    every = f"all attempts earned {min(earned):g}" if len(earned) == 1 else "all earned the same"
    where = f"each of {count}" if count > 1 else "the first"
    return f"no group with signal yet: in {where}, {every}"


def when(stage: str) -> str:
    """The time of an evaluation in words, from the stage that trained the version."""
    return "before any training" if stage == "start" else f"after {stage}"


def _progress(view: RunView) -> Iterator[Progress]:
    count = f" {view.done}/{view.steps}" if view.steps else ""
    yield Progress(view.stage + count, view.done if view.steps else 0, view.steps, view.eta_s)
    if (doing := view.evaluating) is not None:
        what = f"{doing.split} {doing.done}/{doing.total}, {doing.solved} solved"
        yield Progress(what, doing.done, doing.total, view.eval_eta_s)


def _lines(view: RunView, lag_bound: int) -> Iterator[Line]:
    if view.ended or (view.running and view.evaluating is None):
        yield Line("sessions", sessions(view))
        asking = sum(each.running + each.waiting for each in view.regions.values())
        speed = f"{view.sessions_per_s:.1f} sessions/s, {view.running} under way"
        if view.running and view.regions and not asking:
            speed += ", none in the engines"
        count, useful = view.groups.done, view.groups.with_signal
        yield Line("groups", f"{count} done, {useful} with signal   {speed}")
        if told := _tasks_without(view):
            yield Line("no signal", told)
    if view.failure is not None and "failing" not in view.alarms.active:
        ago, error = clock(view.now - view.failure.t), error_line(view.failure.error)
        yield Line("newest error", f"{ago} ago, {view.failure.id}: {error}", "bad")
    if view.mean_reward is not None and view.solve_rate is not None:
        rewards = f"{view.mean_reward:.3f}   solve rate {view.solve_rate:.1%}"
        yield Line("mean reward", f"{rewards}   ({_recent(view)})")
    if view.few_tasks:
        yield Line("tasks", ", ".join(map(_few, view.few_tasks.values())), "dim")
    yield from _evaluations(view)
    yield from _learning(view, lag_bound)
    yield from _regions(view)
    if view.store.requests:
        yield Line("store", str(view.store))


def _recent(view: RunView) -> str:
    count = view.recent_groups
    return f"last {count} groups" if count > 1 else "first group"


def _few(event: FewTasks) -> str:
    name = "held-out" if event.split == "heldout" else event.split
    plural = "" if event.given == 1 else "s"
    return f"{event.given} {name} task{plural} (up to {event.wanted} requested)"


def sessions(view: RunView) -> str:
    """Counts of training sessions by how they ended."""
    ended = view.ended
    untrainable = view.groups.untrainable
    suspects = view.groups.quarantined
    return (
        f"{ended['done']} finished, {ended['failed']} failed, {ended['timeout']} timed out, "
        + (f"{ended['truncated']} truncated, " if ended["truncated"] else "")
        + f"{view.groups.sessions_without} without signal{_share_without(view)}"
        + (f", {ended['interrupted']} interrupted" if ended["interrupted"] else "")
        + (f", {untrainable} dropped for sampling" if untrainable else "")
        + (f", {suspects} quarantined" if suspects else "")
    )


def _tasks_without(view: RunView) -> str:
    """The tasks that taught nothing yet, if they take most of the sessions."""
    groups, tasks = view.groups, view.groups.tasks_without
    mostly = 2 * groups.sessions_without >= groups.sessions_compared
    if not tasks or groups.done < FEW_GROUPS or not mostly:
        return ""
    shown = ", ".join(tasks[:FEW_TASKS]) + (", ..." if len(tasks) > FEW_TASKS else "")
    return f"{len(tasks)} of {len(groups.by_task)} tasks taught nothing yet: {shown}"


def _share_without(view: RunView) -> str:
    compared = view.groups.sessions_compared
    return f" ({view.groups.sessions_without / compared:.0%})" if compared else ""


def _evaluations(view: RunView) -> Iterator[Line]:
    for name in dict.fromkeys(name for _, name in view.evals):
        *earlier, last = (result for (_, of), result in view.evals.items() if of == name)
        told = "".join(f"{r.solved / r.total:.1%} {_evaluated(r, view)}, " for r in earlier)
        yield Line(f"{name} solved", f"{told}{_result(last)} {_evaluated(last, view)}")


def _evaluated(result: EvalDone, view: RunView) -> str:
    """The time of an evaluation in words. The version is named if the stage was extended and so
    goes on after this evaluation."""
    goes_on = result.stage == view.stage and view.done < view.steps
    return f"at version {result.version}" if goes_on else when(result.stage)


def share(solved: int, total: int, low: float, high: float) -> str:
    return f"{solved / total:.1%} ({low:.1%} - {high:.1%}) {solved}/{total}"


def _result(event: EvalDone) -> str:
    return share(event.solved, event.total, event.low, event.high)


def _learning(view: RunView, lag_bound: int) -> Iterator[Line]:
    step, (active, capacity) = view.step, view.window_slots
    slots = f"   slots {active} of {capacity}" if capacity else ""
    if view.lag is not None:
        bounds = f"{view.lag} now, at most {view.lag_max}, {lag_bound} allowed"
        yield Line("lag", bounds + slots)
    if view.held and 0 < capacity <= active:
        groups = "1 finished group waits" if view.held == 1 else f"{view.held} finished groups wait"
        yield Line(
            "window",
            f"full: {groups} for an older one that is still under way; a larger reorder_window "
            "would let more of them pass",
        )
    if view.loss is not None:
        busy = f"{view.trainer_busy:.0%} busy  " if view.trainer_busy is not None else ""
        gradient = f"  gradient {step.grad_norm:.2f}" if step else ""
        speed = f"  {view.tokens_per_s:,.0f} tokens/s" if view.tokens_per_s is not None else ""
        speed += f"  at step {view.done + 1}{_rows(view)}" if view.stepping else ""
        mfu = f"  {step.mfu:.1%} MFU" if step and step.mfu is not None else ""
        yield Line("trainer", f"{busy}loss {view.loss:.4f}{gradient}{speed}{mfu}")
    elif (since := view.stepping_since) is not None:
        waits = f"; sampling waits for it (max_lag {lag_bound})" if _waits_for_trainer(view) else ""
        spent = clock(view.now - since)
        yield Line("trainer", f"at step {view.done + 1} for {spent}{_rows(view)}{waits}")
    elif view.ended and not view.trainer_ready:
        yield Line("trainer", "preparing")
    elif view.groups.with_signal:
        text = f"at step {view.done + 1}, or waiting for more groups with signal"
        yield Line("trainer", text)
    elif view.ended:
        yield Line("trainer", "waiting for the first batch of groups with signal")
    if step is not None:
        routers = (
            f"   router mismatch {step.router_mismatch_frac:.2%}"
            if step.router_mismatch_frac is not None
            else ""
        )
        yield Line(
            "policy",
            f"entropy {step.entropy:.3f}   k3 {step.k3_mean:.5f}   corrected "
            f"{step.corrected_frac:.1%}, zero gradient {step.zero_grad_frac:.1%}{routers}",
        )


def _waits_for_trainer(view: RunView) -> bool:
    """True if nothing is sampled because all slots wait for the current step."""
    active, capacity = view.window_slots
    return view.stepping_since is not None and not view.running and 0 < capacity <= active


def _rows(view: RunView) -> str:
    """The progress of the current step, if it is known."""
    return f" ({view.stepping.done} of {view.stepping.total} rows)" if view.stepping else ""


def _regions(view: RunView) -> Iterator[Line]:
    regions = dict(sorted(view.regions.items()))
    if len(regions) > FEW_REGIONS:
        versions = [region.version for region in regions.values()]
        busy = sum(region.busy for region in regions.values()) / len(regions)
        running = sum(region.running for region in regions.values())
        waiting = sum(region.waiting for region in regions.values())
        text = f"versions {min(versions)} to {max(versions)}   {busy:.0%} busy"
        yield Line(f"{len(regions)} workers", f"{text}   {running} running, {waiting} waiting")
        return
    for name, region in regions.items():
        version = f"version {region.version}" if region.version >= 0 else "no weights yet"
        load = f"{region.busy:.0%} busy   {region.running} running, {region.waiting} waiting"
        yield Line(name, f"{version}   {'in quarantine' if region.quarantined else load}")


def _curves(view: RunView) -> Iterator[Curve]:
    if view.reward_curve:
        low, high = min(0.0, *view.reward_curve), max(1.0, *view.reward_curve)
        yield Curve("mean reward", view.reward_curve, low, high)
        yield Curve("solve rate", view.solve_curve, 0.0, 1.0)
    if view.entropy_curve:
        yield Curve("entropy", view.entropy_curve, 0.0, max(view.entropy_curve))
    if view.loss_curve:
        yield Curve("loss", view.loss_curve, min(view.loss_curve), max(view.loss_curve))


def clock(seconds: float) -> str:
    minutes = int(seconds) // 60
    hours = f"{minutes // 60}:{minutes % 60:02d}" if minutes >= 60 else f"{minutes}"
    return f"{hours}:{int(seconds) % 60:02d}"


class Teller:
    """The lines of a run's log, event by event."""

    def __init__(self) -> None:
        self._told: float | None = None
        self._told_ends = 0
        self._told_running = False
        self._errors: set[str] = set()

    def tell(self, t: float, event: Event, view: RunView, begun: Sequence[Alarm]) -> Iterator[str]:
        """The lines for an event that the view has applied."""
        if line := event_line(event, view):
            to_go = isinstance(event, FitStep | StepDone) and view.eta_s
            yield line + (f"  {clock(to_go)} to go" if to_go else "")
        if isinstance(event, FleetStatus) and self._is_first_sampling(view):
            self._told_running = True
            yield f"the first {view.running} sessions are under way"
        yield from (f"alarm: {alarm}" for alarm in begun)
        if isinstance(event, AttemptDone) and event.error and self._is_news(event.error):
            yield f"session {event.id} failed: {error_line(event.error)}"
        ends = view.ended.total()
        pause_s = TELL_SELDOM_S if view.step else TELL_S
        if self._told is None:
            self._told = t if ends else None
        elif t > self._told + pause_s and ends > self._told_ends:
            self._told, self._told_ends = t, ends
            yield self._summary(view)

    def _is_first_sampling(self, view: RunView) -> bool:
        return view.running > 0 and not (self._told_running or view.ended or view.evaluating)

    def _is_news(self, error: str) -> bool:
        if error in self._errors or len(self._errors) == TELL_ERRORS:
            return False
        self._errors.add(error)
        return True

    def _summary(self, view: RunView) -> str:
        told = f"sessions: {sessions(view)}"
        if view.groups.done and not view.groups.with_signal:
            told += f"; {no_difference(view)}"
        if view.failure is not None:
            told += f"; newest error: {error_line(view.failure.error)}"
        return told


def event_line(event: Event, view: RunView) -> str | None:
    """An event as a line of a log, or None if it is not important enough."""
    match event:
        case StageStarted():
            before = f", {event.done} steps done before" if event.done else ""
            repeated = f", {event.repeated} repeated from their batches" if event.repeated else ""
            return f"{event.stage} starts{before}{repeated}"
        case FewTasks():
            return _few(event)
        case ProcessHeard():
            return f"the {event.process} responds again after {event.seconds:.0f} s of silence"
        case StageDone():
            return f"{event.stage} finished in {event.seconds:.0f} s: version {event.version}"
        case FitStep() if event.step % 25 == 0 or event.step == event.steps:
            speed = f"{event.tokens_per_s:,.0f} tokens/s"
            seen = "".join(f"  {name} {value:.3f}" for name, value in event.metrics.items())
            return (
                f"{event.stage} step {event.step}/{event.steps}  loss {event.loss:.3f}{seen}  "
                f"{speed}"
            )
        case OverlongSkipped():
            return (
                f"{event.stage} skips {event.count} sessions that are too long: "
                f"{', '.join(event.where)} ..."
            )
        case StepDone():
            return _step_line(event, view)
        case EvalProgress() if event.done == 0:
            return f"evaluating on {event.total} {event.split} tasks, {when(event.stage)}"
        case EvalDone():
            return f"{event.name} tasks solved {_evaluated(event, view)}: {_result(event)}"
        case _:
            return None


def _step_line(event: StepDone, view: RunView) -> str:
    reward = f"  mean reward {event.reward:.3f} (its groups)" if event.reward is not None else ""
    if view.solve_rate is not None:
        reward += f"  solve rate {view.solve_rate:.1%} ({_recent(view)})"
    teacher = f"  KL to the teacher {event.teacher_kl:.3f}" if event.teacher_kl is not None else ""
    return (
        f"version {event.step}  loss {event.loss:+.4f}{reward}  lag {event.lag}  entropy "
        f"{event.entropy:.3f}  k3 {event.k3_mean:.5f}{teacher}  {event.seconds:.2f} s after "
        f"waiting {event.wait_s:.2f} s"
    )
