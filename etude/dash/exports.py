"""Rollouts for other programs: JSON lines, CSV, Parquet, and whole conversations, as they
are stored or in ATIF."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from etude.core.errors import EtudeError
from etude.core.types import Trajectory
from etude.dash import atif
from etude.dash.recorded import RecordedRun
from etude.dash.table import became
from etude.store.rollouts import RolloutRow, encode_rows

FORMATS = {
    "jsonl": "application/x-ndjson",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
    "sessions.jsonl": "application/x-ndjson",
    "atif.jsonl": "application/x-ndjson",
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
        return (_line(_session(*each)) for each in _conversations(recorded, rows))
    if format == "atif.jsonl":
        told = (each for each in _conversations(recorded, rows) if each[0].messages)
        return (_line(atif.trajectory(*each)) for each in told)
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


def _conversations(
    recorded: RecordedRun, rows: Sequence[RolloutRow]
) -> Iterator[tuple[Trajectory, RolloutRow]]:
    """Of the rows that have one; each object is read once."""
    wanted = {row.id: row for row in rows}
    for key in dict.fromkeys(row.object for row in rows if row.object):
        for t in recorded.sessions.conversations(key):
            if t.id in wanted:
                yield t, wanted[t.id]


def _session(t: Trajectory, row: RolloutRow) -> dict[str, object]:
    return asdict(row) | {"messages": t.messages, "score": asdict(t.score) if t.score else None}
