"""The controller's journal: groups, batches, ledger entries and the rows of rollouts, written in
the order in which they happened.

Entries that a crash prevented are reconstructed by `recover`, because everything that an entry
refers to is written before it: a group before the entries that settle its samples, a batch before
the entry that records it. The rows of a group are written last of all: a settled group without rows
was written just before a crash, and gets them at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType

from etude.core.advantage import AdvantageEstimator, GroupOutcome, counted_rewards
from etude.core.curriculum import AskedTask
from etude.core.errors import EtudeError
from etude.core.ledger import Batched, Dropped, Entry, Issued, Ledger, Reason, Unbalanced
from etude.core.types import Batch, Group
from etude.store.objects import Missing
from etude.store.rollouts import RolloutFate, RolloutLog, RolloutRow, group_rows
from etude.store.runs import Run


class Journal:
    """The ledger in memory and on disk. Memory is updated first, and one thread writes in the same
    order: an entry never overtakes the one that it depends on, even if the caller was cancelled
    meanwhile."""

    def __init__(self, run: Run, entries: Iterable[Entry], unlisted: Iterable[Group] = ()) -> None:
        """`unlisted`: groups that are stored and have no rows yet."""
        self.ledger = Ledger(entries)
        self._run = run
        self._rollouts = RolloutLog(run.objects)
        self._unlisted = {group.id: group_rows(group) for group in unlisted}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")

    async def write(
        self,
        *entries: Entry,
        group: Group | None = None,
        batch: Batch | None = None,
        flush: bool = False,
    ) -> None:
        """Return when everything is stored. `flush`: also write the rows of all groups that are
        settled by now; with a batch they are always written."""
        for entry in entries:
            self.ledger.apply(entry)
        if group is not None:
            self._unlisted[group.id] = group_rows(group)
        rows = self._settled() if flush or batch is not None else []
        loop = asyncio.get_running_loop()
        await asyncio.shield(
            loop.run_in_executor(self._writer, self._store, entries, group, batch, rows)
        )

    def _settled(self) -> list[RolloutRow]:
        """The rows that can be written now, with the fate of each sample."""
        settled = []
        for group, rows in list(self._unlisted.items()):
            fates = [self.ledger.fate(row.id) for row in rows]
            if None not in fates:
                settled += [with_fate(row, fate) for row, fate in zip(rows, fates, strict=True)]
                del self._unlisted[group]
        return settled

    def _store(
        self,
        entries: tuple[Entry, ...],
        group: Group | None,
        batch: Batch | None,
        rows: list[RolloutRow],
    ) -> None:
        if group is not None:
            self._run.put_group(group)
        if batch is not None:
            self._run.put_batch(batch)
        if entries:
            self._run.ledger.append(*entries)
        self._rollouts.append(rows)


def with_fate(row: RolloutRow, fate: int | str | None) -> RolloutRow:
    return replace(row, step=fate) if isinstance(fate, int) else replace(row, dropped=fate)


def group_id(slot: int) -> str:
    return f"g{slot:06d}"


def group_of(sample: str) -> str:
    return sample.rpartition(".")[0]


def sample_ids(group: str, count: int) -> tuple[str, ...]:
    return tuple(f"{group}.{attempt}" for attempt in range(count))


def drops(outcome: GroupOutcome) -> list[Dropped]:
    """The entries for the samples of a finished group that will not be trained on."""
    entries = [
        Dropped(samples=outcome.failed, reason="failed"),
        Dropped(samples=tuple(outcome.malformed), reason="malformed"),
        *_by_detail("sampling", outcome.untrainable),
        *_by_detail("quarantined", outcome.quarantined),
        Dropped(samples=outcome.no_signal, reason="no_signal"),
        Dropped(samples=outcome.passed_over, reason="passed_over"),
    ]
    return [entry for entry in entries if entry.samples]


def _by_detail(reason: Reason, details: Mapping[str, str]) -> list[Dropped]:
    """The entries for samples with a detail. `details`: sample -> detail."""
    samples: defaultdict[str, list[str]] = defaultdict(list)
    for sample, detail in details.items():
        samples[detail].append(sample)
    return [
        Dropped(samples=tuple(same), reason=reason, detail=detail)
        for detail, same in samples.items()
    ]


@dataclass(frozen=True, slots=True)
class Recovered:
    """The state of a run after a stop or crash."""

    entries: list[Entry]
    """Entries to write first, which the stop prevented."""
    waiting: list[Group]
    """Finished groups that are in no batch yet."""
    past: list[AskedTask]
    """Every finished group, without those that were interrupted."""
    slots: int
    """The number of groups that were ever issued."""
    batched: int
    """The last step that has a batch; 0 if none has."""
    unlisted: list[Group]
    """Stored groups without rows of their rollouts."""

    @property
    def interrupted(self) -> tuple[str, ...]:
        """The samples that the stop cut short."""
        drops = (entry for entry in self.entries if isinstance(entry, Dropped))
        return tuple(s for drop in drops if drop.reason == "interrupted" for s in drop.samples)


def unrecorded(entries: Iterable[Entry], steps: Iterable[int]) -> list[int]:
    """The steps whose batch was written just before a crash, so that no entry records it."""
    told = {entry.step for entry in entries if isinstance(entry, Batched)}
    return sorted(set(steps) - told)


def recover(
    entries: list[Entry],
    batches: Mapping[int, Batch],
    finished: Mapping[str, Group],
    estimator: AdvantageEstimator,
    listed: Mapping[str, Sequence[RolloutFate]] = MappingProxyType({}),
) -> Recovered:
    """Reconstruct the state of a run. `batches`: the unrecorded ones. `finished`: every stored
    group that has open samples, or no rows (others do no harm). `listed`: the groups that have
    rows, with their content."""
    made: list[Entry] = [
        Batched(step=step, samples=tuple(dict.fromkeys(row.sample for row in batch.rows)))
        for step, batch in sorted(batches.items())
    ]
    open_by_group: defaultdict[str, list[str]] = defaultdict(list)
    for sample in Ledger([*entries, *made]).open_samples():
        open_by_group[group_of(sample)].append(sample)
    waiting = []
    for group, samples in open_by_group.items():
        if group not in finished:
            made.append(Dropped(samples=tuple(samples), reason="interrupted"))
            continue
        outcome = estimator.estimate(finished[group])
        made += [drop for drop in drops(outcome) if set(drop.samples) <= set(samples)]
        waiting += [finished[group]] if outcome.advantages else []

    all_entries = [*entries, *made]
    interrupted = _interrupted(all_entries)
    issued = [entry for entry in entries if isinstance(entry, Issued)]
    return Recovered(
        entries=made,
        waiting=waiting,
        past=[
            _asked(entry, finished, listed, estimator)
            for entry in issued
            if entry.group not in interrupted
        ],
        slots=len(issued),
        batched=max((entry.step for entry in all_entries if isinstance(entry, Batched)), default=0),
        unlisted=[group for name, group in sorted(finished.items()) if name not in listed],
    )


def _interrupted(entries: Iterable[Entry]) -> set[str]:
    """The groups that a stop cut short."""
    return {
        group_of(sample)
        for entry in entries
        if isinstance(entry, Dropped) and entry.reason == "interrupted"
        for sample in entry.samples
    }


def load(run: Run, estimator: AdvantageEstimator) -> tuple[list[Entry], Recovered]:
    """The entries on disk, and the state that follows from them and from the rest of the store."""
    entries = run.ledger.records()
    _check_batches(run, entries)
    try:
        return entries, _recovered(run, entries, estimator)
    except Unbalanced as e:
        raise EtudeError(
            f"{run.objects.url}: the ledger does not match the other files of the run ({e}), so "
            "a part of it is lost: restore it from a backup, or start over with --fresh"
        ) from e


def _recovered(run: Run, entries: list[Entry], estimator: AdvantageEstimator) -> Recovered:
    batches = {step: run.batch(step) for step in unrecorded(entries, run.batches())}
    listed = RolloutLog(run.objects).groups()
    issued = {entry.group for entry in entries if isinstance(entry, Issued)}
    opened = {group_of(sample) for sample in Ledger(entries).open_samples()}
    finished: dict[str, Group] = {}
    for name in opened | issued - listed.keys() - _interrupted(entries):
        # read by its name: a listing may be late, and the group's sessions would be lost
        with contextlib.suppress(Missing):
            finished[name] = run.group(name)
    return recover(entries, batches, finished, estimator, listed)


def _check_batches(run: Run, entries: Iterable[Entry]) -> None:
    """Refuse to resume without a batch that the trainer still needs, since it would wait forever.
    The checkpoints tell which batches are needed; a power cut may have destroyed the newest batch
    and left its entry."""
    saved = run.saved_version()
    for entry in entries:
        if isinstance(entry, Batched) and entry.step > saved and not run.has_batch(entry.step):
            raise EtudeError(
                f"{run.objects.url}: the batch of step {entry.step} is missing, but the ledger "
                f"says that it was made: restore batches/{entry.step:06d} from a backup, or "
                "start over with --fresh"
            )


def asked_task(issued: Issued, group: Group, outcome: GroupOutcome) -> AskedTask:
    """The record of a group that the curriculum learns from."""
    return AskedTask(
        task=issued.task,
        epoch=issued.epoch,
        version=issued.version,
        rewards=counted_rewards(group, outcome),
        kept=bool(outcome.advantages),
    )


def _asked(
    issued: Issued,
    finished: Mapping[str, Group],
    listed: Mapping[str, Sequence[RolloutFate]],
    estimator: AdvantageEstimator,
) -> AskedTask:
    """The same record, from the store: from the group itself, or from the rows of its attempts.
    Neither exists if a stage ended before the group did."""
    if (group := finished.get(issued.group)) is not None:
        return asked_task(issued, group, estimator.estimate(group))
    fates = listed.get(issued.group, ())
    return AskedTask(
        task=issued.task,
        epoch=issued.epoch,
        version=issued.version,
        rewards=tuple(
            fate.reward
            for fate in fates
            if fate.reward is not None
            and math.isfinite(fate.reward)
            and not (fate.dropped or "").startswith("quarantined")
        ),
        kept=any(fate.dropped in (None, "cancelled") for fate in fates),
    )
