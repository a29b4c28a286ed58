"""Staging of new weights during inference: the elements that differ are uploaded to the device, so
that the swap writes only those.

From one version to the next about one weight in a hundred changes. `stage_weights` compares the new
weights with those on the device, chunk by chunk, on a separate stream while the engine serves, and
keeps the indices and values of the elements that differ: six bytes for each changed weight in bf16.
The swap scatters these. If too much of a chunk differs, as in a first version, nothing is kept for
it: the swap copies the whole chunk from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.model.files import fitting_views
from etude.model.transformer import Transformer

CHUNK = 1 << 26
"""Elements that are compared at a time; bounds the extra memory on the device."""
MOST_DIFFERENT = 1 / 8
"""Largest share of a chunk that is scattered. Beyond it copying the whole chunk is as fast."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class _SparseWrite:
    """A sparse write: single elements of `target` and their new bits."""

    target: Tensor
    places: Tensor
    values: Tensor

    def apply(self) -> None:
        self.target[self.places.long()] = self.values
        if self.target.is_cuda:
            # They were allocated on the stream that staged them.
            stream = torch.cuda.current_stream(self.target.device)
            self.places.record_stream(stream)
            self.values.record_stream(stream)


@dataclass(frozen=True, slots=True)
class _DenseWrite:
    """A dense write: a chunk of `target` that is copied whole."""

    target: Tensor
    source: Tensor

    def apply(self) -> None:
        self.target.copy_(self.source)


def stage_weights(model: Transformer, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    """Stage `tensors`, by their Hugging Face names, for `model`. Call the result to put them in
    place, in the order of the current stream. The model must not be modified in between."""
    device = model.model.embed_tokens.weight.device
    with torch.no_grad(), _beside_serving(device):
        writes = [
            write
            for name, view in fitting_views(model, tensors).items()
            for write in _writes(view, tensors[name])
        ]

    def put_in_place() -> None:
        with torch.no_grad():
            for write in writes:
                write.apply()

    return put_in_place


def _writes(view: Tensor, new: Tensor) -> Iterator[_SparseWrite | _DenseWrite]:
    target, source = view.view(-1), new.reshape(-1)
    for begin in range(0, target.numel(), CHUNK):
        write = _difference(target[begin : begin + CHUNK], source[begin : begin + CHUNK])
        if write is not None:
            yield write


def _difference(target: Tensor, source: Tensor) -> _SparseWrite | _DenseWrite | None:
    # Bits are compared, not numbers: 0.0 and -0.0 differ, and a NaN equals itself.
    bits = BITS[target.element_size()]
    staged = source.to(target.device, target.dtype).view(bits)
    places = (staged != target.view(bits)).nonzero().squeeze(1)
    if len(places) == 0:
        return None
    if len(places) > MOST_DIFFERENT * len(target):
        return _DenseWrite(target, source)
    return _SparseWrite(target.view(bits), places.int(), staged[places])


def _beside_serving(device: torch.device) -> AbstractContextManager[object]:
    return _SideStream(device) if device.type == "cuda" else nullcontext()


class _SideStream(AbstractContextManager[None]):
    """A context whose work runs on a separate CUDA stream, after all work given to the default
    stream so far. Leaving it waits until that work is done."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._entered = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        self._entered.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self._entered.__exit__(*error)
        self._stream.synchronize()
