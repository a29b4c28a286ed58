"""The place of a run: its store, which is a directory or a bucket, and the folder on this machine
for its lock and logs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.store.objects import Objects, is_bucket
from etude.store.runs import FOLDERS, Run
from etude.store.telemetry import BUCKET_FLUSH_S

LOCAL = ("logs", "rendezvous", "tensorboard", "wandb")
"""Folders that the processes of a run leave on their machine, wherever its store is."""


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The place of a run."""

    store: str
    """The URL of the store."""
    directory: Path
    """The folder of the lock, the logs and the dashboards' files; for a run in a directory, that
    directory."""

    @classmethod
    def of(cls, place: str | Path) -> RunPlace:
        """The place with this name: a directory, `file:` with one, or the URL of a bucket."""
        text = str(place).rstrip("/") or "/"
        if is_bucket(text):
            readable = re.sub(r"[^A-Za-z0-9._]+", "-", text)
            digest = hashlib.sha256(text.encode()).hexdigest()[:8]  # several URLs may look alike
            return cls(text, Path("runs") / f"{readable}-{digest}")
        path = Path(re.sub("^file:(//)?", "", text))
        if "://" in text and not text.startswith("file:"):
            Objects.open(text, create=False)  # raises an error that names the valid forms
        return cls(f"file:{path.absolute()}", path)

    def __str__(self) -> str:
        """The place in the form that people write."""
        return self.store if is_bucket(self.store) else str(self.directory)

    @property
    def absolute(self) -> str:
        """The place in a form that is valid in any folder."""
        return self.store.removeprefix("file:")

    def begins_anew(self, name: str, folder: Path, *, fresh: bool) -> str:
        """A message if a start would begin a new run here, while another run of the same name
        exists that may be meant; otherwise empty. `folder`: that of the run's file."""
        there = None if fresh else self.find()
        if there is not None and there.has_config():
            return ""
        if (other := self._namesake(name, folder)) is None:
            return ""
        return (
            f"starts a new run in {self.absolute}; {other} is another run with this name: to "
            "resume that one, use --dir"
        )

    def _namesake(self, name: str, folder: Path) -> Path | None:
        """A run of the same name that was started from another folder: below the working directory,
        `folder`, or one of its parents."""
        above = folder.absolute()
        for home in (Path.cwd(), above, *above.parents):
            found = home / "runs" / name
            is_other = found.resolve() != self.directory.resolve()
            if is_other and os.path.isfile(found / "config.json"):  # False if access is denied
                return found
        return None

    def open(self) -> Run:
        """Open the existing run."""
        run = Run.open(self.store, create=False)
        run.config()
        return run

    def find(self) -> Run | None:
        """The store, if it contains anything. A read-only caller creates no directory."""
        if is_bucket(self.store):
            run = Run.open(self.store)
            return run if run.objects.exists("config.json") or run.objects.list("") else None
        return Run.open(self.store, create=False) if self.directory.is_dir() else None

    def check_removable(self) -> None:
        """Refuse to remove anything that is not a run (a run that has lost its config still is
        one), or a run in a bucket that is still running: its lock may be on another machine."""
        found = self.find()
        if found is not None and is_bucket(self.store):
            self._check_still(found)
        made_by_launcher = all((self.directory / name).exists() for name in ("lock", "logs"))
        if found is None or found.has_config() or made_by_launcher:
            return
        if set(found.objects.list("")) <= {"lock"}:  # nothing to remove
            return
        raise EtudeError(f"{self} is not an Etude run, so it was not deleted; choose another --dir")

    def _check_still(self, run: Run) -> None:
        patience_s = RunConfig.model_fields["heartbeat_timeout_s"].default
        with contextlib.suppress(EtudeError):  # it is lost, or of another version
            patience_s = run.config().heartbeat_timeout_s
        patience_s += BUCKET_FLUSH_S
        silent_s = time.time() - run.last_written()
        if silent_s < patience_s:
            raise EtudeError(
                f"{self} was written to {max(0.0, silent_s):.0f} s ago, so it is probably "
                "running, perhaps on another machine: stop it there first; it can be deleted "
                f"after {patience_s:g} s without writes"
            )

    def remove(self) -> None:
        """Remove everything of the run except the lock, which the caller holds, and except files
        that do not belong to it."""
        self.check_removable()  # somebody may have resumed it since
        if is_bucket(self.store):
            Run.open(self.store).clear()
        for name in (*FOLDERS, *LOCAL, "config.json"):
            path = self.directory / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
