"""A run's file, from the disk to a config."""

from __future__ import annotations

import shlex
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
    _check_started_there(config, path)
    folder = path.absolute().parent
    sandbox, tasks = config.sandbox.seen_from(folder), config.tasks.seen_from(folder)
    return config.model_copy(update={"sandbox": sandbox, "tasks": tasks})


def _check_started_there(config: RunConfig, path: Path) -> None:
    """Paths of code are seen from where a run is started, which is where its file lies, most of the
    time."""
    folder = path.absolute().parent
    for key, reference in (
        ("tasks.environment", config.tasks.environment),
        ("harness.agent", config.harness.agent),
    ):
        file = reference.partition(":")[0]
        if file.endswith(".py") and not Path(file).is_file() and (folder / file).is_file():
            raise EtudeError(
                f"{key} = {reference!r} is seen from the folder in which etude is started, and "
                f"{file} lies with {path.name}: cd {shlex.quote(str(folder))}, and give "
                f"{path.name} there"
            )
