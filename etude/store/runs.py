"""The layout of a run in its store.

    config.json              the settings that the run was started with
    model/                   the small files of its model, made from the config
    tasks/{split}.json       the tasks that it began with, by id and digest (`run.task_record`)
    ledger/N.jsonl           the fate of every sample
    events/{process}/N.jsonl events of each process, for people and the dashboard
    groups/{id}              finished groups, whole
    rollouts/                one row for every rollout, in Parquet (`store.rollouts`)
    batches/{step}           the input of each step; written once, never changed
    recomputed/{step}        the trainer's values for each token of a batch, row by row
    sessions/{shard}/        the gateway's journal of open sessions (`serve.session_journal`)
    closed-sessions/{shard}/ sessions whose tokens are no longer valid (`serve.closed_sessions`)
    revoked-tokens/          ids of tokens that are no longer valid (`serve.token_routes`)
    experts/{digest}         routed experts of recorded sessions (`store.experts`)
    realtime/                traffic changes and updates of real-time RL (`store.realtime`)
    production/              sessions and feedback of users (`store.production`)
    feedback/{trajectory}/   later feedback on a trajectory (`store.feedback`)
    verdicts/N.jsonl         people's verdicts on sessions (`store.verdicts`)
    checkpoints/{name}/      the trainer's state: the part of each rank, and manifest.json, which is
                             written last
    evals/{name}.json        held-out scores
    evals/{name}.sessions    the sessions behind them
    weights/                 published versions (see the package `weights`)

A batch is written once; a second, different one is refused. So is a config of another experiment,
as soon as there is work in the store. Every object ends with its digest (`store.codec`), except for
objects named by their digest, Parquet files, which contain their own, and published weights, which
have their own format. Foreign files among these (of a desktop or an editor) are ignored: a name
that does not have our form is not ours.
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
"""The form of the names in each folder."""


class Run:
    """One run in its store. Reading a missing object raises `Missing`, unless the method states
    otherwise."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.ledger: Log[Entry] = Log(objects, "ledger", get_args(Entry), durable=True)

    @classmethod
    def open(cls, url: str, *, create: bool = True) -> Run:
        return cls(Objects.open(url, create=create))

    def check_config(self, config: RunConfig) -> None:
        """Check that a config may continue the run. A run is one experiment: once there is work in
        it, only the settings that `core.changes` allows may differ from those that it was started
        with. A damaged ledger is reported here, too."""
        self.ledger.check_whole()
        if not (self.checkpoints() or self.ledger.end()):
            return
        otherwise = "choose another --dir, or start over with --fresh, which deletes this run"
        if not self.objects.exists(_CONFIG):
            raise EtudeError(
                f"{self.place} has a run without its config.json, so its settings are unknown: "
                f"restore the file from a backup, {otherwise}"
            )
        version = max(0, self.saved_version(), *self.batches())
        if refused := refused_changes(self.config(), config, version=version):
            changes = "".join(f"\n  {change}" for change in refused)
            raise EtudeError(
                f"{self.place} has a run that was started with other settings. These cannot "
                f"change within a run:{changes}\ncontinue with the old values, {otherwise}"
            )

    def put_config(self, config: RunConfig) -> None:
        self.check_config(config)
        there = self.config() if self.objects.exists(_CONFIG) else None
        if there == config:
            return
        if there is not None and refused_changes(there, config, version=0):
            self.objects.delete("model/config.json")  # created from the other config
        self.objects.put_sealed(_CONFIG, (config.model_dump_json(indent=1) + "\n").encode())

    def config(self) -> RunConfig:
        try:
            data = self.objects.get_sealed(_CONFIG)
        except Missing as e:
            raise Missing(
                f"{self.place} has no run: check the path{runs_below(self.place)}, or start one "
                f"with `etude run`"
            ) from e
        try:
            return RunConfig.model_validate_json(data)
        except ValueError as e:
            raise EtudeError(
                f"{self.objects.url}: config.json cannot be read; another version of etude may "
                f"have written it: {e}"
            ) from e

    def check_is_run(self) -> None:
        """Raises Missing, naming the runs below, if there is no run here."""
        self.config()

    def has_config(self) -> bool:
        """True if there is a config that was written by us: a model's config has the same name."""
        try:
            self.objects.get_sealed(_CONFIG)
        except (Missing, Damaged):
            return False
        return True

    def clear(self) -> None:
        """Delete the run, but no foreign files next to it. The config is deleted last, because it
        identifies the rest of an interrupted removal as a run."""
        for key in self.objects.list(""):
            if _is_of_run(key):
                self.objects.delete(key)
        self.objects.delete(_CONFIG)

    def last_written(self) -> float:
        """The time of the last write to the run, in seconds since the epoch; -inf if nothing is
        stored. The controller of an active run writes events every few seconds
        (`store.telemetry`)."""
        times = self.objects.times().items()
        return max((time for key, time in times if _is_of_run(key)), default=-math.inf)

    @property
    def place(self) -> str:
        """The run's location for people: the URL of a bucket, or the directory, which is relative
        if it is below this process's own."""
        written, here = self.objects.url.removeprefix("file:"), Path.cwd()
        path = Path(written)
        return str(path.relative_to(here)) if path.is_relative_to(here) else written

    def put_model_file(self, name: str, data: bytes) -> None:
        self.objects.put_sealed(f"model/{name}", data)

    def model_files(self) -> dict[str, bytes]:
        """The small files of the model, from before the run cut its context. Empty if the run was
        not prepared."""
        return {name: self.objects.get_sealed(f"model/{name}") for name in self._names("model")}

    def put_tasks(self, split: str, record: object) -> None:
        self.objects.put_sealed(f"tasks/{split}.json", to_json(record))

    def has_tasks(self, split: str) -> bool:
        return self.objects.exists(f"tasks/{split}.json")

    def tasks(self, split: str, type: type[R]) -> R:
        """The record that was passed to `put_tasks`."""
        key = f"tasks/{split}.json"
        return from_json(self.objects.get_sealed(key), type, f"{self.objects.url}: {key}")

    def events(
        self,
        process: str,
        kinds: Iterable[type[R]],
        skipped: Callable[[Damaged], None] | None = None,
    ) -> Log[R]:
        """The events of a process, buffered: the owner of the log flushes it periodically, and at
        the end."""
        return Log(self.objects, f"events/{process}", kinds, durable=False, skipped=skipped)

    def processes(self, known: Container[str] = ()) -> list[str]:
        """The processes that have written events. No request is made for those already `known`."""
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
            raise Damaged(f"{where} contains group {group.id} instead: restore it from a backup")
        return group

    def groups(self) -> list[str]:
        return self._names("groups")

    def put_batch(self, batch: Batch) -> None:
        """Store a batch. Refuses to change one, because its step may have been trained."""
        key, data = _batch_key(batch.step), seal(pack(batch))
        if not self.objects.create(key, data) and self.objects.get(key) != data:
            raise EtudeError(
                f"{self.objects.url}: a different {key} already exists; stop the other process "
                f"of this run, then start again"
            )

    def batch(self, step: int) -> Batch:
        return self._batch(step)[0]

    def has_batch(self, step: int) -> bool:
        return self.objects.exists(_batch_key(step))

    def wait_batch(self, step: int) -> tuple[Batch, bytes]:
        """Wait for a batch; return it, and the SHA-256 of the stored bytes. Blocks, which suits the
        trainer: it has nothing else to do."""
        while not self.has_batch(step):
            time.sleep(self.objects.poll_s)
        return self._batch(step)

    def _batch(self, step: int) -> tuple[Batch, bytes]:
        where = f"{self.objects.url}: {_batch_key(step)}"
        data = self.objects.get_sealed(_batch_key(step))
        batch = unpack(data, Batch, where)
        if batch.step != step:
            raise Damaged(
                f"{where} contains the batch of step {batch.step} instead: restore it from a backup"
            )
        return batch, hashlib.sha256(data).digest()

    def put_recomputed(self, step: int, rows: tuple[RecomputedRow, ...]) -> None:
        self.objects.put_sealed(f"recomputed/{step:06d}", pack(rows))

    def delete_recomputed(self, step: int) -> None:
        self.objects.delete(f"recomputed/{step:06d}")

    def recomputed(self, step: int) -> tuple[RecomputedRow, ...]:
        """The recomputed rows of that step's batch, in order."""
        key = f"recomputed/{step:06d}"
        return unpack(
            self.objects.get_sealed(key), tuple[RecomputedRow, ...], f"{self.objects.url}: {key}"
        )

    def batches(self) -> list[int]:
        """The steps that have a batch."""
        return [int(name) for name in self._names("batches")]

    def put_checkpoint_part(self, name: str, part: str, data: bytes) -> None:
        self.objects.put(f"checkpoints/{name}/{part}", data)

    def checkpoint_part(self, name: str, part: str) -> bytes:
        return self.objects.get(f"checkpoints/{name}/{part}")

    def checkpoint_parts(self) -> list[tuple[str, str]]:
        """All stored pairs (checkpoint, part), including those of checkpoints without a
        manifest."""
        found = (name.partition("/") for name in self._names("checkpoints"))
        return [(name, part) for name, _, part in found if part != _MANIFEST]

    def put_checkpoint(self, name: str, manifest: bytes) -> None:
        """Store the manifest, which commits the checkpoint. Names sort by age: the newest
        checkpoint is the last of `checkpoints()`."""
        self.objects.put_sealed(f"checkpoints/{name}/{_MANIFEST}", manifest)

    def has_checkpoint(self, name: str) -> bool:
        return self.objects.exists(f"checkpoints/{name}/{_MANIFEST}")

    def checkpoint(self, name: str) -> bytes:
        """The manifest of a checkpoint."""
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
        """Delete a checkpoint, its manifest first: a checkpoint without all its parts must not look
        like one."""
        self.objects.delete(f"checkpoints/{name}/{_MANIFEST}")
        for key in self.objects.list(f"checkpoints/{name}"):
            self.objects.delete(key)

    def sweep_checkpoints(self) -> None:
        """Remove files that a killed trainer left half-written. Only while no checkpoint is being
        written."""
        self.objects.sweep("checkpoints")

    def put_eval(self, name: str, report: object) -> None:
        self.objects.put_sealed(f"evals/{name}.json", to_json(report))

    def eval(self, name: str, type: type[R]) -> R:
        key = f"evals/{name}.json"
        return from_json(self.objects.get_sealed(key), type, f"{self.objects.url}: {key}")

    def put_eval_sessions(self, name: str, trajectories: Iterable[Trajectory]) -> str:
        """Store the sessions of an evaluation for people to read, without the tokens of those that
        have a conversation. Return the key of the object."""
        kept = tuple(replace(t, segments=()) if t.messages else t for t in trajectories)
        key = f"evals/{name}.sessions"
        self.objects.put_sealed(key, pack(kept))
        return key

    def eval_sessions(self, name: str) -> tuple[Trajectory, ...]:
        return self.sessions(f"evals/{name}.sessions")

    def sessions(self, key: str) -> tuple[Trajectory, ...]:
        """All sessions in one object: a group, or an evaluation."""
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
    """The runs of a project's folder, where `etude run` was started, or of its folder `runs`, as
    text; empty if there are none."""
    folder = Path(place) if Path(place).name == "runs" else Path(place, "runs")
    found = sorted(path.parent for path in folder.glob("*/config.json"))
    return f" (there is {', '.join(map(str, found))})" if found else ""


def _is_of_run(key: str) -> bool:
    return key.partition("/")[0] in FOLDERS


def _batch_key(step: int) -> str:
    return f"batches/{step:06d}"
