"""The trainer's tensors as they are now, in memory that nobody else writes to. Training waits for
this and no more.

On a CPU that is a copy, into the memory of a version that is not needed any more: fetching new
pages from the kernel takes as long as copying. Tensors that are given away for good are not copied
at all. On a device the new bits are compared with the last ones there, and only what changed
crosses to the host, about a hundredth; there it is put into a copy of the last version, when
training is going on again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.weights.layout import Extent
from etude.weights.tensors import TensorEntry, dtype_name

Arrays = dict[str, Tensor]
"""Name -> the bits of a part, flat and on the host."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a tensor: rows from `first` on. It may be changed as soon as `publish`
    returns."""

    tensor: Tensor
    first: int = 0
    rows: int | None = None
    """Of the whole tensor; None if these are all."""
    dtype: torch.dtype | None = None
    """To publish it in; None for its own."""

    def extent(self, name: str) -> Extent:
        shape = tuple(self.tensor.shape)
        dtype = self.dtype or self.tensor.dtype
        if self.rows is not None:
            shape = (self.rows, *shape[1:])
        entry = TensorEntry(name, dtype_name(dtype), shape)
        start = self.first * (entry.bytes // shape[0]) if self.first else 0
        return Extent(entry, start, start + self.tensor.numel() * dtype.itemsize)


class Snapshots:
    """`take` versions in turn, and `release` each when its successor has taken its place."""

    def __init__(self) -> None:
        self._spare: Arrays = {}
        self._given = False
        self._on_device: Arrays = {}
        self._on_host: Arrays = {}  # the same bits, where there is a device

    def take(self, parts: Mapping[str, Part], *, given: bool = False) -> Callable[[], Arrays]:
        """Returns when the parts may change, or at once if they are `given` and never will. What it
        returns gives their bits, and may take its time."""
        self._given = given
        made: Arrays = {}
        changes: dict[str, tuple[Tensor, Tensor]] = {}
        for name, part in parts.items():
            tensor = part.tensor.detach()
            dtype = part.dtype or part.tensor.dtype
            if not tensor.is_cuda and given and tensor.dtype == dtype:
                made[name] = bits(tensor)
            elif not tensor.is_cuda:
                made[name] = self._copied(name, tensor, dtype)
            elif (old := self._on_device.get(name)) is not None and _fits(old, tensor, dtype):
                changes[name] = _to_host(*changed(old, bits(tensor.to(dtype))))
            else:
                self._on_device[name] = bits(tensor.to(dtype, copy=True))
                made[name] = self._on_host[name] = self._on_device[name].cpu()
        if changes:
            torch.cuda.synchronize()

        def finish() -> Arrays:
            for name, (places, values) in changes.items():
                made[name] = self._patched(name, places, values)
            return made

        return finish

    def release(self, arrays: Arrays) -> None:
        self._spare = {} if self._given else dict(arrays)

    def _memory(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        spare = self._spare.pop(name, None)
        fits = spare is not None and (len(spare), spare.dtype) == (size, dtype)
        return spare if spare is not None and fits else torch.empty(size, dtype=dtype)

    def _copied(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        code = CODES[dtype.itemsize]
        memory = self._memory(name, tensor.numel(), code)
        if dtype == tensor.dtype:
            # torch has types that it cannot copy as what they are
            memory.view(tensor.shape).copy_(tensor.view(code))
        else:
            memory.view(dtype).view(tensor.shape).copy_(tensor)
        return memory

    def _patched(self, name: str, places: Tensor, values: Tensor) -> Tensor:
        old = self._on_host[name]
        new = self._on_host[name] = self._memory(name, len(old), old.dtype).copy_(old)
        new[places.long()] = values
        return new


CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer type for each width: NaN is not equal to itself, and -0.0 is equal to 0.0; bits are
neither."""


def bits(tensor: Tensor) -> Tensor:
    """Flat, as integers; a view if the tensor is in one piece."""
    return tensor.contiguous().reshape(-1).view(CODES[tensor.element_size()])


def changed(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Where two rows of bits differ, and what stands there now; `old` becomes `new`. On whatever
    device they are."""
    places = (old != new).nonzero().view(-1)
    values = new[places]
    old.index_copy_(0, places, values)
    return places.int() if len(new) < 1 << 31 else places, values


def _fits(old: Tensor, tensor: Tensor, dtype: torch.dtype) -> bool:
    return (
        old.device == tensor.device
        and len(old) == tensor.numel()
        and old.element_size() == dtype.itemsize
    )


def _to_host(places: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return places.to("cpu", non_blocking=True), values.to("cpu", non_blocking=True)
