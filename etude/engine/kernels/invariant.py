"""The layers of a `Transformer` as kernels whose sums do not depend on how many rows they are given.

On Hopper every instruction for products adds up the inner axis 16 columns at a time, in order, onto what is there, so
tiles of any size give the same bits: they are chosen by the rows, for speed. What must not depend on the rows is into
how many pieces the inner axis is cut, and in which order a row is summed where no product does it. So

- a product is cut by its matrix alone, and its pieces are added up in order;
- attention of a single token is that of a prompt with one token, over blocks of keys from the first one on, and the
  weights are summed by a product with ones;
- the sums of the softmax over the vocabulary come from tiles of one size.

What is left of `network` works row by row already, and the products of experts have one piece.

`tests/engine/invariance_checks.py` says whether it holds on a device.

Shapes as in `network`: N new tokens, C what goes into a product, M what comes out, S pieces, R rows that draw.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as gpu

from etude.engine.kernels import experts, head, linear, norm
from etude.engine.kernels.attention import LOG2E, PREFILL_ROWS, Heads, _places
from etude.engine.kernels.linear import Tile
from etude.engine.kernels.network import Attend, Network
from etude.model.experts import Experts

BLOCK = 64
"""Keys that attention adds at a time."""


@triton.jit
def _prefill(
    qkv, k_cache, v_cache, table, ends, lengths, tile_sequence, tile_first, out, stride, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile, kh = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = H // K
    sequence = tl.load(tile_sequence + tile).to(tl.int64)
    end, length = tl.load(ends + sequence), tl.load(lengths + sequence)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    if tl.load(tile_first + tile) >= end:  # it only fills the pass up
        return
    r, d = tl.arange(0, ROWS), tl.arange(0, D)
    n = tl.load(tile_first + tile) + r // G
    head = kh * G + r % G
    inside = (n < end)[:, None]
    limit = tl.maximum(length - end + n, 0)
    last = tl.minimum(length, tl.max(limit) + 1)
    q = tl.load(
        qkv + n[:, None].to(tl.int64) * ((H + 2 * K) * D) + head[:, None] * D + d[None, :], mask=inside, other=0
    )
    q = (q.to(tl.float32) * scale * LOG2E).to(q.dtype)
    mine = table + sequence * tl.load(stride)
    ones = tl.full([BLOCK, 16], 1.0, q.dtype)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, 16], tl.float32)  # 16 times the same: a product has no fewer columns
    acc = tl.zeros([ROWS, D], tl.float32)
    for first in range(0, last, BLOCK):
        position = first + tl.arange(0, BLOCK)
        seen = position < last
        place = _places(mine, position, seen, kh, K, PAGE, D)
        k = tl.load(k_cache + place, mask=seen[:, None], other=0)
        v = tl.load(v_cache + place, mask=seen[:, None], other=0)
        visible = seen[None, :] & (position[None, :] <= limit[:, None])
        score = tl.where(visible, tl.dot(q, tl.trans(k)), -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - new_top[:, None]).to(v.dtype)
        shrink = tl.exp2(top - new_top)[:, None]
        top, total, acc = new_top, tl.dot(p, ones, total * shrink), tl.dot(p, v, acc * shrink)
    place = (n[:, None].to(tl.int64) * H + head[:, None]) * D + d[None, :]
    tl.store(out + place, (acc / tl.max(total, 1)[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _logprobs(logits, stats, temperature, tokens, out, V, T, TP: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gpu.gdc_launch_dependents()
        gpu.gdc_wait()
    t = tl.arange(0, TP)
    tops = tl.load(stats + (row * T + t) * 2, mask=t < T, other=-float("inf"))
    totals = tl.load(stats + (row * T + t) * 2 + 1, mask=t < T, other=0)
    top = tl.max(tops, 0)
    total = tl.sum(totals.to(tl.float64) * tl.exp(tops - top).to(tl.float64), 0)
    warm = tl.load(temperature + row)
    token = tl.minimum(tl.maximum(tl.load(tokens + row), 0), V - 1)  # of a row that only fills the batch up, anything
    value = tl.load(logits + row * V + token) / tl.where(warm == 0, 1.0, warm)
    tl.store(out + row, value - top - tl.log(total).to(tl.float32))


def num_pieces(outputs: int, inner: int) -> int:
    """Enough for a single tile of rows to keep half the multiprocessors busy; a piece has 256 columns or more."""
    pieces, programs = 1, triton.cdiv(outputs, 64)
    while programs * pieces < 64 and inner // (2 * pieces) >= 256 and inner % (256 * pieces) == 0:
        pieces *= 2
    return pieces


def tile(rows: int, *, pieces: int = 1, gated: bool = False) -> Tile:
    """Found by measuring on an H200. Of the bits only `pieces` is a matter."""
    if rows <= 16:
        return Tile(16, 32, 128, pieces)
    if rows <= 64:
        return Tile(64, 64 if pieces == 1 else 32, 128, pieces, stages=3 if gated else 4)
    if gated or (pieces > 1 and rows <= 512):
        return Tile(128, 64, 64, pieces, warps=8, stages=3)
    if rows <= 256:
        return Tile(64, 128, 128, pieces, stages=3)
    return Tile(128, 128, 64, pieces, warps=8, stages=3)


def prefill(
    heads: Heads, qkv: Tensor, k: Tensor, v: Tensor, blocks: Tensor, stride: Tensor, ends_B: Tensor, lengths_B: Tensor,
    sequence_T: Tensor, first_T: Tensor, out: Tensor, *, page: int, rows: int = PREFILL_ROWS, pdl: bool = False,
) -> None:  # fmt: skip
    """As `attention.prefill`. For single tokens a tile of `group_rows` suffices."""
    _prefill[(len(sequence_T), heads.keys)](
        qkv, k, v, blocks, ends_B, lengths_B, sequence_T, first_T, out, stride, heads.scale,
        heads.queries, heads.keys, heads.size, page, rows, BLOCK, pdl, num_warps=4, num_stages=3, launch_pdl=pdl,
    )  # fmt: skip


def logits(x_RE: Tensor, w_VE: Tensor, temperature_R: Tensor, out_RV: Tensor, stats_RT2: Tensor, pdl: bool) -> None:
    """As `head.logits`, in tiles of one size."""
    rows, size = x_RE.shape
    tiles = head.num_tiles(len(w_VE))
    head._logits[(triton.cdiv(rows, 64), tiles)](
        x_RE, w_VE, temperature_R, out_RV, stats_RT2, rows, len(w_VE), size, tiles, 64, head.TILE, 64, pdl,
        num_warps=4, num_stages=4, launch_pdl=pdl,
    )  # fmt: skip


def logprobs(
    logits_RV: Tensor, stats_RT2: Tensor, temperature_R: Tensor, tokens_R: Tensor, out_R: Tensor, pdl: bool
) -> None:
    """Of the tokens given, from what `logits` left."""
    rows, vocabulary = logits_RV.shape
    tiles = head.num_tiles(vocabulary)
    _logprobs[(rows,)](
        logits_RV, stats_RT2, temperature_R, tokens_R, out_R, vocabulary, tiles, triton.next_power_of_2(tiles), pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def product(x_NC: Tensor, w_MC: Tensor, bias_M: Tensor | None = None, pdl: bool = False) -> Tensor:
    out_NM = x_NC.new_empty(len(x_NC), len(w_MC))
    linear.matrix(x_NC, w_MC, out_NM, cut=tile(len(x_NC)), bias_N=bias_M, pdl=pdl)
    return out_NM


def gated(x_NC: Tensor, w_MC: Tensor, pdl: bool = False) -> Tensor:
    out_NM = x_NC.new_empty(len(x_NC), len(w_MC) // 2)
    linear.matrix(x_NC, w_MC, out_NM, cut=tile(len(x_NC), gated=True), gated=True, pdl=pdl)
    return out_NM


def pieces(x_NC: Tensor, w_MC: Tensor, pdl: bool = False) -> Tensor:
    """SNM in float32, for `norm.add_norm` to add up in order."""
    count = num_pieces(*w_MC.shape)
    out_SNM = x_NC.new_empty(count, len(x_NC), len(w_MC), dtype=torch.float32)
    linear.matrix(x_NC, w_MC, out_SNM, cut=tile(len(x_NC), pieces=count), pdl=pdl)
    return out_SNM


def chosen_experts(
    x_NE: Tensor, layer: Experts, slots_N: Tensor, record_Sk: Tensor, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """What each of its experts makes of a token, kNE, to be added up; and which they are, Nk."""
    c = layer.gate.c
    rows, top = len(x_NE), c.num_experts_per_tok
    logits_NX = x_NE.new_empty(rows, c.num_experts, dtype=torch.float32)
    linear.matrix(x_NE, layer.gate.weight, logits_NX, cut=tile(rows), pdl=pdl)
    ids_Nk, shares_Nk = slots_N.new_empty(rows, top), logits_NX.new_empty(rows, top)
    experts.route(logits_NX, ids_Nk, shares_Nk, record_Sk, slots_N, renormalise=c.norm_topk_prob, pdl=pdl)
    counts_X, choices_XN = slots_N.new_empty(c.num_experts), slots_N.new_empty(c.num_experts, rows)
    experts.gather(ids_Nk, counts_X, choices_XN, pdl)
    act = x_NE.new_empty(rows * top, c.moe_intermediate_size)
    parts_NkE = x_NE.new_empty(rows, top, x_NE.shape[1])
    up, down = layer.experts.gate_up_proj, layer.experts.down_proj
    experts.grouped(x_NE, up, counts_X, choices_XN, shares_Nk, act, gated=True, pdl=pdl)
    experts.grouped(act, down, counts_X, choices_XN, shares_Nk, parts_NkE, gated=False, pdl=pdl)
    return parts_NkE.transpose(0, 1), ids_Nk


class InvariantNetwork(Network):
    def hidden(
        self, tokens_N: Tensor, slots_N: Tensor, drawn: Tensor, attend: Attend, record: Tensor | None, pdl: bool
    ) -> Tensor:
        x_NE = self.table_VE.new_empty(len(tokens_N), self.table_VE.shape[1])
        norm.embed(tokens_N, drawn, self.table_VE, x_NE)
        normed_NE = torch.empty_like(x_NE)
        norm.add_norm(x_NE, None, self.layers[0].input_gain, normed_NE, self.eps, pdl)
        gains = [layer.input_gain for layer in self.layers[1:]] + [self.gain_E]
        for number, (layer, gain) in enumerate(zip(self.layers, gains, strict=True)):
            mixed = attend(number, product(normed_NE, layer.qkv.weight, layer.qkv.bias, pdl))
            norm.add_norm(x_NE, pieces(mixed, layer.out, pdl), layer.mlp_gain, normed_NE, self.eps, pdl)
            if isinstance(layer.mlp, Experts):
                assert record is not None
                parts, _ = chosen_experts(normed_NE, layer.mlp, slots_N, record[:, layer.mlp.place], pdl)
            else:
                act = gated(normed_NE, layer.mlp.gate_up_proj.weight, pdl)
                parts = pieces(act, layer.mlp.down_proj.weight, pdl)
            norm.add_norm(x_NE, parts, gain, normed_NE, self.eps, pdl)
        return normed_NE

    def draw(
        self, hidden_RE: Tensor, temperature_R: Tensor, u_R: Tensor, logits_RV: Tensor, tokens_R: Tensor,
        logprobs_R: Tensor, pdl: bool,
    ) -> None:  # fmt: skip
        stats = logits_RV.new_empty(len(hidden_RE), head.num_tiles(len(self.head_VE)), 2)
        logits(hidden_RE, self.head_VE, temperature_R, logits_RV, stats, pdl)
        head.pick(logits_RV, stats, temperature_R, u_R, tokens_R, logprobs_R, pdl)
        logprobs(logits_RV, stats, temperature_R, tokens_R, logprobs_R, pdl)
