"""The tensors of a published model directory, each read when it is requested.

Shards are memory-mapped, so that a model built from them is never in memory twice. Quantised
tensors are returned dequantised, in bf16:

- FP8: `X.weight` in e4m3 with `X.weight_scale_inv` or `X.weight_scale`: one factor for each block,
  for each row, or for the whole tensor;
- MXFP4: `X_blocks`, two 4-bit numbers in a byte, and `X_scales`, the exponent of each 32 numbers.

Shapes: M outputs, C inputs of a matrix, X experts, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from etude.model.directory import weight_files

SCALES = ("_scale_inv", "_scale")
"""Suffixes that name the scale of an FP8 tensor."""
UNUSED = (".input_scale", ".output_scale", ".activation_scale")
"""Scales of FP8 activations; activations are not quantised here."""
BLOCKS, EXPONENTS = "_blocks", "_scales"
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_NAME = "F8_E4M3"


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a directory by name, without those that only hold scales."""

    def __init__(self, path: Path) -> None:
        files = weight_files(path)
        try:
            shards: list[Any] = [safe_open(path / file, framework="pt") for file in files]
        except SafetensorError as e:
            raise ValueError(f"{path} is not a readable safetensors file: {e}") from e
        self._held: dict[str, Any] = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118
        self._names = [self._name(stored) for stored in self._held if not self._is_scale(stored)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if name + BLOCKS in self._held:
            return from_mxfp4(self._read(name + BLOCKS), self._read(name + EXPONENTS))
        if (scale := self._scale_of(name)) is not None:
            return from_fp8(self._read(name), self._read(scale))
        return self._read(name)

    def in_bfloat16(self, name: str) -> bool:
        """True if the tensor is returned in bf16; does not read it."""
        if name + BLOCKS in self._held or self._scale_of(name) is not None:
            return True
        return str(self._held[name].get_slice(name).get_dtype()) == "BF16"

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self._held[name].get_tensor(name)
        return tensor

    def _name(self, stored: str) -> str:
        is_packed = stored.endswith(BLOCKS) and stored[: -len(BLOCKS)] + EXPONENTS in self._held
        return stored[: -len(BLOCKS)] if is_packed else stored

    def _is_scale(self, stored: str) -> bool:
        if stored.endswith(UNUSED):
            return True
        of = next((stored[: -len(end)] for end in SCALES if stored.endswith(end)), None)
        packed = stored[: -len(EXPONENTS)] + BLOCKS if stored.endswith(EXPONENTS) else None
        return of in self._held or packed in self._held

    def _scale_of(self, name: str) -> str | None:
        found = next((name + end for end in SCALES if name + end in self._held), None)
        kind = str(self._held[name].get_slice(name).get_dtype())
        if kind.startswith("F8") and (found is None or kind != FP8_NAME):
            raise ValueError(f"{name} is in {kind} with the scale {found}, which is not supported")
        return found


def from_fp8(weight_MC: Tensor, scale: Tensor) -> Tensor:
    """Dequantise an FP8 matrix. `scale`: one number, [M] or [M, 1], or one number for each block;
    the block size follows from the two shapes."""
    wide = weight_MC.float()
    scale = scale.float()
    if scale.ndim == 1 and len(scale) == len(wide):
        scale = scale[:, None]
    if scale.ndim == 2:
        rows, columns = map(_block_size, wide.shape, scale.shape)
        scale = scale.repeat_interleave(rows, 0)[: len(wide)]
        scale = scale.repeat_interleave(columns, 1)[:, : wide.shape[1]]
    return (wide * scale).to(torch.bfloat16)


def _block_size(size: int, num_blocks: int) -> int:
    """Infer the block size: a power of two, except that blocks at the edge may be smaller."""
    if num_blocks == 1:
        return size
    block = 1 << (-(-size // max(1, num_blocks)) - 1).bit_length()
    if -(-size // block) != num_blocks:
        raise ValueError(f"{num_blocks} scales do not divide {size} rows or columns into blocks")
    return block


def from_mxfp4(blocks_XMB16: Tensor, exponents_XMB: Tensor) -> Tensor:
    """Dequantise to [X, C, M], inputs by outputs, as gpt-oss stores its experts. Works expert by
    expert, since the intermediate result is several times as large."""
    values = torch.tensor((*FP4_VALUES, *(-value for value in FP4_VALUES)))
    experts, outputs, *_ = blocks_XMB16.shape
    found = torch.empty(experts, exponents_XMB.shape[2] * 32, outputs, dtype=torch.bfloat16)
    for to, blocks_MB16, exponents_MB in zip(found, blocks_XMB16, exponents_XMB, strict=True):
        pairs = torch.stack((blocks_MB16 & 15, blocks_MB16 >> 4), -1).flatten(-2)
        numbers = torch.ldexp(values[pairs.int()], exponents_MB.int()[..., None] - 127)
        to.copy_(numbers.flatten(1).T)
    return found
