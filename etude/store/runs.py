"""The layout of a run in its store.

    config.json              what the run was started with
    model/                   the small files of its model, made from the config
    tasks/{split}.json       the tasks that it began with, by id and digest (`run.task_record`)
    ledger/N.jsonl           what became of every sample
    events/{process}/N.jsonl what each process did, for people and the dashboard
    groups/{id}              finished groups, whole
    rollouts/                one row for every rollout, in Parquet (`store.rollouts`)
    batches/{step}           what each step reads; made once, never changed
    recomputed/{step}        what the trainer found for each token of a batch, row by row
    sessions/{shard}/        the gateway's journal of open sessions (`serve.session_journal`)
    closed-sessions/{shard}/ those whose tokens open nothing any more (`serve.closed_sessions`)
    revoked-tokens/          ids of tokens that open nothing any more (`serve.token_routes`)
    experts/{digest}         routed experts of recorded sessions (`store.experts`)
    realtime/                what users are answered by, and learnt from (`store.realtime`)
    production/              sessions and feedback of users (`store.production`)
    feedback/{trajectory}/   what was said of a trajectory later (`store.feedback`)
    verdicts/N.jsonl         what people said of sessions (`store.verdicts`)
    checkpoints/{name}/      the trainer's state: what each rank holds, and manifest.json, which is
                             written last
    evals/{name}.json        held-out scores
    evals/{name}.sessions    the sessions behind them
    weights/                 published versions (the package `weights` knows the rest)

A batch is written once; a second, different one is refused. So is a config of another experiment,
as soon as there is work in the store. Every object ends with its digest (`store.codec`), unless its
name is one, it holds its own (Parquet), or the weight plane has its own way. Files that others put
among these (a desktop's, an editor's) are not seen: a name that is not of our form is not ours.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, get_args

from etude.core.changes import refused_changes
from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.ledger import Entry
from etude.core.types import Batch, Group, RecomputedRow, Trajectory
from etude.store.codec import Damaged, from_json, pack, seal, to_json, unpack
from etude.store.log import Log
from etude.store.objects import Missing, Objects

R = TypeVar("R")

FOLDERS = (
    "model", "tasks", "ledger", "events", "groups", "rollouts", "batches", "recomputed", "sessions",
    "closed-sessions", "revoked-tokens", "experts", "realtime", "production", "feedback",
    "verdicts", "checkpoints", "evals", "weights",
)  # fmt: skip
_CONFIG = "config.json"
_MANIFEST = "manifest.json"
_NUMBER = "(?:[0-9]{6}|[1-9][0-9]{6,})"
_NAMES = {
    "groups": rf"g{_NUMBER}|s{_NUMBER}-\d+",  # s: `run.realtime_simulated`
    "batches": _NUMBER,
    "checkpoints": rf"{_NUMBER}\.{_NUMBER}/(?:{re.escape(_MANIFEST)}|[0-9]{{5,}}\.[0-9a-f]+)",
    "evals": rf"{_NUMBER}\.\w+\.json",
    "model": r"(?:config|tokenizer|tokenizer_config|generation_config|adapter_config)\.json"
    r"|chat_template\.jinja",
}
"""The form of what lies in each folder."""


class Run:
    """One run in its store. Reading what is not there raises `Missing`, unless the method says
    otherwise."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.ledger: Log[Entry] = Log(objects, "ledger", get_args(Entry), durable=True)

    @classmethod
    def open(cls, url: str, *, create: bool = True) -> Run:
        return cls(Objects.open(url, create=create))

    def check_config(self, config: RunConfig) -> None:
        """A run is one experiment: once there is work in it, only what `core.changes` allows may
        differ from what it was started with. What is lost of its ledger is told here, too."""
        self.ledger.check_whole()
        if not (self.checkpoints() or self.ledger.end()):
            return
        otherwise = "choose another --dir, or begin anew with --fresh, which removes this one"
        if not self.objects.exists(_CONFIG):
            raise EtudeError(
                f"{self.place} holds a run that has lost its config.json, and nothing else "
                f"says what it was started with: bring the file back from a copy, {otherwise}"
            )
        version = max(0, self.saved_version(), *self.batches())
        if refused := refused_changes(self.config(), config, version=version):
            changes = "".join(f"\n  {change}" for change in refused)
            raise EtudeError(
                f"{self.place} holds a run that was started with other settings. These "
                f"cannot change within a run:{changes}\ngo on with the old values, {otherwise}"
            )

    def put_config(self, config: RunConfig) -> None:
        self.check_config(config)
        there = self.config() if self.objects.exists(_CONFIG) else None
        if there == config:
            return
        if there is not None and refused_changes(there, config, version=0):
            self.objects.delete("model/config.json")  # made from the other config
        self.objects.put_sealed(_CONFIG, (config.model_dump_json(indent=1) + "\n").encode())

    def config(self) -> RunConfig:
        try:
            data = self.objects.get_sealed(_CONFIG)
        except Missing as e:
            raise Missing(
                f"{self.place} holds no run: check the path{runs_below(self.place)}, or start one "
                f"with `etude run`"
            ) from e
        try:
            return RunConfig.model_validate_json(data)
        except ValueError as e:
            raise EtudeError(
                f"{self.objects.url}: config.json was written by another version of etude: {e}"
            ) from e

    def check_is_run(self) -> None:
        """Raises Missing, with where runs are, if there is none here."""
        self.config()

    def has_config(self) -> bool:
        """Whether there is a config that was written by us: a model's has the same name."""
        try:
            self.objects.get_sealed(_CONFIG)
        except (Missing, Damaged):
            return False
        return True

    def clear(self) -> None:
        """Deletes the run, and nothing that others have put beside it. The config goes last: what
        is left of a removal that was broken off is known as a run by it."""
        for key in self.objects.list(""):
            if _is_of_run(key):
                self.objects.delete(key)
        self.objects.delete(_CONFIG)

    def last_written(self) -> float:
        """When anything of the run was, in seconds since the epoch; -inf if nothing is there. The
        controller of a run that goes on writes events every few seconds (`store.telemetry`)."""
        times = self.objects.times().items()
        return max((time for key, time in times if _is_of_run(key)), default=-math.inf)

    @property
    def place(self) -> str:
        """As people write it: the URL of a bucket, or the directory, which is relative if it is
        below this process's own."""
        written, here = self.objects.url.removeprefix("file:"), Path.cwd()
        path = Path(written)
        return str(path.relative_to(here)) if path.is_relative_to(here) else written

    def put_model_file(self, name: str, data: bytes) -> None:
        self.objects.put_sealed(f"model/{name}", data)

    def model_files(self) -> dict[str, bytes]:
        """The small files of the model, as they were before the run cut its context. Empty if the
        run was not prepared."""
        return {name: self.objects.get_sealed(f"model/{name}") for name in self._names("model")}

    def put_tasks(self, split: str, record: object) -> None:
        self.objects.put_sealed(f"tasks/{split}.json", to_json(record))

    def has_tasks(self, split: str) -> bool:
        return self.objects.exists(f"tasks/{split}.json")

    def tasks(self, split: str, type: type[R]) -> R:
        """What `put_tasks` was given."""
        key = f"tasks/{split}.json"
        return from_json(self.objects.get_sealed(key), type, f"{self.objects.url}: {key}")

    def events(
        self,
        process: str,
        kinds: Iterable[type[R]],
        skipped: Callable[[Damaged], None] | None = None,
    ) -> Log[R]:
        """Buffered: whoever owns the log flushes it now and then, and at the end."""
        return Log(self.objects, f"events/{process}", kinds, durable=False, skipped=skipped)

    def processes(self, known: Container[str] = ()) -> list[str]:
        """Those that have written events. Of those that are known so far, nothing is asked."""
        return [
            name
            for name in self.objects.folders("events")
            if name in known or self.objects.exists(f"events/{name}/{0:010d}.jsonl")
        ]

    def put_group(self, group: Group) -> None:
        self.objects.put_sealed(f"groups/{group.id}", pack(group))

    def group(self, id: str) -> Group:
        where = f"{self.objects.url}: groups/{id}"
        group = unpack(self.objects.get_sealed(f"groups/{id}"), Group, where)
        if group.id != id:
            raise Damaged(f"{where} holds group {group.id}: bring it back from a copy")
        return group

    def groups(self) -> list[str]:
        return self._names("groups")

    def put_batch(self, batch: Batch) -> None:
        """Refuses to change a batch: the step that it belongs to may have been trained."""
        key, data = _batch_key(batch.step), seal(pack(batch))
        if not self.objects.create(key, data) and self.objects.get(key) != data:
            raise EtudeError(
                f"{self.objects.url}: there is another {key} already; stop the other process that "
                f"works on this run, "
                f"then start again"
            )

    def batch(self, step: int) -> Batch:
        return self._batch(step)[0]

    def has_batch(self, step: int) -> bool:
        return self.objects.exists(_batch_key(step))

    def wait_batch(self, step: int) -> tuple[Batch, bytes]:
        """The batch, and the SHA-256 of what is stored. Blocks until it is there. For the trainer,
        which has nothing else to do."""
        while not self.has_batch(step):
            time.sleep(self.objects.poll_s)
        return self._batch(step)

    def _batch(self, step: int) -> tuple[Batch, bytes]:
        where = f"{self.objects.url}: {_batch_key(step)}"
        data = self.objects.get_sealed(_batch_key(step))
        batch = unpack(data, Batch, where)
        if batch.step != step:
            raise Damaged(
                f"{where} holds the batch of step {batch.step}: bring it back from a copy"
            )
        return batch, hashlib.sha256(data).digest()

    def put_recomputed(self, step: int, rows: tuple[RecomputedRow, ...]) -> None:
        self.objects.put_sealed(f"recomputed/{step:06d}", pack(rows))

    def delete_recomputed(self, step: int) -> None:
        self.objects.delete(f"recomputed/{step:06d}")

    def recomputed(self, step: int) -> tuple[RecomputedRow, ...]:
        """Of the rows of that step's batch, in their order."""
        key = f"recomputed/{step:06d}"
        return unpack(
            self.objects.get_sealed(key), tuple[RecomputedRow, ...], f"{self.objects.url}: {key}"
        )

    def batches(self) -> list[int]:
        """The steps that have one."""
        return [int(name) for name in self._names("batches")]

    def put_checkpoint_part(self, name: str, part: str, data: bytes) -> None:
        self.objects.put(f"checkpoints/{name}/{part}", data)

    def checkpoint_part(self, name: str, part: str) -> bytes:
        return self.objects.get(f"checkpoints/{name}/{part}")

    def checkpoint_parts(self) -> list[tuple[str, str]]:
        """(checkpoint, part) of all that are there, those of checkpoints without a manifest too."""
        found = (name.partition("/") for name in self._names("checkpoints"))
        return [(name, part) for name, _, part in found if part != _MANIFEST]

    def put_checkpoint(self, name: str, manifest: bytes) -> None:
        """Now it is there. Names sort by age: the newest checkpoint is the last of
        `checkpoints()`."""
        self.objects.put_sealed(f"checkpoints/{name}/{_MANIFEST}", manifest)

    def has_checkpoint(self, name: str) -> bool:
        return self.objects.exists(f"checkpoints/{name}/{_MANIFEST}")

    def checkpoint(self, name: str) -> bytes:
        """Its manifest."""
        return self.objects.get_sealed(f"checkpoints/{name}/{_MANIFEST}")

    def checkpoints(self) -> list[str]:
        names = self._names("checkpoints")
        return [
            name.removesuffix(f"/{_MANIFEST}") for name in names if name.endswith(f"/{_MANIFEST}")
        ]

    def saved_version(self) -> int:
        """Of the newest checkpoint; -1 if there is none."""
        return max((int(name.partition(".")[0]) for name in self.checkpoints()), default=-1)

    def checkpoint_bytes(self, name: str) -> int:
        return self.objects.size(f"checkpoints/{name}")

    def delete_checkpoint(self, name: str) -> None:
        """The manifest first: a checkpoint without all its parts must not look like one."""
        self.objects.delete(f"checkpoints/{name}/{_MANIFEST}")
        for key in self.objects.list(f"checkpoints/{name}"):
            self.objects.delete(key)

    def sweep_checkpoints(self) -> None:
        """Removes what a killed trainer was in the middle of writing. For a time in which nobody
        writes one."""
        self.objects.sweep("checkpoints")

    def put_eval(self, name: str, report: object) -> None:
        self.objects.put_sealed(f"evals/{name}.json", to_json(report))

    def eval(self, name: str, type: type[R]) -> R:
        key = f"evals/{name}.json"
        return from_json(self.objects.get_sealed(key), type, f"{self.objects.url}: {key}")

    def put_eval_sessions(self, name: str, trajectories: Iterable[Trajectory]) -> str:
        """For people to read, so without the tokens of those that left a conversation. Return the
        key of the object."""
        kept = tuple(replace(t, segments=()) if t.messages else t for t in trajectories)
        key = f"evals/{name}.sessions"
        self.objects.put_sealed(key, pack(kept))
        return key

    def eval_sessions(self, name: str) -> tuple[Trajectory, ...]:
        return self.sessions(f"evals/{name}.sessions")

    def sessions(self, key: str) -> tuple[Trajectory, ...]:
        """All that lie in one object: a group, or an evaluation."""
        folder, _, name = key.partition("/")
        if folder == "groups":
            return self.group(name).trajectories
        where = f"{self.objects.url}: {key}"
        return unpack(self.objects.get_sealed(key), tuple[Trajectory, ...], where)

    def evals(self) -> list[str]:
        return [name.removesuffix(".json") for name in self._names("evals")]

    def _names(self, folder: str) -> list[str]:
        names = (key.removeprefix(f"{folder}/") for key in self.objects.list(folder))
        return [name for name in names if re.fullmatch(_NAMES[folder], name)]


def runs_below(place: str) -> str:
    """Those of a project's folder, in which `etude run` was started, or of its folder `runs`, in
    words; empty if there are none."""
    folder = Path(place) if Path(place).name == "runs" else Path(place, "runs")
    found = sorted(path.parent for path in folder.glob("*/config.json"))
    return f" (there is {', '.join(map(str, found))})" if found else ""


def _is_of_run(key: str) -> bool:
    return key.partition("/")[0] in FOLDERS


def _batch_key(step: int) -> str:
    return f"batches/{step:06d}"
