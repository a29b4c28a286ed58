"""Documents and records of the user: text files, JSON lines, Parquet. They are read one after the
other, so a corpus may be larger than memory. Errors name the file and the line."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError

Record = dict[str, Any]


def files(pattern: str) -> list[Path]:
    """The files that match a path or a pattern, in the order of their names."""
    found = sorted(
        path for name in glob.glob(pattern, recursive=True) if (path := Path(name)).is_file()
    )
    if not found:
        raise EtudeError(
            f"{Path(pattern).absolute()}: no such file; check the path: a relative one starts at "
            "the folder of the run's file, and a pattern with * must match a file"
        )
    return found


def texts(path: Path, field: str) -> Iterator[tuple[str, str]]:
    """(location, text) of every document of a file that is not empty. `field` names the text in a
    record."""
    if path.suffix not in (".jsonl", ".parquet"):
        said = _read_text(path)
        if said.strip():
            yield str(path), said
        return
    for where, record in records(path) if path.suffix == ".jsonl" else _rows(path, field):
        text = record.get(field)
        if not isinstance(text, str):
            raise EtudeError(
                f"{where}: {_lacks(record, field, 'text')}; set field to the name of the field "
                "with the text"
            )
        if text.strip():
            yield where, text


def records(path: Path) -> Iterator[tuple[str, Record]]:
    """(file:line, object) of every line of a .jsonl file. Empty lines are skipped."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", _object(line, f"{path}:{number}")
    except UnicodeDecodeError as e:
        raise EtudeError(
            f"{path} is not UTF-8 text ({e.reason} at byte {e.start}): convert it, or leave it out"
        ) from e
    except OSError as e:
        raise EtudeError(
            f"{path} cannot be read ({e.strerror}): check its permissions, or leave it out"
        ) from e


def _object(line: str, where: str) -> Record:
    try:
        record = json.loads(line.rstrip())
    except (ValueError, RecursionError) as e:
        # its message says "line 1", which is this one
        why = f"{e.msg} at column {e.colno}" if isinstance(e, json.JSONDecodeError) else e
        raise EtudeError(f"{where}: the line is not valid JSON ({why}): fix or remove it") from e
    if not isinstance(record, dict):
        raise EtudeError(
            f"{where}: the line is not a JSON object but a {type(record).__name__}: write "
            "{...} on each line"
        )
    return record


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise EtudeError(
            f"{path} is not UTF-8 text ({e.reason} at byte {e.start}): convert it, or leave it out"
        ) from e
    except OSError as e:
        raise EtudeError(
            f"{path} cannot be read ({e.strerror}): check its permissions, or leave it out"
        ) from e


def _rows(path: Path, field: str) -> Iterator[tuple[str, Record]]:
    """(file, row) of a Parquet file, with one batch of rows in memory at a time."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as e:
        raise EtudeError(
            f"{path} is Parquet, which needs pyarrow: pip install 'etude[parquet]'"
        ) from e
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise EtudeError(
                    f"{path}: there is no column {field!r}, only "
                    f"{', '.join(file.schema_arrow.names)}; set field to the name of the column "
                    "with the text"
                )
            number = 0
            for batch in file.iter_batches(columns=[field]):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", record
    except (pyarrow.ArrowException, OSError) as e:
        raise EtudeError(
            f"{path} is not a readable Parquet file ({e}): download it again, or leave it out"
        ) from e


def _lacks(record: Record, field: str, what: str) -> str:
    if field in record:
        return f"{field!r} must be a {what}, not {type(record[field]).__name__}"
    return f"there is no {field!r}, only {', '.join(map(repr, record)) or 'nothing'}"
