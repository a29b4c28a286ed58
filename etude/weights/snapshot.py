"""A snapshot of the trainer's tensors, in memory that no other code writes to. Training waits only
for this.

On a CPU the snapshot is a copy, into the memory of a version that is no longer needed, because
getting new pages from the kernel takes as long as copying. Tensors that are given away are not
copied at all. On a device the new bits are compared there with the previous ones, and only the
changes are copied to the host, about a hundredth; there they are applied to a copy of the last
version, while training continues.
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
    """Rows of the whole tensor; None if these are all."""
    dtype: torch.dtype | None = None
    """The dtype to publish it in; None for its own."""

    def extent(self, name: str) -> Extent:
        shape = tuple(self.tensor.shape)
        dtype = self.dtype or self.tensor.dtype
        if self.rows is not None:
            shape = (self.rows, *shape[1:])
        entry = TensorEntry(name, dtype_name(dtype), shape)
        start = self.first * (entry.bytes // shape[0]) if self.first else 0
        return Extent(entry, start, start + self.tensor.numel() * dtype.itemsize)


class Snapshots:
    """Takes versions in turn with `take`; `release` each when its successor has replaced it."""

    def __init__(self) -> None:
        self._spare: Arrays = {}
        self._given = False
        self._on_device: Arrays = {}
        self._on_host: Arrays = {}  # the same bits, if there is a device

    def take(self, parts: Mapping[str, Part], *, given: bool = False) -> Callable[[], Arrays]:
        """Return when the parts may change, or at once if they are `given` and never will. Call the
        result to get their bits, which may take a while."""
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
            # torch cannot copy some types as such
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
"""An integer type for each width, to compare bits: NaN is not equal to itself, and -0.0 is equal to
0.0, which does not hold for bits."""


def bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor, flat, as integers; a view if the tensor is contiguous."""
    return tensor.contiguous().reshape(-1).view(CODES[tensor.element_size()])


def changed(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The indices at which two rows of bits differ, and the new bits there; `old` becomes `new`. On
    any device."""
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
