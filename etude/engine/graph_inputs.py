"""The inputs that a captured graph reads from the host, packed into one buffer.

Shapes as in `cuda`: N new tokens, B sequences, M blocks of the longest of them, R sampled rows, T
tiles, G groups of layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.engine.batch import ForwardBatch, Ints, SamplerOutput

NOWHERE = 1 << 30
SLOTS = ("slot_mapping", "windowed_slot_mapping")
BLOCKS = ("blocks", "windowed_blocks")
"""Slots and block tables of each group of layers."""
ADAPTER_TILE_ROWS = 16
"""The rows that one tensor core instruction takes."""
ADAPTER_TILE_FIELDS = ("adapter_first", "adapter_count", "adapter_slot")
ADAPTER_FIELDS = ("adapter_row", *ADAPTER_TILE_FIELDS)
"""The rows in the order of their adapters' slots; and for each tile of rows with the same adapter,
its first index in that order, the number of its rows, and the slot."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The shape that a CUDA graph is captured for: N tokens, B sequences, R rows and T tiles.
    Without tiles it is a decode graph, and N = B = R. `adapter_slots`: the number of adapter slots
    for its rows; 0 in a graph without adapters."""

    tokens: int
    sequences: int
    rows: int
    tiles: int = 0
    adapter_slots: int = 0

    @property
    def adapter_tiles(self) -> int:
        """The most tiles of `kernels.lora` that such a batch can have: all tiles of a slot but one
        are full."""
        slots = min(self.sequences, self.adapter_slots)
        return min(self.tokens, self.tokens // ADAPTER_TILE_ROWS + slots)


class InputLayout:
    """The layout of a graph's inputs in a buffer of 32-bit words; every field begins at a multiple
    of 16 bytes."""

    def __init__(self, shape: GraphShape, table_words: int, num_groups: int = 1) -> None:
        """`table_words`: the most words of a block table."""
        self._table_words = table_words
        self._num_groups = num_groups
        n = shape.tokens
        b = shape.sequences
        r = shape.rows
        t = shape.tiles
        fields = {
            "tokens": n,
            "positions": n,
            **dict.fromkeys(SLOTS[:num_groups], n),
            "lengths": b,
            "temperature": r,
            "u": 2 * r,
            "stride": 1,
        }
        if t:
            fields |= {"ends": b, "logits_indices": r, "sequence": t, "first": t}
        if shape.adapter_slots:
            fields["adapter_row"] = n
            fields |= dict.fromkeys(ADAPTER_TILE_FIELDS, shape.adapter_tiles)
        self._spans: dict[str, slice] = {}
        self.fixed = 0
        """The offset of the block tables, whose width varies."""
        for name, count in fields.items():
            self._spans[name] = slice(self.fixed, self.fixed + count)
            self.fixed += -(-count // 4) * 4

    @property
    def num_words(self) -> int:
        return self.fixed + self._num_groups * self._table_words

    def fill(
        self, words: NDArray[np.int32], values: Mapping[str, NDArray[Any]], block_table_GBM: Ints
    ) -> list[slice]:
        """Write the inputs into the buffer, and return the written ranges. Padding is 0, except
        that padded tokens have slot -1, and padded tiles begin after all tokens."""
        words[: self.fixed] = 0
        for name in SLOTS[: self._num_groups]:
            words[self._spans[name]] = -1
        if "first" in self._spans:
            words[self._spans["first"]] = NOWHERE
        for name, value in values.items():
            start = self._spans[name].start
            words[start : start + value.nbytes // 4] = value.view(np.int32)
        words[self._spans["stride"]] = block_table_GBM.shape[2]
        tables = [slice(begin, begin + block_table_GBM[0].size) for begin in self._tables]
        for span, block_table_BM in zip(tables, block_table_GBM, strict=True):
            words[span] = block_table_BM.reshape(-1)
        return [slice(0, tables[0].stop), *tables[1:]]

    @property
    def _tables(self) -> range:
        return range(self.fixed, self.num_words, self._table_words)

    def views(self, words: Tensor) -> dict[str, Tensor]:
        found = {name: words[span] for name, span in self._spans.items()}
        found |= {
            name: words[begin:]
            for name, begin in zip(BLOCKS[: self._num_groups], self._tables, strict=True)
        }
        return found | {
            "temperature": found["temperature"].view(torch.float32),
            "u": found["u"].view(torch.float64),
        }


@dataclass(frozen=True, slots=True)
class PhaseInputs:
    """The inputs of one graph, still on the host: the decode or the prefill part of a batch."""

    values: dict[str, NDArray[Any]]
    block_table_GBM: Ints
    num_tokens: int
    num_sequences: int
    num_tiles: int
    row_indices_R: Ints
    """The rows of the batch that this part samples, in order."""

    @property
    def has_adapters(self) -> bool:
        return ADAPTER_FIELDS[0] in self.values


class PinnedBuffers:
    """The pinned host buffers of one pass, for its inputs on the way to the device and its results
    on the way back, with the event after which they may be reused."""

    def __init__(self, words: Tensor, results: Tensor) -> None:
        self.words = torch.zeros(words.shape, dtype=words.dtype, pin_memory=words.is_cuda)
        self.results = torch.zeros(results.shape, dtype=results.dtype, pin_memory=words.is_cuda)
        self._done = torch.cuda.Event() if words.is_cuda else None  # type: ignore[no-untyped-call]

    def take(self, results: Tensor) -> None:
        self.results.copy_(results, non_blocking=True)
        if self._done:
            self._done.record()

    def wait(self) -> None:
        if self._done:
            self._done.synchronize()

    def read(self, place_R: Ints, top_logprobs: list[list[tuple[int, float]]]) -> SamplerOutput:
        self.wait()
        tokens, logprobs = self.results[0].numpy(), self.results[1].numpy().view(np.float32)
        return SamplerOutput(
            tokens=tokens[place_R].tolist(),
            logprobs=logprobs[place_R].tolist(),
            top_logprobs=top_logprobs,
        )


def fits(wanted: GraphShape, shape: GraphShape) -> bool:
    return (
        bool(wanted.tiles) == bool(shape.tiles)
        and wanted.adapter_slots == shape.adapter_slots
        and wanted.tokens <= shape.tokens
        and wanted.sequences <= shape.sequences
        and wanted.rows <= shape.rows
        and wanted.tiles <= shape.tiles
    )


def as_words(values: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.int32]]:
    return {name: np.ascontiguousarray(value, np.int32) for name, value in values.items()}


def sampling_inputs(batch: ForwardBatch, row_R: Ints) -> dict[str, NDArray[Any]]:
    """The temperature and u of the rows. Padding rows take the likeliest token, which is not
    read."""
    return {"temperature": batch.sampling.temperature_R[row_R], "u": batch.sampling.u_R[row_R]}


def slot_inputs(batch: ForwardBatch, own: slice) -> dict[str, NDArray[Any]]:
    """The slots of some of the tokens, for each group of layers."""
    return dict(zip(SLOTS, batch.slot_mapping_GN[:, own], strict=False))


def adapter_inputs(slots_N: Ints) -> dict[str, NDArray[np.int32]]:
    """Tiles of rows with the same slot, anywhere in the batch: each slot's matrices are read once
    for up to 16 rows."""
    row_N = np.argsort(slots_N, kind="stable")
    sorted_N = slots_N[row_N]
    borders = np.flatnonzero(np.diff(sorted_N)) + 1
    starts, ends = np.append(0, borders), np.append(borders, len(slots_N))
    first_T = np.concatenate(
        [np.arange(start, end, ADAPTER_TILE_ROWS) for start, end in zip(starts, ends, strict=True)]
    )
    ends_T = ends[np.searchsorted(starts, first_T, side="right") - 1]
    count_T = np.minimum(ends_T - first_T, ADAPTER_TILE_ROWS)
    return as_words(
        dict(zip(ADAPTER_FIELDS, (row_N, first_T, count_T, sorted_N[first_T]), strict=True))
    )


def decode_inputs(batch: ForwardBatch, tokens_N: Ints) -> PhaseInputs | None:
    count = batch.num_decode
    if not count:
        return None
    row_R = np.arange(count)  # each of them is sampled
    values = {
        "tokens": tokens_N[:count],
        "positions": batch.positions_N[:count],
        "lengths": batch.seq_lens_B[:count],
    } | slot_inputs(batch, slice(count))
    return PhaseInputs(
        as_words(values) | sampling_inputs(batch, row_R),
        batch.block_table_GBM[:, :count],
        count,
        count,
        0,
        row_R,
    )
