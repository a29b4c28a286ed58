"""Storage of real-time RL in the run's store, apart from batches, versions and reports.

    realtime/changes/{number:06d}.json   a `core.traffic.Change`
    realtime/updates/{step:06d}.json     an `UpdateRecord`: the sources of a step's batch
    realtime/forgotten/{user}.json       a `Forgotten`: the versions that have seen a deleted user
    realtime/lives/{number:06d}.json     the start of a loop; only the newest loop continues

A change is created once and never changed. A person's command or the loop, whichever loses the race
for a number, reads the current state again: nothing is decided twice, and nothing on stale
knowledge.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TypeVar

from etude.core.advantage import oldest_version
from etude.core.errors import EtudeError
from etude.core.traffic import Change
from etude.core.types import Batch
from etude.core.updates import Forgotten, UpdateRecord
from etude.store.codec import from_json, pack, seal, to_json
from etude.store.log import first_free
from etude.store.objects import Missing, Objects, ReadOnce
from etude.store.runs import Run

CHANGES, UPDATES, FORGOTTEN = "realtime/changes", "realtime/updates", "realtime/forgotten"
LIVES = "realtime/lives"
T = TypeVar("T")
_UPDATE = re.compile(rf"{UPDATES}/(\d{{6,}})\.json")


class TrafficLog:
    """The log of traffic changes; any number of writers and readers."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._known: list[Change] = []

    def changes(self) -> list[Change]:
        """All changes, oldest first. Costs a single existence check if there is nothing new."""
        known = len(self._known)
        end = first_free(self._objects, CHANGES, _change_key, known)
        self._known += [self._read(number) for number in range(known, end)]
        return list(self._known)

    def newest(self) -> Change | None:
        return changes[-1] if (changes := self.changes()) else None

    def append(self, change: Change) -> bool:
        """False if another change has that number."""
        return self._objects.create(_change_key(change.number), seal(to_json(change)))

    def _read(self, number: int) -> Change:
        key = _change_key(number)
        return from_json(self._objects.get_sealed(key), Change, f"{self._objects.url}: {key}")


class Life:
    """A loop's right to work on a run, until another one begins."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._number = first_free(objects, LIVES, _life_key, 0)
        while not objects.create(_life_key(self._number), b"{}"):
            self._number += 1

    def check(self) -> None:
        if first_free(self._objects, LIVES, _life_key, self._number + 1) > self._number + 1:
            raise EtudeError(
                f"{self._objects.url}: another real-time loop has started on this run; this one "
                f"stops, so that no update is made twice"
            )


def create_update(run: Run, record: UpdateRecord) -> None:
    """Create the record of an update, before its batch: a record without a batch, left by a killed
    loop, is written again, and a record with a batch is never changed."""
    key, data = _update_key(record.step), seal(to_json(record))
    if not run.objects.create(key, data):
        if record.step in run.batches():
            raise EtudeError(
                f"{run.objects.url}: another real-time loop has made the batch of step "
                f"{record.step}; stop one of the two"
            )
        run.objects.put(key, data)


class UpdateLog:
    """The sources of updates, and the users forgotten since; for processes that poll them."""

    def __init__(self, run: Run) -> None:
        self._records = ReadOnce(run.objects, UPDATES, lambda key: _read(run, key, UpdateRecord))
        self._forgotten = ReadOnce(run.objects, FORGOTTEN, lambda key: _read(run, key, Forgotten))

    def records(self) -> dict[int, UpdateRecord]:
        """The records by step, of steps whose batch is or was stored."""
        found = [r for key, r in self._records.items().items() if _UPDATE.fullmatch(key)]
        return {record.step: record for record in sorted(found, key=lambda record: record.step)}

    def forgotten(self) -> list[Forgotten]:
        return list(self._forgotten.items().values())


def updates(run: Run) -> dict[int, UpdateRecord]:
    return UpdateLog(run).records()


def forget_user(run: Run, forgotten: Forgotten) -> None:
    """Remove a user's tokens and rewards from the batches of these steps, which are already
    trained, and record which weights have seen them. The record is written first, without a time:
    after a crash in the middle, the steps could no longer be determined from the remaining data."""
    key = f"{FORGOTTEN}/{forgotten.user}.json"
    run.objects.put_sealed(key, to_json(replace(forgotten, time=0.0)))
    for step in forgotten.steps:
        batch = run.batch(step)
        rows = tuple(row for row in batch.rows if not _is_of(row.sample, forgotten.user))
        oldest = oldest_version(rows) if rows else batch.oldest
        _replace_batch(run, replace(batch, rows=rows, oldest=oldest))
        record = _read(run, _update_key(step), UpdateRecord)
        left = tuple(one for one in record.answers if not _is_of(one.sample, forgotten.user))
        run.objects.put_sealed(_update_key(step), to_json(replace(record, answers=left)))
        run.delete_recomputed(step)
    run.objects.put_sealed(key, to_json(forgotten))


def forgotten(run: Run, user: str) -> Forgotten | None:
    try:
        return _read(run, f"{FORGOTTEN}/{user}.json", Forgotten)
    except Missing:
        return None


def _is_of(sample: str, user: str) -> bool:
    return sample.startswith(f"{user}.")


def _replace_batch(run: Run, batch: Batch) -> None:
    run.objects.put(f"batches/{batch.step:06d}", seal(pack(batch)))


def _read(run: Run, key: str, kind: type[T]) -> T:
    return from_json(run.objects.get_sealed(key), kind, f"{run.objects.url}: {key}")


def _change_key(number: int) -> str:
    return f"{CHANGES}/{number:06d}.json"


def _life_key(number: int) -> str:
    return f"{LIVES}/{number:06d}.json"


def _update_key(step: int) -> str:
    return f"{UPDATES}/{step:06d}.json"
