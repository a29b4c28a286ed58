"""One compact row for every rollout, in Parquet files that any tool can read.

    rollouts/{number:010d}.parquet           rows of training, written when their group is settled
    rollouts/{version:06d}.{split}.parquet   rows of one evaluation

A row summarises a rollout without its tokens, and names the object that has them. It follows from
the group and the ledger: a folder that is lost or damaged may be deleted, and the next start of the
run writes the rows of training again.

Other tools cannot read a Parquet file with bytes after its end. So the digest of a file is within
it, in the metadata of its footer; it is the digest of the file with zeros in its place.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain
from typing import Any

import numpy as np
from arro3.core import Array, DataType, Field, Schema, Table, list_array, struct_array
from arro3.io import read_parquet, write_parquet
from blake3 import blake3

from etude.core.errors import EtudeError
from etude.core.types import Group, Status, Trajectory, turns
from etude.store.codec import Damaged
from etude.store.decoding import convert
from etude.store.log import find_gap, first_free
from etude.store.objects import Objects

FOLDER = "rollouts"
_ADVICE = (
    f"restore it from a backup, or delete the folder {FOLDER}/: the next start of the run "
    f"writes the training rollouts again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """The summary of one rollout, without its tokens."""

    id: str
    task: str
    kind: str
    """The split of the task: `train`, or that of an evaluation."""
    group: str
    slot: int | None
    stage: str
    step: int | None = None
    """The step that trained on it."""
    dropped: str | None = None
    """The reason why no step did (`core.ledger.Reason`)."""
    status: Status
    error: str | None
    reward: float | None
    parts: dict[str, float]
    flags: tuple[str, ...]
    length: int
    """Tokens of all segments, prompts included."""
    turns: int
    versions: tuple[int, ...]
    """The weight versions that its tokens were sampled from."""
    prompt_tokens: int
    sampled_tokens: int
    seconds: float
    calls: int
    source: str
    policy: str
    object: str | None
    """The object in the store that holds the whole rollout."""


@dataclass(frozen=True, slots=True)
class RolloutFate:
    """The reward of an attempt, and the reason why it was not trained on, if it was not."""

    reward: float | None
    dropped: str | None


_SCALARS = {
    "str": DataType.string(),
    "Status": DataType.string(),
    "int": DataType.int64(),
    "float": DataType.float64(),
}
_PART = [
    Field("name", DataType.string(), nullable=False),
    Field("value", DataType.float64(), nullable=False),
]


def group_rows(group: Group) -> list[RolloutRow]:
    """The rows of a finished group, before it is settled."""
    return [
        _row(t, kind="train", stage=group.stage, slot=group.slot, object=f"groups/{group.id}")
        for t in group.trajectories
    ]


def _row(
    t: Trajectory, *, kind: str, stage: str, slot: int | None = None, object: str | None = None
) -> RolloutRow:
    return RolloutRow(
        id=t.id,
        task=t.task,
        kind=kind,
        group=t.group,
        slot=slot,
        stage=stage,
        status=t.status,
        error=t.error,
        reward=t.reward,
        parts={part.name: part.value for part in t.score.parts} if t.score else {},
        flags=t.score.flags if t.score else (),
        length=sum(len(segment.prompt) + len(segment.tokens) for segment in t.segments),
        turns=sum(len(turns(segment)) for segment in t.segments),
        versions=tuple(
            sorted({span.version for segment in t.segments for span in segment.versions})
        ),
        prompt_tokens=t.cost.prompt_tokens,
        sampled_tokens=t.cost.sampled_tokens,
        seconds=t.cost.seconds,
        calls=t.cost.calls,
        source=t.source,
        policy=t.policy,
        object=object,
    )


class RolloutLog:
    """The rows of a run: one writer, any number of readers. A file is never changed."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._number: int | None = None  # of the file to write next

    def append(self, rows: Sequence[RolloutRow]) -> None:
        """Write rows of training as one file; without rows no file is written."""
        if not rows:
            return
        if self._number is None:
            self._check_whole()
            self._number = self._end()
        key, data = _key(self._number), encode_rows(rows)
        if not self._objects.create(key, data) and self._objects.get(key) != data:
            raise EtudeError(
                f"{self._objects.url}: another process has written {key}; stop the other "
                f"process of this run, then start again"
            )
        self._number += 1

    def put_evaluation(
        self,
        name: str,
        trajectories: Iterable[Trajectory],
        *,
        stage: str,
        split: str,
        object: str | None = None,
    ) -> None:
        """Write the rows of one evaluation. `name` is that of its report, which is written after
        them: until the report is stored, the evaluation is repeated and its rows are written
        again."""
        by_task = sorted(trajectories, key=lambda t: t.task)
        rows = [_row(t, kind=split, stage=stage, object=object) for t in by_task]
        self._objects.put(f"{FOLDER}/{name}.parquet", encode_rows(rows))

    def rows(self) -> list[RolloutRow]:
        """All rows: those of training in the order of their files, then those of evaluations."""
        self._check_whole()
        return [row for key in self.files() for row in self.read(key)]

    def files(self, start: int = 0) -> list[str]:
        """The keys of all files: those of training from number `start` on, in order, then those of
        evaluations."""
        listed = self._objects.list(FOLDER)
        evaluations = [
            key for key in listed if re.fullmatch(rf"{FOLDER}/\d{{6,}}\.\w+\.parquet", key)
        ]
        return [*map(_key, range(start, self._end(start))), *evaluations]

    def read(self, key: str) -> list[RolloutRow]:
        """The rows of one file."""
        return _decode(self._table(key))

    def groups(self) -> dict[str, list[RolloutFate]]:
        """The groups of training with stored rows, and the fate of each attempt."""
        self._check_whole()
        groups: dict[str, list[RolloutFate]] = {}
        for key in self._keys():
            table = self._table(key)
            columns = [table.column(name).to_pylist() for name in ("group", "reward", "dropped")]
            for group, *fate in zip(*columns, strict=True):
                groups.setdefault(group, []).append(RolloutFate(*fate))
        return groups

    def lost(self) -> Damaged | None:
        """The error for a missing file, after which none is read; None if none is missing."""
        key = find_gap(self._objects, FOLDER, _key)
        if key is None:
            return None
        return Damaged(f"{self._objects.url}: {key} is missing, but later files exist: {_ADVICE}")

    def _check_whole(self) -> None:
        if (lost := self.lost()) is not None:
            raise lost

    def _keys(self) -> list[str]:
        return [_key(number) for number in range(self._end())]

    def _end(self, start: int = 0) -> int:
        return first_free(self._objects, FOLDER, _key, start)

    def _table(self, key: str) -> Table:
        data = self._objects.get(key)
        try:
            _check(data)
        except ValueError as e:
            raise Damaged(f"{self._objects.url}: {key} is damaged ({e}): {_ADVICE}") from e
        return read_parquet(io.BytesIO(data)).read_all()


class RolloutReader:
    """Reads all rows of a run incrementally. Damaged files are left out, and reported."""

    def __init__(self, objects: Objects) -> None:
        self._log = RolloutLog(objects)
        self._start = 0
        self._looked = False
        self._evaluations: set[str] = set()
        self.damaged: list[EtudeError] = []

    def new(self) -> list[RolloutRow]:
        found: list[RolloutRow] = []
        if not self._looked and (lost := self._log.lost()) is not None:
            self.damaged.append(lost)
        self._looked = True
        for key in self._log.files(self._start):
            if key in self._evaluations:
                continue
            try:
                found += self._log.read(key)
            except EtudeError as e:
                self.damaged.append(e)
            if key == _key(self._start):
                self._start += 1
            else:
                self._evaluations.add(key)
        return found


_BLANK = b"0" * 64
_DIGEST = re.compile(rb"blake3\x18@([0-9a-f]{64})")
"""A key and its value, as encoded in a Parquet footer."""


def encode_rows(rows: Sequence[RolloutRow]) -> bytes:
    """A Parquet file of these rows, with its digest; needs at least one row."""
    kinds = {field.name: str(field.type) for field in fields(RolloutRow)}
    arrays = [
        _column(kind.removesuffix(" | None"), [getattr(row, name) for row in rows])
        for name, kind in kinds.items()
    ]
    columns = [
        Field(name, array.type, nullable=kind.endswith(" | None"))
        for (name, kind), array in zip(kinds.items(), arrays, strict=True)
    ]
    file = io.BytesIO()
    write_parquet(
        Table.from_arrays(arrays, schema=Schema(columns)),
        file,
        key_value_metadata={"blake3": _BLANK.decode()},
        skip_arrow_metadata=True,
    )
    data = file.getvalue()
    before, blank, after = data.rpartition(_BLANK)
    assert blank
    return before + blake3(data).hexdigest().encode() + after


def _column(kind: str, values: Sequence[Any]) -> Array:
    """One column. `kind`: the type of a field of `RolloutRow`, as written there."""
    if kind in _SCALARS:
        return Array(values, type=_SCALARS[kind])
    ends = np.array([0, *accumulate(map(len, values))], dtype=np.int32)
    if kind == "dict[str, float]":
        names = chain.from_iterable(map(dict.keys, values))
        numbers = chain.from_iterable(map(dict.values, values))
        flat = struct_array([_column("str", [*names]), _column("float", [*numbers])], fields=_PART)
    else:
        flat = _column(kind.removeprefix("tuple[").removesuffix(", ...]"), [*chain(*values)])
    return list_array(Array(ends), flat)


def _decode(table: Table) -> list[RolloutRow]:
    columns: dict[str, list[Any]] = {
        name: list(table.column(name).to_pylist()) for name in table.column_names
    }
    columns["parts"] = [{part["name"]: part["value"] for part in row} for row in columns["parts"]]
    return [
        convert(dict(zip(columns, values, strict=True)), RolloutRow)
        for values in zip(*columns.values(), strict=True)
    ]


def _check(data: bytes) -> None:
    """Raises ValueError if the data is not what was written."""
    found = list(_DIGEST.finditer(data))
    if not found:
        raise ValueError("its footer has no digest")
    begin, end = found[-1].span(1)
    if blake3(data[:begin] + _BLANK + data[end:]).hexdigest().encode() != data[begin:end]:
        raise ValueError("its digest does not match its content")


def _key(number: int) -> str:
    return f"{FOLDER}/{number:010d}.parquet"
