"""Shards: the chunks of many tensors in one object of a convenient size.

    8 bytes    the magic
    varint     number of chunks
    each       tensor (varint, its number in the state), chunk (varint, its number in the tensor),
               size (varint)
    payloads   one after the other, in the format of `codec.py`

Chunks come in ascending order. A chunk that is in no shard of a route did not change. The header of
a shard is checked against the state, whose hash the manifest names, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from etude.weights import codec
from etude.weights.delta_format import Array, Damaged, Kind, Reader, varint
from etude.weights.tensors import Slab, State, TensorEntry

MAGIC = b"etude w1"
SHARD_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    tensor: int
    chunk: int
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Packed:
    """A shard on its way to the store."""

    data: bytes
    first: str
    last: str


@dataclass(slots=True)
class ChangeStats:
    """Changed elements, and all elements, for each sort of tensor."""

    changed: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)

    def count(self, entry: TensorEntry, changed: int, num_bytes: int) -> None:
        self.add(sort_of(entry.name), changed, entry.kind.count(num_bytes))

    def add(self, sort: str, changed: int, total: int) -> None:
        self.changed[sort] = self.changed.get(sort, 0) + changed
        self.total[sort] = self.total.get(sort, 0) + total

    def join(self, other: ChangeStats) -> None:
        for sort, total in other.total.items():
            self.add(sort, other.changed[sort], total)

    def shares(self) -> dict[str, float]:
        return {sort: self.changed[sort] / max(1, self.total[sort]) for sort in sorted(self.total)}


def sort_of(name: str) -> str:
    """The name of a tensor without its position in the model: `model.layers.3.mlp.up_proj.weight`
    is an `up_proj`."""
    words = [word for word in name.removesuffix(".weight").split(".") if not word.isdigit()]
    return words[-1]


def pack(
    state: State,
    new: Mapping[str, Slab],
    base: State,
    old: Mapping[str, Slab],
    pool: Executor,
    census: ChangeStats,
) -> Iterator[Packed]:
    """The route from `base` to `state`, in shards, restricted to the chunks in `new`; `old` must
    hold the same chunks if the base has such a tensor. An empty base gives a whole version."""
    was = {entry.name: entry for entry in base}

    def encode(number: int) -> tuple[list[Chunk], int]:
        entry = state[number]
        after = new[entry.name]
        before = old[entry.name] if entry.is_like(was.get(entry.name)) else None
        assert before is None or before.chunks == after.chunks
        made, changed = [], 0
        for chunk in after.chunks:
            place = after.place(entry, chunk)
            payload = _encode(
                entry.kind, None if before is None else before.data[place], after.data[place]
            )
            changed += codec.num_changed(entry.kind, payload, place.stop - place.start)
            if payload:
                made.append(Chunk(number, chunk, payload))
        return made, changed

    gathered: list[Chunk] = []
    size = 0
    mine = [number for number, entry in enumerate(state) if entry.name in new]
    for number, (chunks, changed) in zip(mine, pool.map(encode, mine), strict=True):
        census.count(state[number], changed, len(new[state[number].name].data))
        for chunk in chunks:
            gathered.append(chunk)
            size += len(chunk.payload)
            if size >= SHARD_BYTES:
                yield _packed(state, gathered)
                gathered, size = [], 0
    if gathered:
        yield _packed(state, gathered)


def unpack(
    state: State, shards: Iterable[bytes], base: State, old: Mapping[str, Slab],
    wanted: Mapping[str, range], pool: Executor,
) -> dict[str, Slab]:  # fmt: skip
    """The wanted chunks of the tensors of `state`; `old` must hold the same chunks if the base has
    such a tensor. A slab that did not change is the same object as in the base. Raises
    `Damaged`."""
    payloads: dict[int, dict[int, memoryview]] = {}
    for data in shards:
        for chunk in read(data, state):
            if chunk.chunk in wanted.get(state[chunk.tensor].name, ()):
                payloads.setdefault(chunk.tensor, {})[chunk.chunk] = memoryview(chunk.payload)
    was = {entry.name: entry for entry in base}

    def decode(number: int) -> Slab:
        entry = state[number]
        mine = payloads.get(number, {})
        before = old[entry.name] if entry.is_like(was.get(entry.name)) else None
        if before is not None and not mine:
            return before
        chunks = wanted[entry.name]
        size = sum(entry.place(chunk).stop - entry.place(chunk).start for chunk in chunks)
        out = Slab(chunks, np.empty(size, np.uint8))
        for chunk in chunks:
            place = out.place(entry, chunk)
            old_bytes = None if before is None else before.data[place]
            _apply(entry.kind, old_bytes, mine.get(chunk, memoryview(b"")), out.data[place])
        return out

    numbers = [number for number, entry in enumerate(state) if entry.name in wanted]
    return {
        state[number].name: slab
        for number, slab in zip(numbers, pool.map(decode, numbers), strict=True)
    }


def read(data: bytes, state: State) -> list[Chunk]:
    if data[: len(MAGIC)] != MAGIC:
        raise Damaged("a shard has no valid header")
    reader = Reader(data[len(MAGIC) :])
    heads: list[tuple[int, int, int]] = []
    for _ in range(reader.varint(reader.left)):
        tensor = reader.varint(len(state) - 1)
        chunk = reader.varint(len(state[tensor].chunks) - 1)
        if heads and (tensor, chunk) <= heads[-1][:2]:
            raise Damaged("the chunks of a shard are out of order")
        heads.append((tensor, chunk, reader.varint(len(data))))
    at = len(data) - reader.left
    view = memoryview(data)
    if sum(size for _, _, size in heads) != reader.left:
        raise Damaged("the size of a shard does not match its chunks")
    chunks = []
    for tensor, chunk, size in heads:
        chunks.append(Chunk(tensor, chunk, view[at : at + size]))
        at += size
    return chunks


def _packed(state: State, chunks: list[Chunk]) -> Packed:
    head = [varint(len(chunks))]
    for c in chunks:
        head += [varint(c.tensor), varint(c.chunk), varint(len(c.payload))]
    data = b"".join([MAGIC, *head, *(c.payload for c in chunks)])
    return Packed(data, state[chunks[0].tensor].name, state[chunks[-1].tensor].name)


def _encode(kind: Kind, old: Array | None, new: Array) -> bytes:
    return codec.encode(
        kind, None if old is None else codec.codes(kind, old), codec.codes(kind, new)
    )


def _apply(kind: Kind, old: Array | None, payload: memoryview, out: Array) -> None:
    before = None if old is None else codec.codes(kind, old)
    if kind.nibbles:  # codes are a copy of the bytes
        made = np.empty(2 * len(out), np.uint8)
        codec.apply(kind, before, payload, made)
        out[:] = codec.stored(kind, made)
    else:
        codec.apply(kind, before, payload, codec.codes(kind, out))
