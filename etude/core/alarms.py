"""Alarms: symptoms of a run that is going wrong, each with advice. They are a fold over the run's
events: the screen, the lines of a log and `etude audit` all apply the same rules, even to a run
that ended years ago.

An alarm starts with the event that causes it and ends when its cause is gone; no alarm stops
anything.
"""

from __future__ import annotations

import hashlib
import math
import shlex
from array import array
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from etude.core.errors import error_line
from etude.core.events import (
    AttemptDone,
    Event,
    GroupDone,
    Launched,
    ProcessDied,
    ProcessHeard,
    ProcessRestarted,
    ProcessSilent,
    RegionQuarantined,
    StageStarted,
    StepDone,
)
from etude.core.types import Batch, Row

K3_LIMIT = 1e-2
FIRST_STEPS = 5
"""The number of first steps whose mean entropy later steps are compared with."""
COLLAPSED = 0.2
"""Share of that entropy below which the entropy has collapsed."""
RECENT_GROUPS = 64
SILENT = "silent "
DRIFTED = "drifted "
"""Prefixes of the names of alarms that are about one process each, rather than about a stage."""
SATURATED = 0.95
FALLEN = 0.4
"""The drop of the mean reward of recent groups below its best that raises an alarm, as a share of
the range between the lowest and the highest reward. The alarm ends at half of it."""
RECENT_SESSIONS = 40
FEW_SESSIONS = 4
"""Fewer sessions than this do not show what share of them fails."""
FAILING = 0.5
IN_VAIN = 8
"""Groups in a row without a difference that raise an alarm, as long as no group had one."""
IN_VAIN_LATER = 32
"""The same, once a group had a difference: a run that has learnt its tasks has many groups
without."""


@dataclass(frozen=True, slots=True)
class Alarm:
    name: str
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}: {self.advice}"


class Alarms:
    """The alarms of a run so far. `active` holds those whose cause is still present, by name.

    `place`: the path or URL of the run, for the commands that an alarm suggests.
    """

    def __init__(self, place: str = "RUN") -> None:
        self._place = shlex.quote(place)
        self.active: dict[str, Alarm] = {}
        self._enter("")

    def _enter(self, stage: str) -> None:
        """Start a new stage: its figures are not comparable with those of the previous stage. A
        stage that is resumed keeps its own."""
        self._stage = stage
        self.active = self._lasting()
        self._entropies: list[float] = []
        self._rewards: deque[float] = deque(maxlen=RECENT_GROUPS)
        self._best = -math.inf
        self._lowest = math.inf
        self._highest = -math.inf
        self._errors: deque[str | None] = deque(maxlen=RECENT_SESSIONS)
        self._in_vain = 0
        self._earned: set[float] = set()
        self._differed = False

    def apply(self, event: Event) -> list[Alarm]:
        """Return the alarms that start with this event."""
        found: dict[str, Alarm | None] = {}
        match event:
            case Launched():  # processes other than those that were silent or drifted
                found = dict.fromkeys([*self._lasting(), "failing"])
                self._errors.clear()
            case ProcessSilent():
                found = {SILENT + event.process: _silent(event)}
            case ProcessRestarted():
                found = {SILENT + event.process: _restarted(event)}
            case RegionQuarantined():
                found = {DRIFTED + event.region: _drifted(event, self._place)}
            case ProcessDied():
                found = {SILENT + event.process: _died(event)}
            case ProcessHeard():
                found = {SILENT + event.process: None}
            case StageStarted() if event.stage != self._stage:
                self._enter(event.stage)
            case StepDone():
                found = {
                    "k3": _mismatched(event),
                    "entropy": self._collapsed(event),
                    "repeats": _repeated(event),
                }
            case AttemptDone():
                found = {"failing": self._failing(event)}
            case GroupDone():
                found = {
                    "signal": self._without_signal(event),
                    "malformed": _malformed(event),
                    "sampling": _untrainable(event),
                    "cheats": _quarantined(event),
                    "jump": _jumped(event),
                    **self._reward_alarms(event),
                }
        begun = [
            alarm for name, alarm in found.items() if alarm is not None and name not in self.active
        ]
        for name, alarm in found.items():
            self.active.pop(name, None)
            if alarm is not None:
                self.active[name] = alarm
        return begun

    def _lasting(self) -> dict[str, Alarm]:
        """The alarms about processes: they outlast a stage, but not a launch."""
        kinds = (SILENT, DRIFTED)
        return {name: alarm for name, alarm in self.active.items() if name.startswith(kinds)}

    def _collapsed(self, event: StepDone) -> Alarm | None:
        if len(self._entropies) < FIRST_STEPS:
            self._entropies.append(event.entropy)
            return None
        first = sum(self._entropies) / len(self._entropies)
        if event.entropy >= COLLAPSED * first:
            return None
        return Alarm(
            "entropy",
            f"step {event.step}: entropy is {event.entropy:.4f} nats, down from {first:.4f} "
            "in the first steps",
            "the policy hardly explores any more; lower lr, raise clip_high or kl_coef, or end "
            "the run here",
        )

    def _failing(self, event: AttemptDone) -> Alarm | None:
        self._errors.append(event.error)
        failed = [error for error in self._errors if error is not None]
        if len(self._errors) < FEW_SESSIONS or len(failed) < FAILING * len(self._errors):
            return None
        return Alarm(
            "failing",
            f"{len(failed)} of the last {len(self._errors)} sessions failed, most recently "
            f"with: {error_line(failed[-1])}",
            f"fix this error first; `etude sessions {self._place} --failed` shows the full "
            "sessions",
        )

    def _without_signal(self, event: GroupDone) -> Alarm | None:
        if event.kept:
            self._differed = True
            self._in_vain, self._earned = 0, set()
        elif event.rewards and not (event.malformed or event.untrainable):
            self._in_vain += 1
            self._earned |= set(event.rewards)
        if self._in_vain < (IN_VAIN_LATER if self._differed else IN_VAIN):
            return None
        count = self._in_vain
        earned = what_was_earned(self._earned)
        what = (
            f"in the last {count} groups, all attempts of a group earned the same reward ({earned})"
            if self._differed
            else f"no learning signal yet: in each of {count} groups, all attempts earned the "
            f"same reward ({earned})"
        )
        return Alarm("signal", what, signal_advice(self._earned, self._differed, self._place))

    def _reward_alarms(self, event: GroupDone) -> dict[str, Alarm | None]:
        self._lowest = min(self._lowest, *event.rewards, math.inf)
        self._highest = max(self._highest, *event.rewards, -math.inf)
        self._rewards.extend(event.rewards[:1] and [sum(event.rewards) / len(event.rewards)])
        if len(self._rewards) < RECENT_GROUPS:
            return {}
        mean = sum(self._rewards) / RECENT_GROUPS
        self._best = max(self._best, mean)
        earned = (
            f"group {event.group}: the last {RECENT_GROUPS} groups earned {mean:.3f} on average"
        )
        saturated = Alarm(
            "reward",
            earned,
            "there is little left to learn from these tasks; use harder ones, or end the run here",
        )
        dropped = Alarm(
            "reward_drop",
            f"{earned}, down from {self._best:.3f} at best",
            _broken_advice(self._place),
        )
        share = FALLEN / 2 if "reward_drop" in self.active else FALLEN
        has_dropped = mean < self._best - share * (self._highest - self._lowest)
        return {
            "reward": saturated if mean >= SATURATED else None,
            "reward_drop": dropped if has_dropped else None,
        }


def signal_advice(rewards: Collection[float], had_signal: bool, place: str = "RUN") -> str:
    """Advice about groups without a difference whose attempts earned these rewards. `had_signal`:
    earlier groups had a difference."""
    match sorted(set(rewards)):
        case [0.0] if had_signal:
            return _broken_advice(place)
        case [0.0]:
            return (
                "the tasks are too hard for the weights that rl starts from; train longer on "
                "them in sft, or use easier tasks"
            )
        case [1.0]:
            return "the tasks are solved already; use harder ones, or end the run here"
        case _:
            return "try a higher stage.rl.temperature, a larger group_size or other tasks"


def _broken_advice(place: str) -> str:
    """Advice about attempts that earn far less than earlier ones did."""
    return (
        "either the tasks have become harder or the policy has broken: read recent sessions "
        f"(`etude sessions {place}`); if the model no longer calls its tools correctly, "
        "lower lr, or, if failed attempts are the longer ones, set loss_aggregation = "
        '"sequence"'
    )


def what_was_earned(rewards: Collection[float]) -> str:
    """The rewards of the attempts of groups without a difference, in words."""
    values = sorted(set(rewards))
    return f"all {values[0]:g}" if len(values) == 1 else "not the same for all tasks"


def _silent(event: ProcessSilent) -> Alarm:
    return Alarm(
        SILENT + event.process,
        f"the {event.process} has been silent for {event.seconds:.0f} s",
        "it has stopped, hangs or gets no CPU time; the run continues without it where "
        "possible, and uses it again when it responds",
    )


def _restarted(event: ProcessRestarted) -> Alarm:
    advice = (
        "the end of its log says why; sessions resume when it is back, and the run stops if "
        f"it dies more than {event.limit} times within a minute"
    )
    if event.limit is None:
        advice = "it resumes from the store as soon as the cluster has room for it elsewhere"
    return Alarm(
        SILENT + event.process,
        f"the {event.process} {event.how} and is being restarted",
        advice,
    )


def _drifted(event: RegionQuarantined, place: str) -> Alarm:
    return Alarm(
        DRIFTED + event.region,
        f"the region {event.region} has been in quarantine since step {event.step}: its k3 "
        f"is {event.factor:.3g} times that of the others",
        f"it gets no requests; `etude mismatch {place}` shows what differs; fix it (driver, "
        "dtype, engine), then start the run again",
    )


def _died(event: ProcessDied) -> Alarm:
    advice = event.advice or "the end of its log says why"
    return Alarm(SILENT + event.process, f"the {event.process} {event.how}", advice)


def _mismatched(event: StepDone) -> Alarm | None:
    if event.k3_mean <= K3_LIMIT:
        return None
    return Alarm(
        "k3",
        f"step {event.step}: k3 is {event.k3_mean:.4f}, above {K3_LIMIT}",
        "the policy being trained is far from the one that sampled; lower lr or max_lag; if "
        "it happens at lag 0 too, engine and trainer compute different results",
    )


def _repeated(event: StepDone) -> Alarm | None:
    if not event.repeated_rows:
        return None
    return Alarm(
        "repeats",
        f"step {event.step}: {event.repeated_rows} of its rows were already trained on, with "
        "log-probs identical to the last digit",
        "the same sessions are delivered twice; look for a recorder or proxy that replays answers",
    )


def _malformed(event: GroupDone) -> Alarm | None:
    if not event.malformed:
        return None
    return Alarm(
        "malformed",
        _first(event.malformed),
        "the attempt was dropped; fix the environment, harness or worker that produced it",
    )


def _untrainable(event: GroupDone) -> Alarm | None:
    if not event.untrainable:
        return None
    return Alarm(
        "sampling",
        _first({id: f"sampled with {names}" for id, names in event.untrainable.items()}),
        "the trainer cannot recompute such tokens, so the attempt was dropped; have the "
        "harness set no sampling parameter except temperature, and keep it above 0",
    )


def _quarantined(event: GroupDone) -> Alarm | None:
    if not event.quarantined:
        return None
    return Alarm(
        "cheats",
        _first({id: f"suspected of {names}" for id, names in event.quarantined.items()}),
        "the attempt was set aside; review it in `etude dash` and decide whether it is a cheat",
    )


def _jumped(event: GroupDone) -> Alarm | None:
    if not event.jump:
        return None
    return Alarm(
        "jump",
        f"group {event.group}: {event.jump}",
        "either the model learned a skill or it found a hole in the grader: read one of the "
        "sessions in `etude dash`, filtered by the flag reward_jump",
    )


def _first(found: Mapping[str, str]) -> str:
    sample, why = next(iter(found.items()))
    return f"{sample}: {why}" + (
        f" (and {len(found) - 1} more of its group)" if len(found) > 1 else ""
    )


CHANCE = math.log(1e-6)
"""The log-prob below which a row cannot plausibly be sampled twice."""


class RepeatedRows:
    """A counter of rows that an earlier batch contained already: every token with the same log-prob
    and version. A row that the model was so sure of that it may well have been sampled twice does
    not count."""

    def __init__(self, *, steps: int = 64) -> None:
        self._seen: deque[set[bytes]] = deque(maxlen=steps)

    def count(self, batch: Batch) -> int:
        """Return the number of rows that one of the last `steps` batches contained already."""
        digests = [_digest(row) for row in batch.rows if sum(row.logprobs) < CHANCE]
        known = set().union(*self._seen)
        self._seen.append(set(digests))
        return sum(digest in known for digest in digests)


def _digest(row: Row) -> bytes:
    state = hashlib.blake2b(array("q", row.tokens).tobytes(), digest_size=16)
    state.update(array("d", row.logprobs).tobytes())
    state.update(repr(row.versions).encode())
    return state.digest()
