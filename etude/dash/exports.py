"""Export of rollouts for other programs: rows as JSON lines, CSV or Parquet, and whole
conversations as they are stored or in ATIF."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from etude.core.errors import EtudeError
from etude.core.types import Json, Trajectory
from etude.dash import atif
from etude.dash.recorded import RecordedRun
from etude.dash.table import RolloutTable
from etude.store.rollouts import RolloutRow, encode_rows
from etude.store.verdicts import read_preferences

FORMATS = {
    "jsonl": "application/x-ndjson",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
    "sessions.jsonl": "application/x-ndjson",
    "atif.jsonl": "application/x-ndjson",
    "preferences.jsonl": "application/x-ndjson",
}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def export(recorded: RecordedRun, rows: Sequence[RolloutRow], format: str) -> Iterator[bytes]:
    if format == "jsonl":
        became = recorded.table.became
        return (_line(asdict(row) | {"became": became(row)}) for row in rows)
    if format == "csv":
        return _csv(recorded.table, rows)
    if format == "parquet":
        return iter([encode_rows(rows)] if rows else [])
    if format == "sessions.jsonl":
        return (_line(_session(*each)) for each in _conversations(recorded, rows))
    if format == "atif.jsonl":
        told = (each for each in _conversations(recorded, rows) if each[0].messages)
        return (_line(atif.trajectory(*each)) for each in told)
    if format == "preferences.jsonl":
        return _preferences(recorded, rows)
    raise EtudeError(f"cannot export as {format!r}: choose one of {', '.join(FORMATS)}")


def _line(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def _csv(table: RolloutTable, rows: Sequence[RolloutRow]) -> Iterator[bytes]:
    names = [field.name for field in fields(RolloutRow)]
    yield (",".join([*names, "became"]) + "\r\n").encode()
    for row in rows:
        text = io.StringIO()
        cells = [_cell(getattr(row, name)) for name in names]
        csv.writer(text).writerow([*cells, table.became(row)])
        yield text.getvalue().encode("utf-8", "replace")


def _cell(value: object) -> str:
    """A value as the text of a cell. Text from a model or a tool is quoted if a spreadsheet would
    take it for a formula."""
    if isinstance(value, dict | tuple):
        return json.dumps(value)
    text = "" if value is None else str(value)
    return f"'{text}" if isinstance(value, str) and text.startswith(_FORMULA) else text


def _conversations(
    recorded: RecordedRun, rows: Sequence[RolloutRow]
) -> Iterator[tuple[Trajectory, RolloutRow]]:
    """The conversations of the rows that have one; each object is read once."""
    wanted = {row.id: row for row in rows}
    for key in dict.fromkeys(row.object for row in rows if row.object):
        for t in recorded.sessions.conversations(key):
            if t.id in wanted:
                yield t, wanted[t.id]


def _preferences(recorded: RecordedRun, rows: Sequence[RolloutRow]) -> Iterator[bytes]:
    """Pairs that a person has judged, in the format of the stage dpo. A pair is exported if both
    rollouts are among these rows and their prompts are the same but their answers differ. Ties are
    left out."""
    wanted = {row.id for row in rows}
    newest = {
        (each.record.left, each.record.right, each.record.who): each
        for each in read_preferences(recorded.run)
    }
    for t, choice in ((each.t, each.record) for each in newest.values()):
        if choice.chosen is None or not {choice.left, choice.right} <= wanted:
            continue
        other = choice.left if choice.chosen == choice.right else choice.right
        chosen, rejected = (_answered(recorded.conversation(id)) for id in (choice.chosen, other))
        if chosen[0] == rejected[0] and chosen[1] and rejected[1] and chosen[1] != rejected[1]:
            yield _line(
                {
                    "prompt": chosen[0],
                    "chosen": chosen[1],
                    "rejected": rejected[1],
                    "sessions": [choice.chosen, other],
                    "who": choice.who,
                    "time": t,
                }
            )


def _answered(t: Trajectory) -> tuple[list[dict[str, Json]], list[dict[str, Json]]]:
    """(prompt, answer): the messages before the first message of the policy, and those from it to
    the last message of the policy."""
    said = [n for n, message in enumerate(t.messages) if message.get("role") == "assistant"]
    return (t.messages[: said[0]], t.messages[said[0] : said[-1] + 1]) if said else (t.messages, [])


def _session(t: Trajectory, row: RolloutRow) -> dict[str, object]:
    return asdict(row) | {"messages": t.messages, "score": asdict(t.score) if t.score else None}
