"""The model on a CUDA device: a pass is two captured graphs, and the host never waits for one before planning the next.

The halves of a pass are one token for every sequence that goes on, and pieces of prompts and drafts. All that a half
reads from the host is packed into one buffer (`Packing`) and copied in one go. Tokens are drawn on the device and fed
back there. Graphs are captured for a ladder of sizes; what does not fill its rung is padded with sequences of length 0
and tokens of slot -1. A pass over prompts that is larger than any rung runs uncaptured, by the same code; so does
everything on a CPU, which is for tests only (Triton's interpreter).

Shapes: N new tokens, B sequences, M blocks of the longest of them, R rows that draw, T tiles of `attention.prefill`,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.engine.kernels import attention
from etude.engine.kernels import invariant as evenly
from etude.engine.kernels.network import Network
from etude.engine.plan import Drawn, Ints, Plan
from etude.engine.sampler import sample
from etude.engine.speculate import MAX_TOGETHER
from etude.model.files import load_weights, weights
from etude.model.transformer import Transformer

SINGLE_LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
PROMPT_LADDER = (64, 128, 256, 512, 1024, 2048)
DRAFT_LADDER = (16, 32, 64, 128, 256, 512, 2048)
"""Of prompts too, but as many rows draw as may at all: behind every token of a draft."""
NOWHERE = 1 << 30
IN_FLIGHT = 4
"""Host buffers in turn; the engine has at most two passes under way."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a half is computed for: N, B, R and T. Without tiles it is the half of single tokens, and N = B = R."""

    tokens: int
    sequences: int
    rows: int
    tiles: int = 0


class Packing:
    """Where each input of a half lies in a buffer of 32-bit words; every field begins at a multiple of 16 bytes."""

    def __init__(self, size: Size) -> None:
        n, b, r, t = size.tokens, size.sequences, size.rows, size.tiles
        fields = {"tokens": n, "slots": n, "lengths": b, "temperature": r, "u": 2 * r, "stride": 1}
        if t:
            fields |= {"positions": n, "ends": b, "drawing": r, "sequence": t, "first": t}
        self._spans: dict[str, slice] = {}
        self.fixed = 0
        """Where the block table begins, which is of any width."""
        for name, count in fields.items():
            self._spans[name] = slice(self.fixed, self.fixed + count)
            self.fixed += -(-count // 4) * 4

    def fill(self, words: NDArray[np.int32], values: Mapping[str, NDArray[Any]], blocks_BM: Ints) -> int:
        """Returns the number of words. What is shorter than its field is followed by zeros; but tokens that are not
        there have no slot, and tiles that are not there begin behind everything."""
        words[: self.fixed] = 0
        words[self._spans["slots"]] = -1
        if "first" in self._spans:
            words[self._spans["first"]] = NOWHERE
        for name, value in values.items():
            start = self._spans[name].start
            words[start : start + value.nbytes // 4] = value.view(np.int32)
        words[self._spans["stride"]] = blocks_BM.shape[1]
        words[self.fixed : self.fixed + blocks_BM.size] = blocks_BM.reshape(-1)
        return self.fixed + blocks_BM.size

    def views(self, words: Tensor) -> dict[str, Tensor]:
        found = {name: words[span] for name, span in self._spans.items()} | {"blocks": words[self.fixed :]}
        return found | {"temperature": found["temperature"].view(torch.float32), "u": found["u"].view(torch.float64)}


@dataclass(frozen=True, slots=True)
class Half:
    """The inputs of one half of a pass on the host, and where its tokens go."""

    values: dict[str, NDArray[Any]]
    blocks_BM: Ints
    num_tokens: int
    num_sequences: int
    num_tiles: int
    row_R: Ints
    """Which rows of the plan are drawn in this half, in order."""


class CudaRunner:
    overlaps = True
    block_size = 64

    def __init__(self, model: Transformer, num_blocks: int, max_batch: int, *, invariant: bool = False) -> None:
        """With `invariant` what is computed for a token has the same bits whatever else is in a pass."""
        self.num_blocks, self.max_batch, self._max_rows = num_blocks, max_batch, max_batch + MAX_TOGETHER
        self._model, self._network = model.eval(), (evenly.InvariantNetwork if invariant else Network)(model)
        self._invariant = invariant
        c, weight = model.config, model.model.embed_tokens.weight.detach()
        shape = (c.num_hidden_layers, num_blocks, c.num_key_value_heads, self.block_size, c.head_dim)
        self._k, self._v = weight.new_zeros(shape), weight.new_zeros(shape)
        self.record: Tensor | None = None
        if c.experts:
            kind = torch.uint8 if c.experts.num_experts <= 256 else torch.int16
            places = (num_blocks * self.block_size, len(c.experts.layers), c.experts.num_experts_per_tok)
            self.record = torch.zeros(places, dtype=kind, device=weight.device)
        # Tokens drawn and the bits of their log-probs: of single tokens, then of prompts.
        num_rows = max_batch + self._max_rows
        self._results = torch.zeros(2, num_rows, dtype=torch.int32, device=weight.device)
        self._logits = weight.new_empty(num_rows, c.vocab_size, dtype=torch.float32)
        self._words = torch.zeros(2, self._num_words(), dtype=torch.int32, device=weight.device)
        self._hosts = [_Host(self._words, self._results) for _ in range(IN_FLIGHT)]
        self._turn = 0
        self._last_place_R: Ints = np.zeros(0, np.int64)
        self._copies = torch.cuda.Stream() if weight.is_cuda else None  # type: ignore[no-untyped-call]
        self._graphs: dict[Size, torch.cuda.CUDAGraph] = {}
        self.trace: list[tuple[Size, torch.cuda.Event, torch.cuda.Event | None]] | None = None
        """Set it to a list, and every half of a pass is noted with the events before and after it."""
        self._sizes = self._ladder()
        if weight.is_cuda:
            self._capture()

    def _num_words(self) -> int:
        largest = max(*PROMPT_LADDER, self._model.config.max_position_embeddings)
        fixed = Packing(self._prompt_size(largest, self.max_batch, self._max_rows)).fixed
        return fixed + self.max_batch * -(-self._model.config.max_position_embeddings // self.block_size)

    def _prompt_size(self, tokens: int, sequences: int, rows: int) -> Size:
        """With as many tiles as so many tokens of so many sequences can make."""
        tiles = tokens // attention.tile_tokens(self._network.layers[0].heads) + sequences
        return Size(tokens, sequences, rows, tiles)

    def _ladder(self) -> list[Size]:
        """The smallest that fits comes first."""
        singles = sorted({*(n for n in SINGLE_LADDER if n < self.max_batch), self.max_batch})
        prompts = [(n, few := min(max(16, n // 32), self.max_batch), few) for n in PROMPT_LADDER]
        drafts = [(n, min(n, self.max_batch), min(n, self._max_rows)) for n in DRAFT_LADDER]
        both = sorted({*prompts, *drafts}, key=lambda each: (each[0], each[2]))
        return [Size(n, n, n) for n in singles] + [self._prompt_size(*each) for each in both]

    @torch.inference_mode()
    def _capture(self) -> None:
        """Largest first, so that all graphs share the memory of the largest."""
        pool = torch.cuda.graph_pool_handle()
        for size in sorted(self._sizes, key=lambda size: -size.tokens):
            self._words.zero_()
            self._compute(size)  # compiles what is not compiled yet
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._compute(size)
            self._graphs[size] = graph

    @torch.inference_mode()
    def start(self, plan: Plan) -> Callable[[], Drawn]:
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % IN_FLIGHT
        host.wait()
        tokens_N = np.where(plan.tokens_N < 0, self._fed_back(plan.tokens_N), plan.tokens_N)
        halves = [half for half in (_singles(plan, tokens_N), self._prompts(plan, tokens_N)) if half is not None]
        sizes = [self._upload(half, host) for half in halves]
        for size in sizes:
            begin = self._mark()
            if size in self._graphs:
                self._graphs[size].replay()
            else:
                self._compute(size)
            if begin and self.trace is not None:
                self.trace.append((size, begin, self._mark()))
        place_R = np.zeros(len(plan.rows_R), np.int64)
        for half in halves:
            place_R[half.row_R] = np.arange(len(half.row_R)) + (self.max_batch if half.num_tiles else 0)
        self._last_place_R = place_R
        if plan.draws.plain and not plan.draws.top:
            host.take(self._results)
            return lambda: host.read(place_R)
        where = torch.from_numpy(place_R).to(self._results.device)
        drawn = sample(self._logits[where], plan.draws)
        self._results[0, where] = torch.tensor(drawn.tokens, dtype=torch.int32, device=where.device)
        return lambda: drawn

    def _mark(self) -> torch.cuda.Event | None:
        if self.trace is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _fed_back(self, tokens_N: Ints) -> Ints:
        """-1 - place for -1 - row, of tokens that the pass before has drawn."""
        if not len(self._last_place_R):
            return tokens_N
        return -1 - self._last_place_R[np.clip(-1 - tokens_N, 0, len(self._last_place_R) - 1)]

    def _prompts(self, plan: Plan, tokens_N: Ints) -> Half | None:
        begin = plan.num_single  # of the sequences, and of the tokens
        if begin == len(plan.starts_B):
            return None
        starts_B = plan.starts_B[begin:] - begin
        ends_B = np.append(starts_B[1:], len(plan.tokens_N) - begin)
        step = attention.tile_tokens(self._network.layers[0].heads)
        tiles = [(b, n) for b, (s, e) in enumerate(zip(starts_B, ends_B, strict=True)) for n in range(s, e, step)]
        sequence_T, first_T = np.array(tiles, np.int32).T
        row_R = np.flatnonzero(plan.rows_R >= begin)
        values = {
            "tokens": tokens_N[begin:], "slots": plan.slots_N[begin:], "positions": plan.positions_N[begin:],
            "lengths": plan.lengths_B[begin:], "ends": ends_B, "drawing": plan.rows_R[row_R] - begin,
            "sequence": sequence_T, "first": first_T,
        }  # fmt: skip
        packed = _packed(values) | _drawing(plan, row_R)
        return Half(packed, plan.blocks_BM[begin:], len(plan.tokens_N) - begin, len(starts_B), len(tiles), row_R)

    def _upload(self, half: Half, host: _Host) -> Size:
        """Copies the inputs of a half to the device, and says for which size it is to be computed."""
        wanted = Size(half.num_tokens, half.num_sequences, max(1, len(half.row_R)), half.num_tiles)
        size = next((size for size in self._sizes if _fits(wanted, size)), wanted)
        which = 1 if half.num_tiles else 0
        words = host.words[which]
        count = Packing(size).fill(words.numpy(), half.values, half.blocks_BM)
        self._words[which, :count].copy_(words[:count], non_blocking=True)
        return size

    def _compute(self, size: Size) -> None:
        which = 1 if size.tiles else 0
        got = Packing(size).views(self._words[which])
        pdl = self._words.is_cuda
        attend = self._over_prompts(got) if size.tiles else self._over_singles(got)
        hidden_NE = self._network.hidden(got["tokens"], got["slots"], self._results[0], attend, self.record, pdl)
        if size.tiles:
            hidden_NE = hidden_NE.index_select(0, got["drawing"])
        rows = slice(which * self.max_batch, which * self.max_batch + size.rows)
        self._network.draw(
            hidden_NE, got["temperature"], got["u"], self._logits[rows],
            self._results[0, rows], self._results[1, rows].view(torch.float32), pdl,
        )  # fmt: skip

    def _over_singles(self, got: Mapping[str, Tensor]) -> Callable[[int, Tensor], Tensor]:
        heads, rows = self._network.layers[0].heads, len(got["tokens"])
        decode = evenly.decode if self._invariant else partial(attention.decode, pieces=self._pieces(rows, heads))

        def attend(number: int, qkv: Tensor) -> Tensor:
            layer, out = self._network.layers[number], qkv.new_empty(rows, heads.queries * heads.size)
            decode(
                layer.heads, qkv, self._k[number], self._v[number], got["blocks"], got["stride"],
                got["lengths"], got["slots"], out, page=self.block_size, pdl=qkv.is_cuda,
            )  # fmt: skip
            return out

        return attend

    def _pieces(self, rows: int, heads: attention.Heads) -> attention.Pieces:
        splits = attention.num_splits(rows, heads.keys)
        shape, device = (rows, heads.keys, splits, attention.group_rows(heads)), self._words.device
        return attention.Pieces(
            splits,
            torch.empty(*shape, heads.size, device=device),
            torch.empty(*shape, 2, device=device),
            torch.zeros(rows * heads.keys, dtype=torch.int32, device=device),
        )

    def _over_prompts(self, got: Mapping[str, Tensor]) -> Callable[[int, Tensor], Tensor]:
        prefill = evenly.prefill if self._invariant else attention.prefill

        def attend(number: int, qkv: Tensor) -> Tensor:
            heads, k, v = self._network.layers[number].heads, self._k[number], self._v[number]
            attention.write(heads, qkv, k, v, got["positions"], got["slots"], page=self.block_size, pdl=qkv.is_cuda)
            out = qkv.new_empty(len(qkv), heads.queries * heads.size)
            prefill(
                heads, qkv, k, v, got["blocks"], got["stride"], got["ends"], got["lengths"], got["sequence"],
                got["first"], out, page=self.block_size, pdl=qkv.is_cuda,
            )  # fmt: skip
            return out

        return attend

    def experts(self, blocks: Ints, length: int) -> bytes | None:
        if self.record is None:
            return None
        # Beside the passes under way: those that wrote what is asked for were read back.
        with torch.cuda.stream(self._copies):
            by_block = self.record.view(self.num_blocks, self.block_size, *self.record.shape[1:])
            where = torch.from_numpy(blocks).to(self.record.device)
            return by_block[where].flatten(0, 1)[:length].cpu().numpy().tobytes()

    def prepare(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        # In place, so that the graphs go on to be right; in the order of the stream, so after all passes so far.
        return partial(load_weights, self._model, tensors)

    def weights(self) -> dict[str, Tensor]:
        return weights(self._model)


class _Host:
    """Pinned memory of one pass, and the event after which it may be used again."""

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

    def read(self, place_R: Ints) -> Drawn:
        self.wait()
        tokens, logprobs = self.results[0].numpy(), self.results[1].numpy().view(np.float32)
        return Drawn(tokens=tokens[place_R].tolist(), logprobs=logprobs[place_R].tolist(), top=[])


def _fits(wanted: Size, size: Size) -> bool:
    return (
        bool(wanted.tiles) == bool(size.tiles)
        and wanted.tokens <= size.tokens
        and wanted.sequences <= size.sequences
        and wanted.rows <= size.rows
        and wanted.tiles <= size.tiles
    )


def _packed(values: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.int32]]:
    return {name: np.ascontiguousarray(value, np.int32) for name, value in values.items()}


def _drawing(plan: Plan, row_R: Ints) -> dict[str, NDArray[Any]]:
    """Temperature and u. Rows that only fill a half up take the likeliest token, which nobody reads."""
    return {"temperature": plan.draws.temperature_R[row_R], "u": plan.draws.u_R[row_R]}


def _singles(plan: Plan, tokens_N: Ints) -> Half | None:
    count = plan.num_single
    if not count:
        return None
    row_R = np.arange(count)  # each of them draws
    values = {"tokens": tokens_N[:count], "slots": plan.slots_N[:count], "lengths": plan.lengths_B[:count]}
    return Half(_packed(values) | _drawing(plan, row_R), plan.blocks_BM[:count], count, count, 0, row_R)
