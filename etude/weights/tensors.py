"""Tensors as bytes with a description, and back: the only place of the weight plane that knows torch.

A *state* is all tensors of a version: what each is called, its dtype, shape and digest, sorted by name. Its JSON is an
object of the version, and the hash of that is the version's root.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
import torch
from blake3 import blake3

from etude.core.errors import EtudeError
from etude.store.codec import to_json
from etude.weights.codec import Array, Kind, kind_of
from etude.weights.manifest import hash_of


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a state. The digest is over dtype, shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def kind(self) -> Kind:
        return kind_of(self.dtype)

    @property
    def bytes(self) -> int:
        return prod(self.shape) * _element_size(self.dtype)

    def is_like(self, other: Entry | None) -> bool:
        """Whether a difference between the two can be told."""
        return other is not None and (self.dtype, self.shape) == (other.dtype, other.shape)


State = tuple[Entry, ...]


@cache
def _element_size(dtype: str) -> int:
    known = getattr(torch, dtype, None)
    if not isinstance(known, torch.dtype):
        raise EtudeError(f"tensors of type {dtype} were published, which this torch does not know: install a newer one")
    return known.itemsize


def bytes_of(tensor: torch.Tensor) -> Array:
    """Its bytes on the host; a view where it lies there in one piece."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def tensor_of(entry: Entry, data: Array) -> torch.Tensor:
    if not data.size:
        return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    return torch.from_numpy(data).view(getattr(torch, entry.dtype)).reshape(entry.shape)


def digest(dtype: str, shape: tuple[int, ...], data: Array) -> str:
    hasher = blake3(f"{dtype} {list(shape)}\n".encode())
    hasher.update(np.ascontiguousarray(data).data)
    return hasher.hexdigest()


def state_of(tensors: Mapping[str, torch.Tensor], data: Mapping[str, Array], pool: Executor) -> State:
    def entry(name: str) -> Entry:
        dtype, shape = str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape)
        return Entry(name, dtype, shape, digest(dtype, shape, data[name]))

    return tuple(pool.map(entry, sorted(tensors)))


def root_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The root of a version that is these tensors."""
    with ThreadPoolExecutor(1) as pool:
        return state_json(state_of(tensors, {name: bytes_of(tensor) for name, tensor in tensors.items()}, pool))[1]


def wrong_in(state: State, data: Mapping[str, Array], pool: Executor) -> list[str]:
    """The names of the tensors that are not what the state says."""
    found = pool.map(lambda e: digest(e.dtype, e.shape, data[e.name]) == e.digest, state)
    return [entry.name for entry, right in zip(state, found, strict=True) if not right]


def state_json(state: State) -> tuple[bytes, str]:
    """What is stored, and its hash, which is the root."""
    data = to_json(state)
    return data, hash_of(data)
