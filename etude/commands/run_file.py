"""Reading of a run's file into a config."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from etude.core.config import RunConfig, parse
from etude.core.errors import EtudeError


def read_run_file(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's file. `overrides`: those of `--set`. Relative paths start at the folder of the
    file, also in `overrides`."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise EtudeError(
            f"cannot read {path}: {getattr(e, 'strerror', None) or e}; pass the path of a run's "
            "TOML file"
        ) from e
    config = parse(text, overrides, source=str(path)).located(path.absolute().parent)
    for key, place in relative_paths(config):
        _check_started_there(key, place, Path(config.folder or "."))
    return config


def relative_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The keys with a relative path, each with the path."""
    return _places(config.model_dump(), config)


def _places(tree: object, config: RunConfig, key: str = "") -> Iterator[tuple[str, str]]:
    match tree:
        case dict():
            for name, value in tree.items():
                yield from _places(value, config, f"{key}.{name}" if key else name)
        case list() | tuple():
            for value in tree:
                name = f"{key}.{value['name']}" if key == "stage" else key
                yield from _places(value, config, name)
        case str() if (place := config.as_written(tree)) != tree:
            yield key, place


def _check_started_there(key: str, place: str, folder: Path) -> None:
    """Raise if a path exists relative to the current directory but not to the folder of the run's
    file."""
    name = place.partition(":")[0]  # before the colon, in references to code and in mounts
    if not _is_there(f"{folder}/{name}") and _is_there(name):
        elsewhere = os.path.relpath(name, folder) + place.removeprefix(name)
        raise EtudeError(
            f"{key} = {place!r}: relative paths start at the folder of the run's file; "
            f"{folder / name} does not exist, but {Path(name).absolute()} does: write "
            f"{elsewhere!r}"
        )


def _is_there(pattern: str) -> bool:
    return any(glob.iglob(pattern, recursive=True))
