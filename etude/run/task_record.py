"""A record of the tasks that a run began with, to check that those of a later start are the same.

A run may be stopped for days, and its environment may read sources that change: a branch, a file, a
dataset. If a task that was trained on became a held-out one meanwhile, no score of the run would
mean anything, and nothing else would reveal it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from etude.core.errors import EtudeError
from etude.core.sandbox import Limits
from etude.core.types import EVAL_SPLITS, Task
from etude.store.runs import Run

NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """The tasks of a split as recorded with the run."""

    digests: dict[str, str]
    """Digests by task id."""
    commits: tuple[str, ...]
    """Commits of the repositories that their working copies come from."""

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> TaskRecord:
        repositories = [task.sandbox.repository for task in tasks]
        return cls(
            digests={task.id: _digest(task) for task in tasks},
            commits=tuple(sorted({each.commit for each in repositories if each is not None})),
        )


def recorded_counts(run: Run) -> dict[str, int]:
    """The number of tasks of each split that the run began with, for the splits that are
    recorded."""
    return {
        split: len(run.tasks(split, TaskRecord).digests)
        for split in ("train", *EVAL_SPLITS)
        if run.has_tasks(split)
    }


def keep_record(run: Run, split: str, tasks: Sequence[Task]) -> None:
    """Record the tasks as those that the run begins with, unless one of them was attempted already;
    after that, refuse other tasks."""
    check_record(run, split, tasks)
    if not (run.has_tasks(split) and _is_begun(run)):
        run.put_tasks(split, TaskRecord.of(tasks))


def _is_begun(run: Run) -> bool:
    return bool(run.ledger.end() or run.evals())


def check_record(run: Run, split: str, tasks: Sequence[Task]) -> None:
    """Refuse tasks that differ from those that the run began with; changes nothing."""
    if not (run.has_tasks(split) and _is_begun(run)):
        return
    here, there = TaskRecord.of(tasks), run.tasks(split, TaskRecord)
    if there.digests != here.digests:
        raise EtudeError(
            f"the tasks of the split {split!r} differ from those that the run started with: "
            f"{_differences(there.digests, here.digests)}. They cannot change within a run, or "
            f"tasks it was trained on might now be held out: {_way_back(there, here)}, choose "
            "another --dir, or start over with --fresh, which deletes this run"
        )


def _digest(task: Task) -> str:
    """The digest of a task, without the parts that only tell how a machine carries it out: the
    place of a repository, and limits."""
    sandbox = replace(task.sandbox, limits=Limits())
    if sandbox.repository is not None:
        sandbox = replace(sandbox, repository=replace(sandbox.repository, url=""))
    told = msgspec.json.encode(
        replace(task, sandbox=sandbox), enc_hook=_plain, order="deterministic"
    )
    return hashlib.blake2b(told, digest_size=16).hexdigest()


def _plain(value: object) -> object:
    """A stand-in for a value that is not JSON. Its text may contain the object's address, which
    differs in every process."""
    return dict(value) if isinstance(value, Mapping) else type(value).__name__


def _differences(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    found = {
        "new": [id for id in here if id not in there],
        "gone": [id for id in there if id not in here],
        "changed": [id for id in here if id in there and here[id] != there[id]],
    }
    return "; ".join(
        f"{len(ids)} {what} ({', '.join(ids[:NAMED])}{', ...' if len(ids) > NAMED else ''})"
        for what, ids in found.items()
        if ids
    )


def _way_back(there: TaskRecord, here: TaskRecord) -> str:
    if there.commits and there.commits != here.commits:
        was, now = (", ".join(each.commits) or "none" for each in (there, here))
        return (
            f"their repository was at commit {was}, and is at {now}: have the environment use "
            "the old commit (REF in what `etude init` writes)"
        )
    return "restore the environment and the files it reads"
