"""Tensors as bytes with a description, and back.

A *state* is the description of all tensors of a version: name, dtype, shape and digests of each,
sorted by name. Its JSON is an object of the version, and the hash of that is the version's root. A
*chunk* of a tensor is the unit of all operations: it is hashed, coded, published and fetched
separately, so that ranks can share a tensor. A *slab* is the held part of a tensor, in whole
chunks.
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
    """Digests of its chunks, in order. Empty if they are not known yet."""

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
        """The range of a chunk within the tensor's bytes."""
        start = chunk * self.chunk_bytes
        return slice(start, min(start + self.chunk_bytes, self.bytes))

    def holding(self, first: int, last: int) -> range:
        """The chunks that contain rows `first` to `last - 1`."""
        row = self.bytes // max(1, self.shape[0])
        return range(first * row // self.chunk_bytes, -(-last * row // self.chunk_bytes))

    def is_like(self, other: TensorEntry | None) -> bool:
        """True if a delta between the two is defined."""
        return other is not None and (self.dtype, self.shape) == (other.dtype, other.shape)


State = tuple[TensorEntry, ...]


@dataclass(frozen=True, slots=True)
class Slab:
    """The bytes of some chunks of a tensor, one after the other."""

    chunks: range
    data: Array

    def place(self, entry: TensorEntry, chunk: int) -> slice:
        """The range of a chunk within the bytes of the slab."""
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
            f"the published weights have tensors of type {dtype}, which this version of torch "
            f"does not support: install a newer one"
        )
    return known


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> Array:
    """The bytes of a tensor on the host; a view if it is contiguous there."""
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
    """The root of a version that consists of these tensors."""

    def entry(name: str) -> TensorEntry:
        tensor = tensors[name]
        bare = TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        return replace(bare, digests=digests(bare, Slab(bare.chunks, bytes_of(tensor))))

    with ThreadPoolExecutor(1) as pool:
        return state_json(tuple(pool.map(entry, sorted(tensors))))[1]


def wrong_in(state: State, held: Mapping[str, Slab], pool: Executor) -> list[str]:
    """The names of the tensors with a held chunk that does not match its digest in the state."""

    def is_right(entry: TensorEntry) -> bool:
        chunks = held[entry.name].chunks
        return digests(entry, held[entry.name]) == entry.digests[chunks.start : chunks.stop]

    mine = [entry for entry in state if entry.name in held]
    return [
        entry.name for entry, right in zip(mine, pool.map(is_right, mine), strict=True) if not right
    ]


def state_json(state: State) -> tuple[bytes, str]:
    """The stored JSON of a state, and its hash, which is the root."""
    data = to_json(state)
    return data, hash_of(data)


def read_state(data: bytes, num_bytes: int, where: str) -> State:
    """Parse the output of `state_json` for tensors of this total size. Readers allocate and loop by
    the sizes in a state, so each size is accepted only if another one confirms it: digests are
    listed one by one."""
    try:
        state = from_json(data, tuple[TensorEntry, ...], where)
    except EtudeError as e:
        raise Corrupt(str(e)) from e
    if any(one.name >= other.name for one, other in pairwise(state)):
        raise Corrupt(f"{where} are not sorted by name")
    for entry in state:
        if not _is_possible(entry):
            raise Corrupt(f"{where}: {entry.name} has an impossible dtype, shape or digest")
    if sum(entry.bytes for entry in state) != num_bytes:
        raise Corrupt(f"{where} do not have the size that the manifest states")
    return state


def _is_possible(entry: TensorEntry) -> bool:
    """True if a tensor with this entry can exist. Empty tensors may have large dimensions, but
    torch multiplies these too."""
    if len(entry.shape) > MAX_DIMENSIONS or any(size < 0 for size in entry.shape):
        return False
    fits = prod(max(1, size) for size in entry.shape) * element_size(entry.dtype) < 1 << 63
    # torch knows some types by two names
    is_own_name = dtype_name(torch_dtype(entry.dtype)) == entry.dtype
    return fits and is_own_name and len(entry.digests) == -(-entry.bytes // entry.chunk_bytes)
