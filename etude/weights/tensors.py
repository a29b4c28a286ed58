"""Tensors as bytes with a description, and back.

A *state* is all tensors of a version: what each is called, its dtype, shape and digests, sorted by
name. Its JSON is an object of the version, and the hash of that is the version's root. A *chunk* of
a tensor is the unit of everything: it is hashed, coded, published and fetched by itself, so that
ranks can share a tensor. A *slab* is what somebody holds of a tensor, in whole chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import prod

import numpy as np
import torch

from etude.core.errors import EtudeError
from etude.store.codec import from_json, to_json
from etude.weights.delta_format import Array, Kind, kind_of
from etude.weights.records import hash_of
from etude.weights.signing import Corrupt

MAX_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a state."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digests: tuple[str, ...] = ()
    """Of its chunks, in order. Empty where they are not known yet."""

    @property
    def kind(self) -> Kind:
        return kind_of(self.dtype)

    @property
    def bytes(self) -> int:
        return prod(self.shape) * element_size(self.dtype)

    @property
    def chunk_bytes(self) -> int:
        return self.kind.size(self.kind.chunk)

    @property
    def chunks(self) -> range:
        return range(-(-self.bytes // self.chunk_bytes))

    def place(self, chunk: int) -> slice:
        """Of a chunk, among the tensor's bytes."""
        start = chunk * self.chunk_bytes
        return slice(start, min(start + self.chunk_bytes, self.bytes))

    def holding(self, first: int, last: int) -> range:
        """The chunks in which rows `first` to `last - 1` lie."""
        row = self.bytes // max(1, self.shape[0])
        return range(first * row // self.chunk_bytes, -(-last * row // self.chunk_bytes))

    def is_like(self, other: TensorEntry | None) -> bool:
        """Whether a difference between the two can be told."""
        return other is not None and (self.dtype, self.shape) == (other.dtype, other.shape)


State = tuple[TensorEntry, ...]


@dataclass(frozen=True, slots=True)
class Slab:
    """The bytes of some chunks of a tensor, one after the other."""

    chunks: range
    data: Array

    def place(self, entry: TensorEntry, chunk: int) -> slice:
        """Of a chunk, among the bytes of the slab."""
        at = entry.place(chunk)
        start = self.chunks.start * entry.chunk_bytes
        return slice(at.start - start, at.stop - start)

    def chunk(self, entry: TensorEntry, chunk: int) -> Array:
        return self.data[self.place(entry, chunk)]


@cache
def element_size(dtype: str) -> int:
    return torch_dtype(dtype).itemsize


@cache
def torch_dtype(dtype: str) -> torch.dtype:
    known = getattr(torch, dtype, None)
    if not isinstance(known, torch.dtype):
        raise EtudeError(
            f"tensors of type {dtype} were published, which this torch does not know: install a "
            f"newer one"
        )
    return known


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> Array:
    """Its bytes on the host; a view where it lies there in one piece."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def tensor_of(dtype: str, shape: tuple[int, ...], data: Array) -> torch.Tensor:
    if not data.size:
        return torch.empty(shape, dtype=torch_dtype(dtype))
    return torch.from_numpy(data).view(torch_dtype(dtype)).reshape(shape)


def digests(entry: TensorEntry, slab: Slab) -> tuple[str, ...]:
    return tuple(
        hash_of(np.ascontiguousarray(slab.chunk(entry, chunk)).data) for chunk in slab.chunks
    )


def root_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The root of a version that is these tensors."""

    def entry(name: str) -> TensorEntry:
        tensor = tensors[name]
        bare = TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        return replace(bare, digests=digests(bare, Slab(bare.chunks, bytes_of(tensor))))

    with ThreadPoolExecutor(1) as pool:
        return state_json(tuple(pool.map(entry, sorted(tensors))))[1]


def wrong_in(state: State, held: Mapping[str, Slab], pool: Executor) -> list[str]:
    """The names of the tensors of which a chunk that is held is not what the state says."""

    def is_right(entry: TensorEntry) -> bool:
        chunks = held[entry.name].chunks
        return digests(entry, held[entry.name]) == entry.digests[chunks.start : chunks.stop]

    mine = [entry for entry in state if entry.name in held]
    return [
        entry.name for entry, right in zip(mine, pool.map(is_right, mine), strict=True) if not right
    ]


def state_json(state: State) -> tuple[bytes, str]:
    """What is stored, and its hash, which is the root."""
    data = to_json(state)
    return data, hash_of(data)


def read_state(data: bytes, num_bytes: int, where: str) -> State:
    """What `state_json` wrote of tensors with so many bytes in all. Everything that readers
    allocate and loop over is measured by a state, so it is believed only if each size in it is
    borne out by another: digests are written out one by one."""
    try:
        state = from_json(data, tuple[TensorEntry, ...], where)
    except EtudeError as e:
        raise Corrupt(str(e)) from e
    if any(one.name >= other.name for one, other in pairwise(state)):
        raise Corrupt(f"{where} are not sorted by name")
    for entry in state:
        if not _is_possible(entry):
            raise Corrupt(
                f"{where}: {entry.name} has a dtype, a shape or digests that no tensor has"
            )
    if sum(entry.bytes for entry in state) != num_bytes:
        raise Corrupt(f"{where} do not have the size that the manifest says")
    return state


def _is_possible(entry: TensorEntry) -> bool:
    """Empty tensors may have large dimensions, but torch multiplies these too."""
    if len(entry.shape) > MAX_DIMENSIONS or any(size < 0 for size in entry.shape):
        return False
    fits = prod(max(1, size) for size in entry.shape) * element_size(entry.dtype) < 1 << 63
    # torch knows some types by two
    is_own_name = dtype_name(torch_dtype(entry.dtype)) == entry.dtype
    return fits and is_own_name and len(entry.digests) == -(-entry.bytes // entry.chunk_bytes)
