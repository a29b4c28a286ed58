"""Shards: the chunks of many tensors in one object of a handy size.

    8 bytes    the magic
    varint     number of chunks
    each       tensor (varint, its number in the state), chunk (varint, its number in the tensor), size (varint)
    payloads   one after the other; `codec.py` says what is in them

Chunks come in ascending order. A chunk that is in no shard of a route did not change. What a shard says of itself is
checked against the state, whose hash the manifest names, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from etude.weights import codec
from etude.weights.codec import Array, Damaged, Kind
from etude.weights.tensors import Entry, State

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
class Census:
    """Elements that changed, and elements, for each sort of tensor."""

    changed: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)

    def count(self, entry: Entry, changed: int) -> None:
        sort = sort_of(entry.name)
        self.changed[sort] = self.changed.get(sort, 0) + changed
        self.total[sort] = self.total.get(sort, 0) + entry.kind.count(entry.bytes)

    def shares(self) -> dict[str, float]:
        return {sort: self.changed[sort] / max(1, self.total[sort]) for sort in sorted(self.total)}


def sort_of(name: str) -> str:
    """The name of a tensor without its place in the model: `model.layers.3.mlp.up_proj.weight` is an `up_proj`."""
    words = [word for word in name.removesuffix(".weight").split(".") if not word.isdigit()]
    return words[-1]


def pieces(kind: Kind, num_bytes: int) -> list[slice]:
    """A tensor's chunks, as places among its bytes."""
    size = kind.size(kind.chunk)
    return [slice(at, min(at + size, num_bytes)) for at in range(0, num_bytes, size)]


def pack(
    state: State, new: Mapping[str, Array], base: State, old: Mapping[str, Array], pool: Executor, census: Census
) -> Iterator[Packed]:
    """The way from `base` to `state`, in shards. An empty base makes a whole one."""
    was = {entry.name: entry for entry in base}

    def encode(number: int) -> tuple[list[Chunk], int]:
        entry = state[number]
        before = old[entry.name] if entry.is_like(was.get(entry.name)) else None
        parts = pieces(entry.kind, entry.bytes)
        made = [_encode(entry.kind, before, new[entry.name], at) for at in parts]
        changed = sum(codec.num_changed(entry.kind, m, at.stop - at.start) for m, at in zip(made, parts, strict=True))
        return [Chunk(number, chunk, payload) for chunk, payload in enumerate(made) if payload], changed

    gathered: list[Chunk] = []
    size = 0
    for entry, (chunks, changed) in zip(state, pool.map(encode, range(len(state))), strict=True):
        census.count(entry, changed)
        for chunk in chunks:
            gathered.append(chunk)
            size += len(chunk.payload)
            if size >= SHARD_BYTES:
                yield _packed(state, gathered)
                gathered, size = [], 0
    if gathered:
        yield _packed(state, gathered)


def unpack(
    state: State, shards: Iterable[bytes], base: State, old: Mapping[str, Array], pool: Executor
) -> dict[str, Array]:
    """All tensors of `state`. One that did not change is the very array of the base. Raises `Damaged`."""
    payloads: dict[int, dict[int, memoryview]] = {}
    for data in shards:
        for chunk in read(data, state):
            payloads.setdefault(chunk.tensor, {})[chunk.chunk] = memoryview(chunk.payload)
    was = {entry.name: entry for entry in base}

    def decode(number: int) -> Array:
        entry, mine = state[number], payloads.get(number, {})
        before = old[entry.name] if entry.is_like(was.get(entry.name)) else None
        if before is not None and not mine:
            return before
        out = np.empty(entry.bytes, np.uint8)
        for chunk, at in enumerate(pieces(entry.kind, entry.bytes)):
            _apply(entry.kind, before, mine.get(chunk, memoryview(b"")), out, at)
        return out

    return {entry.name: data for entry, data in zip(state, pool.map(decode, range(len(state))), strict=True)}


def read(data: bytes, state: State) -> list[Chunk]:
    if data[: len(MAGIC)] != MAGIC:
        raise Damaged("a shard does not start as shards do")
    reader = codec.Reader(data[len(MAGIC) :])
    heads: list[tuple[int, int, int]] = []
    for _ in range(reader.varint(reader.left)):
        tensor = reader.varint(len(state) - 1)
        chunk = reader.varint(max(0, len(pieces(state[tensor].kind, state[tensor].bytes)) - 1))
        if heads and (tensor, chunk) <= heads[-1][:2]:
            raise Damaged("a shard holds its chunks in disorder")
        heads.append((tensor, chunk, reader.varint(len(data))))
    at, view = len(data) - reader.left, memoryview(data)
    if sum(size for _, _, size in heads) != reader.left:
        raise Damaged("a shard is longer or shorter than its chunks")
    chunks = []
    for tensor, chunk, size in heads:
        chunks.append(Chunk(tensor, chunk, view[at : at + size]))
        at += size
    return chunks


def _packed(state: State, chunks: list[Chunk]) -> Packed:
    head = [codec.varint(len(chunks))]
    for c in chunks:
        head += [codec.varint(c.tensor), codec.varint(c.chunk), codec.varint(len(c.payload))]
    data = b"".join([MAGIC, *head, *(c.payload for c in chunks)])
    return Packed(data, state[chunks[0].tensor].name, state[chunks[-1].tensor].name)


def _encode(kind: Kind, old: Array | None, new: Array, at: slice) -> bytes:
    return codec.encode(kind, None if old is None else codec.codes(kind, old[at]), codec.codes(kind, new[at]))


def _apply(kind: Kind, old: Array | None, payload: memoryview, out: Array, at: slice) -> None:
    before = None if old is None else codec.codes(kind, old[at])
    if kind.nibbles:  # codes are a copy of the bytes
        made = np.empty(2 * (at.stop - at.start), np.uint8)
        codec.apply(kind, before, payload, made)
        out[at] = codec.stored(kind, made)
    else:
        codec.apply(kind, before, payload, codec.codes(kind, out[at]))
