"""The audit of a run: its ledger, recomputed from the store, however the run ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from etude.core.advantage import AdvantageEstimator
from etude.core.alarms import Alarm, Alarms
from etude.core.config import RunConfig
from etude.core.ledger import (
    MEANINGS,
    Batched,
    Dropped,
    Entry,
    Issued,
    Ledger,
    Trained,
    Unbalanced,
)
from etude.core.lineage import estimator_of, stage_spans
from etude.core.sampling import expand_spans
from etude.core.stages import RolloutStageConfig
from etude.core.types import EVAL_SPLITS, Batch, Group
from etude.core.updates import is_of_user, step_of_simulated, steps_back
from etude.run.evaluate import report_name
from etude.run.journal import drops, group_of
from etude.store.rollouts import RolloutLog, RolloutRow
from etude.store.runs import Run
from etude.store.telemetry import EventReader
from etude.weights.manifest import find_newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    issued: int
    trained: int
    dropped: dict[str, int]
    in_flight: int
    batched: int
    """Samples in flight whose batch is written, and not trained on yet."""
    waiting: int
    """Samples in flight whose group has ended, and is in no batch yet."""
    lag_max: int
    lag_bound: int
    batches: int
    finished: bool
    violations: list[str]
    alarms: list[Alarm]
    """The alarms that the run's events caused, in order; none of them is a violation."""

    @property
    def equation(self) -> str:
        reasons = " + ".join(f"{count} {why}" for why, count in sorted(self.dropped.items()))
        sign = (
            "="
            if self.issued == self.trained + sum(self.dropped.values()) + self.in_flight
            else "!="
        )
        return (
            f"{self.issued} issued {sign} {self.trained} trained + {sum(self.dropped.values())} "
            f"dropped{f' ({reasons})' if reasons else ''} + {self.in_flight} in flight{self._where}"
        )

    @property
    def meanings(self) -> list[str]:
        """The meanings of the reasons in `dropped`."""
        found = {label.partition(" ")[0] for label in self.dropped}
        return [f"{reason}: {MEANINGS[reason]}" for reason in MEANINGS if reason in found]

    @property
    def unended(self) -> int:
        """Samples in flight whose group has not ended: a stop interrupts them."""
        return self.in_flight - self.batched - self.waiting

    @property
    def _where(self) -> str:
        """The places of the samples in flight."""
        counts = {
            "in unfinished groups": self.unended,
            "waiting for a batch": self.waiting,
            "in a batch": self.batched,
        }
        told = " + ".join(f"{count} {where}" for where, count in counts.items() if count)
        return f" ({told})" if told else ""


def evaluated_versions(config: RunConfig) -> list[int]:
    """The versions that are evaluated: the model that the run was given, if any, and the last
    version of each stage."""
    start = [0] if config.evaluates_start else []
    return start + [span.end for span in stage_spans(config.stage)]


def wanted_reports(config: RunConfig) -> set[str]:
    """The names of the evaluations that a run ends with."""
    splits = [split for split in EVAL_SPLITS if getattr(config.tasks, split)]
    versions = evaluated_versions(config)
    return {report_name(version, split) for version in versions for split in splits}


def is_finished(run: Run, config: RunConfig) -> bool:
    """True if nothing is left to do. A controller that was killed after its last step must still
    drop the samples that were open; samples of users are always open."""
    if not _is_over(run, config):
        return False
    return config.realtime is not None or not _fold(run.ledger.records())[0].in_flight


def _is_over(run: Run, config: RunConfig) -> bool:
    """True if all versions and all evaluations exist and the controller has recorded them. A run
    that was stopped a moment earlier has open samples, and rightly so."""
    stages = stage_spans(config.stage)
    newest = find_newest(run.objects)
    last = stages[-1]
    if newest is None or newest.version < last.end:
        return False
    if not wanted_reports(config) <= set(run.evals()):
        return False
    return (
        not isinstance(last.stage, RolloutStageConfig)
        or _trained_step(run.ledger.records()) >= last.end
    )


def audit(run: Run) -> Audit:
    config = run.config()
    entries = run.ledger.records()
    ledger, violations = _fold(entries)
    batches = {step: run.batch(step) for step in run.batches()}
    groups = {name: run.group(name) for name in run.groups()}
    told = entered_groups(groups, entries)
    rows = [
        row
        for row in RolloutLog(run.objects).rows()
        if row.group in told or row.group not in groups
    ]
    newest = find_newest(run.objects)
    version = -1 if newest is None else newest.version
    finished = _is_over(run, config)
    bounds = lag_bounds(config)
    violations += _check_batches(entries, batches, groups, bounds)
    violations += _check_versions(run, entries, config, version)
    violations += _check_drops(entries, told, config)
    violations += _check_rollouts(rows, entries, ledger, told, finished)
    if finished and ledger.in_flight:
        violations.append(f"the run is finished, but {ledger.in_flight} samples are in flight")
    return Audit(
        issued=ledger.issued,
        trained=ledger.trained,
        dropped=dict(ledger.dropped),
        in_flight=ledger.in_flight,
        batched=ledger.batched,
        waiting=sum(group_of(sample) in groups for sample in ledger.open_samples()),
        lag_max=max(
            (lag for batch in batches.values() if (lag := _lag(batch, batches)) is not None),
            default=0,
        ),
        lag_bound=max(bounds.values(), default=0),
        batches=len(batches),
        finished=finished,
        violations=violations,
        alarms=_alarms(run),
    )


def entered_groups(groups: Mapping[str, Group], entries: list[Entry]) -> dict[str, Group]:
    """The groups that the ledger must mention. Rollouts beside users are entered together with the
    batch that they are for; if a crash left some behind without a batch, they are entered, or made
    again, when the run resumes."""
    steps = {None, *(entry.step for entry in entries if isinstance(entry, Batched))}
    return {id: group for id, group in groups.items() if step_of_simulated(id) in steps}


def _alarms(run: Run) -> list[Alarm]:
    alarms, events = Alarms(run.place), EventReader(run)
    begun: list[Alarm] = []
    places: dict[str, int] = {}
    for stamped in events.new():
        for alarm in alarms.apply(stamped.record):
            places[alarm.name] = len(begun)
            begun.append(alarm)
        for name, alarm in alarms.active.items():
            begun[places[name]] = alarm  # in its latest form
    return [
        *dict.fromkeys(begun),  # every launch of a run may start with the same ones
        *(Alarm("events", str(damage), "its events are left out") for damage in events.damaged),
    ]


def lag_bounds(config: RunConfig) -> dict[int, int]:
    """The permitted lag of every step of every loop, in order."""
    spans = stage_spans(config.stage)
    bounds = {
        step: span.stage.max_lag
        for span in spans
        if isinstance(span.stage, RolloutStageConfig)
        for step in range(span.start + 1, span.end + 1)
    }
    if config.realtime is not None:
        users = range(spans[-1].start + 1, spans[-1].end + 1)
        bounds |= dict.fromkeys(users, config.realtime.max_versions_back)
    return bounds


def _fold(entries: list[Entry]) -> tuple[Ledger, list[str]]:
    ledger, violations = Ledger(), []
    for number, entry in enumerate(entries):
        try:
            ledger.apply(entry)
        except Unbalanced as e:
            violations.append(f"ledger entry {number}: {e}")
    return ledger, violations


def _trained_step(entries: list[Entry]) -> int:
    return max((entry.step for entry in entries if isinstance(entry, Trained)), default=-1)


def _token_versions(batch: Batch) -> set[int]:
    return {version for row in batch.rows for version in expand_spans(row.versions)}


def _lag(batch: Batch, batches: Mapping[int, Batch]) -> int | None:
    """The lag of the batch's oldest token, along the versions that the batch was made from; None if
    the token is from none of them."""
    bases = {step: found.base for step, found in batches.items() if found.base is not None}
    base = bases.get(batch.step, batch.step - 1)
    lags = [steps_back(version, base, bases) for version in _token_versions(batch)]
    return None if None in lags else max((lag for lag in lags if lag is not None), default=0)


def _check_batches(
    entries: list[Entry],
    batches: dict[int, Batch],
    groups: dict[str, Group],
    bounds: dict[int, int],
) -> Iterator[str]:
    told = {entry.step: set(entry.samples) for entry in entries if isinstance(entry, Batched)}
    attempts = {t.id: t for group in groups.values() for t in group.trajectories}
    for step in sorted(told.keys() - batches.keys()):
        yield f"the ledger has batch {step}, but the store does not"
    # A batch without an entry was written at the very moment of a crash; resuming the run enters
    # it.
    if sorted(batches) != list(bounds)[: len(batches)]:
        yield f"the batches have gaps, or belong to no rollout stage: {sorted(batches)}"
    for step, batch in batches.items():
        bound = bounds.get(step, 0)
        samples = {row.sample for row in batch.rows}
        # users who were deleted since then have been taken out
        gone = {sample for sample in told.get(step, samples) - samples if not is_of_user(sample)}
        if step in told and (gone or samples - told[step]):
            yield f"batch {step} has other samples than its ledger entry"
        if missing := {s for s in samples - attempts.keys() if not is_of_user(s)}:
            yield f"batch {step} trains on {sorted(missing)[0]}, which is in no stored group"
        for row in batch.rows:
            if len(list(expand_spans(row.versions))) != sum(row.mask):
                yield f"batch {step}, {row.sample}: not every sampled token has a version"
        if not batch.rows:
            continue
        oldest, lag = min(_token_versions(batch)), _lag(batch, batches)
        if oldest != batch.oldest and not all(map(is_of_user, samples)):
            yield (
                f"batch {step} says that its oldest token is from version {batch.oldest}; it is "
                f"from {oldest}"
            )
        if lag is None or not 0 <= lag <= bound:
            yield (
                f"batch {step} has a token of version {oldest}: its lag is not between 0 and "
                f"{bound}"
            )
        if too_old := [s for s in samples & attempts.keys() if _too_old(groups[group_of(s)])]:
            yield f"{too_old[0]} has a token that is older than its admission"


def _too_old(group: Group) -> bool:
    spans = [
        span for t in group.trajectories for segment in t.segments for span in segment.versions
    ]
    return any(span.version < group.admitted for span in spans)


def _check_versions(
    run: Run, entries: list[Entry], config: RunConfig, newest: int
) -> Iterator[str]:
    trained = _trained_step(entries)
    if trained > newest:
        yield (
            f"the ledger says that step {trained} is trained, but the newest published version "
            f"is {newest}"
        )
    kept = run.saved_version()
    if lost := [step for step in range(kept + 1, newest + 1) if not run.has_batch(step)]:
        yield (
            f"version {newest} is published, but the newest checkpoint is of version {kept}, and "
            f"there is no batch of step {lost[0]} to repeat"
        )
    if newest > stage_spans(config.stage)[-1].end:
        yield (
            f"version {newest} is published, but the last stage ends with "
            f"{stage_spans(config.stage)[-1].end}"
        )


def _check_drops(
    entries: list[Entry], groups: dict[str, Group], config: RunConfig
) -> Iterator[str]:
    """Check that samples were dropped for a reason that applies to them, and that interrupted ones
    were not finished."""
    issued = {sample for entry in entries if isinstance(entry, Issued) for sample in entry.samples}
    if strangers := {t.id for group in groups.values() for t in group.trajectories} - issued:
        yield (
            f"{len(strangers)} stored samples were never issued, for example {sorted(strangers)[0]}"
        )
    due = {
        (sample, drop.label)
        for group in groups.values()
        for drop in drops(_estimator(group, config).estimate(group))
        for sample in drop.samples
    }
    for entry in entries:
        if isinstance(entry, Dropped) and entry.reason not in ("interrupted", "cancelled"):
            yield from (
                f"{sample} was dropped as {entry.label}, but its group does not confirm this"
                for sample in entry.samples
                if (sample, entry.label) not in due and not is_of_user(sample)
            )
        if isinstance(entry, Dropped) and entry.reason == "interrupted":
            yield from (
                f"{sample} was dropped as interrupted, but its group was finished"
                for sample in entry.samples
                if group_of(sample) in groups
            )


def _check_rollouts(
    rows: list[RolloutRow],
    entries: list[Entry],
    ledger: Ledger,
    groups: dict[str, Group],
    finished: bool,
) -> Iterator[str]:
    """Check that every settled sample of a stored group has one row, which agrees with the
    ledger."""
    trained = [row for row in rows if row.kind == "train"]
    counts = Counter(row.id for row in trained)
    issued = {sample for entry in entries if isinstance(entry, Issued) for sample in entry.samples}
    yield from (f"{id} has {count} rows" for id, count in counts.items() if count > 1)
    for row in trained:
        told = row.dropped if row.step is None else row.step
        if row.id not in issued:
            yield f"{row.id} has a row, but was never issued"
        elif (fate := ledger.fate(row.id)) != told:
            yield f"the row of {row.id} says {told!r}, but the ledger {fate!r}"
    settled = _listed_by_now(entries, finished)
    due = {
        t.id
        for group in groups.values()
        if all(t.id in settled for t in group.trajectories)
        for t in group.trajectories
    }
    if missing := sorted(due - counts.keys()):
        yield f"{len(missing)} settled samples have no row, for example {missing[0]}"


def _listed_by_now(entries: list[Entry], finished: bool) -> set[str]:
    """The samples that were settled when rows were last certain to be written: those of one batch
    are written before the next batch is. In a finished run, all samples."""
    batches = [number for number, entry in enumerate(entries) if isinstance(entry, Batched)]
    end = len(entries) if finished else batches[-2] + 1 if len(batches) > 1 else 0
    return {
        sample
        for entry in entries[:end]
        if isinstance(entry, Batched | Dropped)
        for sample in entry.samples
    }


def _estimator(group: Group, config: RunConfig) -> AdvantageEstimator:
    """The advantage estimator of the loop that the group was made for."""
    stages = stage_spans(config.stage)
    span = next((span for span in stages if span.start <= group.admitted < span.end), stages[-1])
    return estimator_of(span.stage, config.model.max_context, quarantine=config.rewards.quarantines)
