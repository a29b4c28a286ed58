"""LoRA adapters on CUDA: the adapters of all slots in one batch, where each row may have a
different one.

A and B of all slots are in one buffer for each layer. Rows are taken in tiles of up to 16 with the
same slot; the host lists the rows and the slot of each tile. `_shrink` computes A x for all parts
of a layer, `_expand` adds scale B (A x) to the layer's output, and `_expand_gated` does so for a
gated pair and applies the gate. A row goes through the same instructions in the same order whatever
else is in its tile or its batch, so its bits do not depend on them: the inner axis is split by the
size of the matrix alone.

The time is dominated by the latency from the end of one kernel to the first sums of the next, and
hardly by reading. So a program loads the matrices, which do not depend on an earlier kernel, before
it waits for its input.

Shapes: N rows, C inputs of a layer, M outputs, R stored rank, RP the rank padded for `tl.dot`, P
parts of a layer, K = P R, S slots, T tiles, D pieces of the inner axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as gpu

from etude.engine.adapters import AdapterLimits
from etude.engine.graph_inputs import ADAPTER_TILE_ROWS
from etude.model.layers import Linear
from etude.model.lora import Adapter, Pair, adaptable_layers, layer_pairs, pair_tensors, parts_of
from etude.model.transformer import Transformer

RANK_STEP = 8
"""Ranks are stored as multiples of it: a row of B in bf16 is then read 16 bytes at a time."""
MIN_DOT = 16
"""Columns of the inner axis that one tensor core instruction sums."""
PIECE = 512
"""Columns of the inner axis that one program sums."""
SHRINK_RANKS = 16
"""Rows of A, of any parts, that one program multiplies with; a power of two from 16 on."""
MAX_OUTPUTS = 64
"""Columns of the output that one program writes."""
SHRINK_WARPS = 4
EXPAND_WARPS, HIGH_RANK_WARPS = 1, 4
"""With one warp `_expand` has all pieces of A x in flight at once; several warps exchange each
piece at a barrier before they request the next. A tile of a rank over 16 is too large for one
warp."""


@triton.jit
def _rows(row, first, rows, t, ROWS: tl.constexpr):
    """The rows of a tile, and a mask of those that exist."""
    r = tl.arange(0, ROWS)
    return tl.load(row + tl.load(first + t) + r, mask=r < rows, other=0), (r < rows)[:, None]


@triton.jit
def _shrink(
    x, a, low, row, first, count, slot, scales, N, C, K,
    BK: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    d = tl.program_id(2)
    if PDL:
        gpu.gdc_launch_dependents()
    rows = tl.load(count + t)
    which = tl.load(slot + t)
    is_used = (rows > 0) & (tl.load(scales + which) != 0)
    n, inside = _rows(row, first, rows, t, ROWS)
    c = d * BC + tl.arange(0, BC)[None, :]
    matrix = a + (which.to(tl.int64) * K + k[:, None]) * C + c
    wanted = (k < K)[:, None] & (c < tl.where(is_used, C, 0))
    tile = tl.load(matrix, mask=wanted, other=0)
    if PDL:
        gpu.gdc_wait()
    if is_used:
        value = tl.load(x + n[:, None].to(tl.int64) * C + c, mask=inside & (c < C), other=0)
        target = low + (d.to(tl.int64) * N + n[:, None]) * K + k[None, :]
        tl.store(target, tl.dot(value, tl.trans(tile)), mask=inside & (k < K)[None, :])


@triton.jit
def _low(
    low, n, inside, part, N, K,
    D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A x of one part, its pieces summed in order."""
    r = tl.arange(0, RP)[None, :]
    sums = tl.zeros([ROWS, RP], tl.float32)
    for d in tl.static_range(D):
        place = (d * N + n[:, None]).to(tl.int64) * K + part * R + r
        sums += tl.load(low + place, mask=inside & (r < R), other=0)
    return sums


@triton.jit
def _expand(
    low, b, y, row, first, count, slot, scales, part_of, N, K, M,
    D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    j = tl.program_id(1)
    if PDL:
        gpu.gdc_launch_dependents()
    rows = tl.load(count + t)
    which = tl.load(slot + t)
    scale = tl.load(scales + which)
    is_used = (rows > 0) & (scale != 0)
    n, inside = _rows(row, first, rows, t, ROWS)
    part = tl.load(part_of + j)
    m = j * BM + tl.arange(0, BM)
    r = tl.arange(0, RP)[None, :]
    matrix = b + (which.to(tl.int64) * M + m[:, None]) * R + r
    tile = tl.load(matrix, mask=(m[:, None] < tl.where(is_used, M, 0)) & (r < R), other=0)
    if PDL:
        gpu.gdc_wait()
    if is_used:
        sums = _low(low, n, inside, part, N, K, D, R, RP, ROWS)
        place = y + n[:, None].to(tl.int64) * M + m[None, :]
        value = tl.load(place, mask=inside, other=0).to(tl.float32)
        added = tl.dot(sums.to(b.dtype.element_ty), tl.trans(tile)) * scale
        tl.store(place, (value + added).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _expand_gated(
    low, b, y, out, row, first, count, slot, scales, part_of, N, K, F,
    D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    j = tl.program_id(1)
    if PDL:
        gpu.gdc_launch_dependents()
    rows = tl.load(count + t)
    which = tl.load(slot + t)
    scale = tl.load(scales + which)
    is_used = (rows > 0) & (scale != 0)
    n, inside = _rows(row, first, rows, t, ROWS)
    part = tl.load(part_of + j)
    part_up = tl.load(part_of + j + F // BM)
    m = j * BM + tl.arange(0, BM)
    r = tl.arange(0, RP)[None, :]
    matrix = b + (which.to(tl.int64) * (2 * F) + m[:, None]) * R + r
    wanted = (m[:, None] < tl.where(is_used, F, 0)) & (r < R)
    tile = tl.load(matrix, mask=wanted, other=0)
    tile_up = tl.load(matrix + F.to(tl.int64) * R, mask=wanted, other=0)
    if PDL:
        gpu.gdc_wait()
    if rows > 0:
        place = y + n[:, None].to(tl.int64) * (2 * F) + m[None, :]
        gate = tl.load(place, mask=inside, other=0).to(tl.float32)
        up = tl.load(place + F, mask=inside, other=0).to(tl.float32)
        if is_used:
            sums = _low(low, n, inside, part, N, K, D, R, RP, ROWS)
            sums_up = _low(low, n, inside, part_up, N, K, D, R, RP, ROWS)
            gate += tl.dot(sums.to(b.dtype.element_ty), tl.trans(tile)) * scale
            up += tl.dot(sums_up.to(b.dtype.element_ty), tl.trans(tile_up)) * scale
        gated = gate * tl.sigmoid(gate) * up
        target = out + n[:, None].to(tl.int64) * F + m[None, :]
        tl.store(target, gated.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """The rows of one pass, in tiles of one adapter slot each: all rows in the order of the tiles,
    and for each tile its first index in that order, its number of rows, and the slot."""

    row_N: Tensor
    first_T: Tensor
    count_T: Tensor
    slot_T: Tensor

    @property
    def fields(self) -> tuple[Tensor, ...]:
        """The tensors in the order in which the kernels take them."""
        return self.row_N, self.first_T, self.count_T, self.slot_T


class LinearAdapters:
    """The stacked A and B matrices of all adapter slots, for one linear layer."""

    def __init__(self, parts: dict[str, int], weight_MC: Tensor, limits: AdapterLimits) -> None:
        self.parts = parts
        outputs, inputs = weight_MC.shape
        self.rank = -(-limits.rank // RANK_STEP) * RANK_STEP
        self.padded_rank = max(MIN_DOT, triton.next_power_of_2(self.rank))
        self.expand_warps = EXPAND_WARPS if self.padded_rank == MIN_DOT else HIGH_RANK_WARPS
        self.piece = min(PIECE, triton.next_power_of_2(inputs))
        self.pieces = -(-inputs // self.piece)
        self.a_SKC = weight_MC.new_zeros(limits.num_slots, len(parts) * self.rank, inputs)
        self.b_SMR = weight_MC.new_zeros(limits.num_slots, outputs, self.rank)
        offsets = [0, *accumulate(parts.values())]
        self.block = math.gcd(MAX_OUTPUTS, *offsets)
        starts = range(0, outputs, self.block)
        part_of = np.searchsorted(offsets, starts, side="right") - 1
        self.part_of = torch.from_numpy(part_of.astype(np.int32)).to(weight_MC.device)

    def fill(self, slot: int, pair: Pair | None) -> None:
        self.a_SKC[slot].zero_()
        self.b_SMR[slot].zero_()
        if pair is None:
            return
        rank = pair.b.shape[1]
        lows, at = iter(pair.a.split_with_sizes([rank] * (len(pair.a) // rank))), 0
        row = offset = 0
        for part, (width, has_pair) in enumerate(pair.widths):
            if has_pair:
                row = part * self.rank
                self.a_SKC[slot, row : row + rank] = next(lows)
                self.b_SMR[slot, offset : offset + width, :rank] = pair.b[at : at + width]
                at += width
            offset += width

    def pair(self, slot: int, like: Pair) -> Pair:
        """The content of a slot, in the shape of the pair that was stored there."""
        rank, wanted = like.b.shape[1], [has_pair for _, has_pair in like.widths]
        a = self.a_SKC[slot].view(len(self.parts), self.rank, -1)[:, :rank]
        b = self.b_SMR[slot, :, :rank].split_with_sizes(list(self.parts.values()))
        own = [part for part, has_pair in enumerate(wanted) if has_pair]
        return Pair(a[own].flatten(0, 1), torch.cat([b[part] for part in own]), 0.0, like.widths)

    def add(
        self, x_NC: Tensor, y_NM: Tensor, tiles: AdapterTiles, scales_S: Tensor, pdl: bool
    ) -> None:
        """y += scale B A x, for the rows that have an adapter."""
        low_DNK = self._shrink(x_NC, tiles, scales_S, pdl)
        grid = (len(tiles.first_T), y_NM.shape[1] // self.block)
        _expand[grid](
            low_DNK, self.b_SMR, y_NM, *tiles.fields, scales_S, self.part_of, len(x_NC),
            low_DNK.shape[2], y_NM.shape[1], self.pieces, self.rank, self.padded_rank, self.block,
            ADAPTER_TILE_ROWS, pdl, num_warps=self.expand_warps, launch_pdl=pdl,
        )  # fmt: skip

    def gated(
        self, x_NC: Tensor, y_NM: Tensor, tiles: AdapterTiles, scales_S: Tensor, pdl: bool
    ) -> Tensor:
        """silu(gate) * up of y + scale B A x; gates are the first half."""
        low_DNK = self._shrink(x_NC, tiles, scales_S, pdl)
        inner = y_NM.shape[1] // 2
        out_NF = y_NM.new_empty(len(y_NM), inner)
        block = math.gcd(self.block, inner)
        assert block == self.block, "gate and up are parts of equal size"
        _expand_gated[(len(tiles.first_T), inner // block)](
            low_DNK, self.b_SMR, y_NM, out_NF, *tiles.fields, scales_S, self.part_of, len(x_NC),
            low_DNK.shape[2], inner, self.pieces, self.rank, self.padded_rank, block,
            ADAPTER_TILE_ROWS, pdl, num_warps=self.expand_warps, launch_pdl=pdl,
        )  # fmt: skip
        return out_NF

    def _shrink(self, x_NC: Tensor, tiles: AdapterTiles, scales_S: Tensor, pdl: bool) -> Tensor:
        rows, inner = x_NC.shape
        k = self.a_SKC.shape[1]
        low_DNK = x_NC.new_empty(self.pieces, rows, k, dtype=torch.float32)
        _shrink[(len(tiles.first_T), triton.cdiv(k, SHRINK_RANKS), self.pieces)](
            x_NC, self.a_SKC, low_DNK, *tiles.fields, scales_S, rows, inner, k, SHRINK_RANKS,
            self.piece, ADAPTER_TILE_ROWS, pdl, num_warps=SHRINK_WARPS, launch_pdl=pdl,
        )  # fmt: skip
        return low_DNK


class CudaAdapters:
    """The LoRA adapters of a model, applied by these kernels. A runner sets `tiles` before each
    pass; None: no row has an adapter."""

    tiles: AdapterTiles | None = None

    def __init__(self, model: Transformer, limits: AdapterLimits) -> None:
        self._model = model
        self._layers = {
            path: LinearAdapters(parts_of(path, layer), layer.weight.detach(), limits)
            for path, layer in adaptable_layers(model).items()
        }
        weight = model.model.embed_tokens.weight
        self._scales_S = torch.zeros(limits.num_slots, device=weight.device)
        self._held: dict[int, dict[str, Pair]] = {}  # only shapes: tensors on "meta"
        for path, layer in adaptable_layers(model).items():
            layer.adapter = partial(self._added, self._layers[path])

    def is_filled(self, slot: int) -> bool:
        return bool(self._held.get(slot))

    def add(self, path: str, x_NC: Tensor, y_NM: Tensor, pdl: bool) -> None:
        """y += the adapters' output for the layer at `path`."""
        if self.tiles is not None:
            self._layers[path].add(x_NC, y_NM, self.tiles, self._scales_S, pdl)

    def gated(self, path: str, x_NC: Tensor, y_NM: Tensor, pdl: bool) -> Tensor:
        assert self.tiles is not None
        return self._layers[path].gated(x_NC, y_NM, self.tiles, self._scales_S, pdl)

    def _added(self, own: LinearAdapters, layer: Linear, x_NC: Tensor, y_NM: Tensor) -> Tensor:
        if self.tiles is not None:
            own.add(x_NC, y_NM, self.tiles, self._scales_S, pdl=False)
        return y_NM

    def prepare(self, slot: int, adapter: Adapter | None) -> Callable[[], None]:
        """Like `TorchAdapters.prepare`, applied in stream order, so after all passes so far."""
        like = self._model.model.embed_tokens.weight
        pairs = {} if adapter is None else dict(layer_pairs(self._model, adapter, like))

        @torch.no_grad()
        def put_in_place() -> None:
            for path, layer in self._layers.items():
                layer.fill(slot, pairs.get(path))
            self._scales_S[slot] = adapter.config.scale if adapter else 0.0
            self._held[slot] = {
                path: Pair(pair.a.to("meta"), pair.b.to("meta"), pair.scale, pair.widths)
                for path, pair in pairs.items()
            }

        return put_in_place

    def tensors(self, slot: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """A copy of the adapter in a slot, by its published names."""
        layers = adaptable_layers(self._model)
        return {
            name: tensor.to(dtype, copy=True)
            for path, like in self._held.get(slot, {}).items()
            for name, tensor in pair_tensors(
                path, layers[path], self._layers[path].pair(slot, like)
            )
        }
