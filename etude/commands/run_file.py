"""A run's file, from the disk to a config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from etude.core.config import RunConfig, parse
from etude.core.errors import EtudeError


def read_run_file(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """`overrides`: as of `--set`."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise EtudeError(
            f"cannot read {path}: {getattr(e, 'strerror', None) or e}; give the path of a run's "
            f"TOML"
        ) from e
    config = parse(text, overrides, source=str(path))
    folder = path.absolute().parent
    sandbox, tasks = config.sandbox.seen_from(folder), config.tasks.seen_from(folder)
    return config.model_copy(update={"sandbox": sandbox, "tasks": tasks})
