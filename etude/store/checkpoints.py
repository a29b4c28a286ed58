"""A trainer's checkpoints in the store of its run: written in the background, and stored
atomically.

    checkpoints/{name}/{rank}.{sha256}   the state of one rank
    checkpoints/{name}/manifest.json     a `Checkpoint`: written last, by rank 0, when the parts of
                                         all ranks are stored

A checkpoint is named `version.step`: this many steps of the running stage after that version. Ranks
learn from the store that the others have written their parts, and so need no collective while they
train. Parts that a killed trainer has left without a manifest are removed when the next one starts.
"""

from __future__ import annotations

import hashlib
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from etude import __version__
from etude.core.errors import EtudeError
from etude.core.types import Json
from etude.store.codec import Damaged, from_json, to_json
from etude.store.objects import Missing
from etude.store.runs import Run

KEEP_CHECKPOINTS = 2
PARTS_TIMEOUT_S = 600.0
"""The longest wait of rank 0 for the parts of the others."""
POLL_S = 0.05
GO_BACK = "remove that checkpoint, and the run continues from the one before"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One stage of the lineage that led to a checkpoint."""

    stage: str
    parent: str
    """The weights that it started from."""
    config: dict[str, Json]
    """The config of the stage."""
    data: str
    """The data that it learned from, with a digest."""
    code: str
    """The version of etude that began it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    stage: str
    step: int
    """Steps of the stage that are done since `version`."""
    version: int
    """The weight version that these weights follow, or are if `step` is 0."""
    lineage: tuple[Origin, ...]
    """Oldest first; the last one is this stage."""
    cursor: dict[str, Json]
    """Further state that the stage needs to resume, such as its position in its data."""
    parts: tuple[str, ...] = ()
    """Parts by rank; the name of each ends with the SHA-256 of its bytes."""

    @property
    def name(self) -> str:
        return version_name(self.version, self.step)


def version_name(version: int, step: int = 0) -> str:
    """The name of the checkpoint this many steps after a version."""
    return f"{version:06d}.{step:06d}"


def read(run: Run, name: str) -> Checkpoint:
    try:
        data = run.checkpoint(name)
    except Damaged as e:
        key = f"checkpoints/{name}/manifest.json"
        raise Damaged(f"{_where(run, name)}: {key} is damaged: {GO_BACK}") from e
    return from_json(data, Checkpoint, _where(run, name))


def read_part(run: Run, checkpoint: Checkpoint, rank: int) -> bytes:
    """Read a part, checked against its digest."""
    part = checkpoint.parts[rank]
    damage = "damaged"
    try:
        data = run.checkpoint_part(checkpoint.name, part)
        if hashlib.sha256(data).hexdigest() == part.partition(".")[2]:
            return data
    except Missing:
        damage = "gone"
    raise EtudeError(
        f"{_where(run, checkpoint.name)}: the part of rank {rank}, "
        f"checkpoints/{checkpoint.name}/{part}, is {damage}: {GO_BACK}"
    )


class CheckpointWriter:
    """Writes one rank's parts, one checkpoint after the other. The next call raises an error of the
    previous write."""

    def __init__(self, run: Run, rank: int = 0, ranks: int = 1) -> None:
        self.run = run
        self.rank = rank
        self.ranks = ranks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._given_up = threading.Event()
        self.kept: frozenset[str] = frozenset()
        """Checkpoints that are kept, however old."""

    def clean(self) -> None:
        """Remove parts that were never committed. For rank 0, before any rank saves."""
        self.run.sweep_checkpoints()
        committed = set(self.run.checkpoints())
        for name in {name for name, _ in self.run.checkpoint_parts()} - committed:
            self.run.delete_checkpoint(name)

    def save(
        self, checkpoint: Checkpoint, part: bytes, then: Callable[[], None] = lambda: None
    ) -> None:
        """Return at once, unless the previous checkpoint is still being written. `then` is called
        when this one is stored."""
        self.wait()
        self._pending = self._thread.submit(self._save, checkpoint, part, then)

    def wait(self) -> None:
        if self._pending:
            self._pending.result()

    def close(self) -> None:
        """Abandon the pending write: the end of a failed trainer must not wait for lost ranks."""
        self._given_up.set()
        self._thread.shutdown()

    def _save(self, checkpoint: Checkpoint, part: bytes, then: Callable[[], None]) -> None:
        name = checkpoint.name
        if not self.run.has_checkpoint(name):  # a stored checkpoint is never changed
            self.run.put_checkpoint_part(
                name, f"{self.rank:05d}.{hashlib.sha256(part).hexdigest()}", part
            )
            if self.rank == 0:
                self.run.put_checkpoint(name, to_json(replace(checkpoint, parts=self._parts(name))))
                for old in self.run.checkpoints()[:-KEEP_CHECKPOINTS]:
                    if old not in self.kept:
                        self.run.delete_checkpoint(old)
        then()

    def _parts(self, name: str) -> tuple[str, ...]:
        deadline = time.monotonic() + PARTS_TIMEOUT_S
        while True:
            parts = sorted(part for of, part in self.run.checkpoint_parts() if of == name)
            ranks = [int(part.partition(".")[0]) for part in parts]
            if ranks == list(range(self.ranks)):
                return tuple(parts)
            if len(set(ranks)) < len(ranks):
                raise EtudeError(
                    f"{_where(self.run, name)} is also being written by another trainer: stop "
                    f"one of them, then start again"
                )
            if self._given_up.wait(POLL_S) or time.monotonic() > deadline:
                missing = sorted(set(range(self.ranks)) - set(ranks))
                raise EtudeError(
                    f"{_where(self.run, name)} is incomplete: ranks {missing} did not write "
                    f"their parts; see their logs"
                )


def code_version() -> str:
    """The version of this package: its release, and the commit if it runs from a repository."""
    commit = git_commit()
    return f"etude {__version__}" + (f", commit {commit}" if commit else "")


def git_commit() -> str | None:
    """The commit of the repository, with a + if files were changed since."""
    argv = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--abbrev=12",
        "--exclude=*",
        "--dirty=+",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _where(run: Run, name: str) -> str:
    return f"checkpoint {name} of {run.objects.url}"
