"""Tasks from a file, one JSON object per line, for environments that run elsewhere."""

from __future__ import annotations

from pathlib import Path

import msgspec

from etude.core.errors import EtudeError
from etude.core.remote import RemoteTask
from etude.core.types import Task
from etude.store.decoding import decode_json


def read_task_file(path: str, split: str, limit: int) -> list[Task]:
    """The first tasks of a split."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as e:
        raise EtudeError(f"tasks.path = {path!r} cannot be read: {e.strerror}") from e
    found: list[Task] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            task = decode_json(line, RemoteTask)
            if task.split == split and len(found) < limit:
                found.append(task.to_task())
        except (msgspec.MsgspecError, ValueError) as e:
            raise EtudeError(f"{path}, line {number}: {e}") from e
    return found
