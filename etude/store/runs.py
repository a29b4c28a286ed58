"""Where everything of one run lies, in one place.

    config.json              what the run was started with
    ledger/N.jsonl           what became of every sample
    events/{process}/N.jsonl what each process did, for people and the dashboard
    groups/{id}              finished groups, whole
    batches/{step}           what each step reads; made once, never changed
    checkpoints/{name}       the trainer's state (bytes that only `train/` understands)
    evals/{name}.json        held-out scores
    weights/                 published versions (the package `weights` knows the rest)

The config and a batch are written once; a second, different one is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import TypeVar, get_args

from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.ledger import Entry
from etude.core.types import Batch, Group, Json
from etude.store.codec import from_json, pack, to_json, unpack
from etude.store.log import Log
from etude.store.objects import Missing, Objects

R = TypeVar("R")

_POLL_S = 0.05


class Run:
    """One run in its store. Reading what is not there raises `Missing`, unless the method says otherwise."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.ledger: Log[Entry] = Log(objects, "ledger", get_args(Entry), durable=True)

    @classmethod
    def open(cls, url: str, *, create: bool = True) -> Run:
        return cls(Objects.open(url, create=create))

    def put_config(self, config: RunConfig) -> None:
        """Once. The same config again is fine; another one is refused: a run is one experiment."""
        data = (config.model_dump_json(indent=1) + "\n").encode()
        if not self.objects.create("config.json", data) and (there := self.config()) != config:
            raise EtudeError(
                f"{self.objects.url} holds a run with another config (they differ in: {_differences(there, config)}); "
                f"give this one another name, or go on with the config it was started with"
            )

    def config(self) -> RunConfig:
        try:
            data = self.objects.get("config.json")
        except Missing as e:
            raise Missing(f"{self.objects.url} holds no run: check the path, or start one with `etude run`") from e
        try:
            return RunConfig.model_validate_json(data)
        except ValueError as e:
            raise EtudeError(f"{self.objects.url}: config.json was written by another version of etude: {e}") from e

    def events(self, process: str, kinds: Iterable[type[R]]) -> Log[R]:
        """Buffered: whoever owns the log flushes it now and then, and at the end."""
        return Log(self.objects, f"events/{process}", kinds, durable=False)

    def processes(self) -> list[str]:
        """Those that have written events."""
        return sorted({PurePosixPath(key).parts[1] for key in self.objects.list("events")})

    def put_group(self, group: Group) -> None:
        self.objects.put(f"groups/{group.id}", pack(group))

    def group(self, id: str) -> Group:
        return unpack(self.objects.get(f"groups/{id}"), Group, f"{self.objects.url}: groups/{id}")

    def groups(self) -> list[str]:
        return self._names("groups")

    def put_batch(self, batch: Batch) -> None:
        """Refuses to change a batch: the step that it belongs to may have been trained."""
        key, data = _batch_key(batch.step), pack(batch)
        if not self.objects.create(key, data) and self.objects.get(key) != data:
            raise EtudeError(
                f"{self.objects.url}: there is another {key} already; stop the other process that works on this run, "
                f"then start again"
            )

    def batch(self, step: int) -> Batch:
        key = _batch_key(step)
        return unpack(self.objects.get(key), Batch, f"{self.objects.url}: {key}")

    def wait_batch(self, step: int) -> Batch:
        """Blocks until it is there. For the trainer, which has nothing else to do."""
        while not self.objects.exists(_batch_key(step)):
            time.sleep(_POLL_S)
        return self.batch(step)

    def batches(self) -> list[int]:
        """The steps that have one."""
        return [int(name) for name in self._names("batches")]

    def put_checkpoint(self, name: str, data: bytes) -> None:
        """Names sort by age: the newest checkpoint is the last of `checkpoints()`."""
        self.objects.put(f"checkpoints/{name}", data)

    def checkpoint(self, name: str) -> bytes:
        return self.objects.get(f"checkpoints/{name}")

    def checkpoints(self) -> list[str]:
        return self._names("checkpoints")

    def delete_checkpoint(self, name: str) -> None:
        self.objects.delete(f"checkpoints/{name}")

    def put_eval(self, name: str, report: object) -> None:
        self.objects.put(f"evals/{name}.json", to_json(report))

    def eval(self, name: str, type: type[R]) -> R:
        return from_json(self.objects.get(f"evals/{name}.json"), type, f"{self.objects.url}: evals/{name}.json")

    def evals(self) -> list[str]:
        return [name.removesuffix(".json") for name in self._names("evals")]

    def _names(self, folder: str) -> list[str]:
        return [key.removeprefix(f"{folder}/") for key in self.objects.list(folder)]


def _batch_key(step: int) -> str:
    return f"batches/{step:06d}"


def _differences(there: RunConfig, here: RunConfig) -> str:
    def flat(value: Json, path: str) -> dict[str, str]:
        if isinstance(value, dict):
            return {p: v for key, inner in value.items() for p, v in flat(inner, f"{path}.{key}").items()}
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return flat({inner["kind"]: inner for inner in value}, path)
        return {path.removeprefix("."): json.dumps(value)}

    old, new = flat(there.model_dump(mode="json"), ""), flat(here.model_dump(mode="json"), "")
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return ", ".join(f"{key} {old.get(key, 'absent')} there and {new.get(key, 'absent')} here" for key in keys)
