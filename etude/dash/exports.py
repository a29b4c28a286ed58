"""Rollouts for other programs: JSON lines, CSV, Parquet, and whole conversations."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from etude.core.errors import EtudeError
from etude.dash.recorded import RecordedRun
from etude.dash.table import became
from etude.store.rollouts import RolloutRow, encode_rows

FORMATS = {
    "jsonl": "application/x-ndjson",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
    "sessions.jsonl": "application/x-ndjson",
}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def export(recorded: RecordedRun, rows: Sequence[RolloutRow], format: str) -> Iterator[bytes]:
    if format == "jsonl":
        return (_line(asdict(row) | {"became": became(row)}) for row in rows)
    if format == "csv":
        return _csv(rows)
    if format == "parquet":
        return iter([encode_rows(rows)] if rows else [])
    if format == "sessions.jsonl":
        return _sessions(recorded, rows)
    raise EtudeError(f"cannot export as {format!r}: choose one of {', '.join(FORMATS)}")


def _line(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def _csv(rows: Sequence[RolloutRow]) -> Iterator[bytes]:
    names = [field.name for field in fields(RolloutRow)]
    yield (",".join([*names, "became"]) + "\r\n").encode()
    for row in rows:
        text = io.StringIO()
        csv.writer(text).writerow([*(_cell(getattr(row, name)) for name in names), became(row)])
        yield text.getvalue().encode("utf-8", "replace")


def _cell(value: object) -> str:
    """Text that a model or a tool wrote must not become a formula in somebody's spreadsheet."""
    if isinstance(value, dict | tuple):
        return json.dumps(value)
    text = "" if value is None else str(value)
    return f"'{text}" if isinstance(value, str) and text.startswith(_FORMULA) else text


def _sessions(recorded: RecordedRun, rows: Sequence[RolloutRow]) -> Iterator[bytes]:
    """The conversations, with their scores; each object is read once."""
    wanted = {row.id: row for row in rows}
    for key in dict.fromkeys(row.object for row in rows if row.object):
        for t in recorded.sessions.conversations(key):
            if t.id in wanted:
                said = {"messages": t.messages, "score": asdict(t.score) if t.score else None}
                yield _line(asdict(wanted[t.id]) | said)
