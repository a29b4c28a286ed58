"""The CUDA runner: a forward pass is two captured graphs, and the host never waits for one before
planning the next.

One graph is the decode part of a batch: one token of every sequence that is decoding. The other is
its prefill part: chunks of prompts, and drafts. All that a graph reads from the host is packed into
one buffer (`InputLayout`) and copied in one go. Tokens are sampled on the device and fed back
there. Graphs are captured for a ladder of shapes; a smaller batch is padded with sequences of
length 0 and tokens of slot -1. A prefill part that is larger than any captured shape runs
uncaptured, by the same code; so does everything on a CPU, which is for tests only (Triton's
interpreter).

Shapes: N new tokens, B sequences, M blocks of the longest of them, R rows that are sampled, T tiles
of `attention.prefill`, V vocabulary.
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

from etude.engine.batch import ForwardBatch, Ints, SamplerOutput
from etude.engine.kernels import attention, batch_invariant
from etude.engine.kernels.network import KernelNetwork
from etude.engine.sampler import sample
from etude.engine.speculate import MAX_DRAFT_TOKENS
from etude.engine.staged_weights import stage_weights
from etude.model.files import hf_state_dict
from etude.model.transformer import Transformer

DECODE_GRAPH_SIZES = (
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    160,
    192,
    224,
    256,
    320,
    384,
    448,
    512,
)
PREFILL_GRAPH_SIZES = (64, 128, 256, 512, 1024, 2048)
DRAFT_GRAPH_SIZES = (16, 32, 64, 128, 256, 512, 2048)
"""Sizes of the prefill part with drafts: every token of a draft is a row to sample."""
NOWHERE = 1 << 30
NUM_HOST_BUFFERS = 4
"""Host buffers in turn; the engine has at most two passes under way."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The shape that a CUDA graph is captured for: N tokens, B sequences, R rows and T tiles.
    Without tiles it is a decode graph, and N = B = R."""

    tokens: int
    sequences: int
    rows: int
    tiles: int = 0


class InputLayout:
    """The layout of a graph's inputs in a buffer of 32-bit words; every field begins at a multiple
    of 16 bytes."""

    def __init__(self, shape: GraphShape) -> None:
        n = shape.tokens
        b = shape.sequences
        r = shape.rows
        t = shape.tiles
        fields = {
            "tokens": n,
            "slot_mapping": n,
            "lengths": b,
            "temperature": r,
            "u": 2 * r,
            "stride": 1,
        }
        if t:
            fields |= {"positions": n, "ends": b, "logits_indices": r, "sequence": t, "first": t}
        self._spans: dict[str, slice] = {}
        self.fixed = 0
        """The offset of the block table, which is of any width."""
        for name, count in fields.items():
            self._spans[name] = slice(self.fixed, self.fixed + count)
            self.fixed += -(-count // 4) * 4

    def fill(
        self, words: NDArray[np.int32], values: Mapping[str, NDArray[Any]], block_table_BM: Ints
    ) -> int:
        """Write the inputs into the buffer, and return the number of words. Padding is 0; but
        padded tokens have slot -1, and padded tiles begin behind everything."""
        words[: self.fixed] = 0
        words[self._spans["slot_mapping"]] = -1
        if "first" in self._spans:
            words[self._spans["first"]] = NOWHERE
        for name, value in values.items():
            start = self._spans[name].start
            words[start : start + value.nbytes // 4] = value.view(np.int32)
        words[self._spans["stride"]] = block_table_BM.shape[1]
        words[self.fixed : self.fixed + block_table_BM.size] = block_table_BM.reshape(-1)
        return self.fixed + block_table_BM.size

    def views(self, words: Tensor) -> dict[str, Tensor]:
        found = {name: words[span] for name, span in self._spans.items()} | {
            "blocks": words[self.fixed :]
        }
        return found | {
            "temperature": found["temperature"].view(torch.float32),
            "u": found["u"].view(torch.float64),
        }


@dataclass(frozen=True, slots=True)
class HostGraphInputs:
    """The inputs of one graph, still on the host: the decode or the prefill part of a batch."""

    values: dict[str, NDArray[Any]]
    block_table_BM: Ints
    num_tokens: int
    num_sequences: int
    num_tiles: int
    row_indices_R: Ints
    """The rows of the batch that this part samples, in order."""


class CudaRunner:
    """A runner on CUDA graphs, with its KV cache in paged blocks."""

    overlaps = True
    block_size = 64

    def __init__(
        self, model: Transformer, num_blocks: int, max_num_seqs: int, *, invariant: bool = False
    ) -> None:
        """Capture the graphs. `invariant`: with batch-invariant kernels, which give a token the
        same bits in any batch."""
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self._max_rows = max_num_seqs + MAX_DRAFT_TOKENS
        self._model = model.eval()
        self._network = (batch_invariant.BatchInvariantNetwork if invariant else KernelNetwork)(
            model
        )
        self._invariant = invariant
        c = model.config
        weight = model.model.embed_tokens.weight.detach()
        shape = (
            c.num_hidden_layers,
            num_blocks,
            c.num_key_value_heads,
            self.block_size,
            c.head_dim,
        )
        self._k = weight.new_zeros(shape)
        self._v = weight.new_zeros(shape)
        self.expert_ids: Tensor | None = None
        if c.experts:
            kind = getattr(torch, c.experts.id_dtype)
            places = (
                num_blocks * self.block_size,
                len(c.experts.layers),
                c.experts.num_experts_per_tok,
            )
            self.expert_ids = torch.zeros(places, dtype=kind, device=weight.device)
        # Sampled tokens and the bits of their log-probs: of the decode, then of the prefill part.
        num_rows = max_num_seqs + self._max_rows
        self._results = torch.zeros(2, num_rows, dtype=torch.int32, device=weight.device)
        self._logits = weight.new_empty(num_rows, c.vocab_size, dtype=torch.float32)
        self._words = torch.zeros(2, self._num_words(), dtype=torch.int32, device=weight.device)
        self._host_buffers = [
            _PinnedBuffers(self._words, self._results) for _ in range(NUM_HOST_BUFFERS)
        ]
        self._next_buffer = 0
        self._last_place_R: Ints = np.zeros(0, np.int64)
        self._copies = torch.cuda.Stream() if weight.is_cuda else None  # type: ignore[no-untyped-call]
        self._graphs: dict[GraphShape, torch.cuda.CUDAGraph] = {}
        self.trace: list[tuple[GraphShape, torch.cuda.Event, torch.cuda.Event | None]] | None = None
        """Set it to a list to trace every graph with the events before and after it."""
        self._shapes = self._graph_shapes()
        if weight.is_cuda:
            self._capture()

    def _num_words(self) -> int:
        largest = max(*PREFILL_GRAPH_SIZES, self._model.config.max_position_embeddings)
        fixed = InputLayout(self._prefill_shape(largest, self.max_num_seqs, self._max_rows)).fixed
        return fixed + self.max_num_seqs * -(
            -self._model.config.max_position_embeddings // self.block_size
        )

    def _prefill_shape(self, tokens: int, sequences: int, rows: int) -> GraphShape:
        """The shape of a prefill graph, with the most tiles that such a batch can have."""
        params = self._network.layers[0].attention_params
        tiles = tokens // attention.tile_tokens(params) + sequences
        return GraphShape(tokens, sequences, rows, tiles)

    def _graph_shapes(self) -> list[GraphShape]:
        """The shapes to capture, decode graphs first, each kind from small to large."""
        singles = sorted(
            {*(n for n in DECODE_GRAPH_SIZES if n < self.max_num_seqs), self.max_num_seqs}
        )
        prompts = [
            (n, few := min(max(16, n // 32), self.max_num_seqs), few) for n in PREFILL_GRAPH_SIZES
        ]
        drafts = [(n, min(n, self.max_num_seqs), min(n, self._max_rows)) for n in DRAFT_GRAPH_SIZES]
        both = sorted({*prompts, *drafts}, key=lambda each: (each[0], each[2]))
        return [GraphShape(n, n, n) for n in singles] + [
            self._prefill_shape(*each) for each in both
        ]

    @torch.inference_mode()
    def _capture(self) -> None:
        """Capture the graphs, largest first, so that all share the memory of the largest."""
        pool = torch.cuda.graph_pool_handle()
        for shape in sorted(self._shapes, key=lambda shape: -shape.tokens):
            self._words.zero_()
            self._compute(shape)  # compiles what is not compiled yet
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._compute(shape)
            self._graphs[shape] = graph

    @torch.inference_mode()
    def launch(self, batch: ForwardBatch) -> Callable[[], SamplerOutput]:
        host = self._host_buffers[self._next_buffer]
        self._next_buffer = (self._next_buffer + 1) % NUM_HOST_BUFFERS
        host.wait()
        tokens_N = np.where(batch.tokens_N < 0, self._fed_back(batch.tokens_N), batch.tokens_N)
        parts = [
            part
            for part in (_decode_inputs(batch, tokens_N), self._prefill_inputs(batch, tokens_N))
            if part is not None
        ]
        shapes = [self._upload(part, host) for part in parts]
        for shape in shapes:
            begin = self._mark()
            if shape in self._graphs:
                self._graphs[shape].replay()
            else:
                self._compute(shape)
            if begin and self.trace is not None:
                self.trace.append((shape, begin, self._mark()))
        place_R = np.zeros(len(batch.logits_indices_R), np.int64)
        for part in parts:
            place_R[part.row_indices_R] = np.arange(len(part.row_indices_R)) + (
                self.max_num_seqs if part.num_tiles else 0
            )
        self._last_place_R = place_R
        if batch.sampling.is_unfiltered and not batch.sampling.num_top_logprobs:
            host.take(self._results)
            return lambda: host.read(place_R)
        where = torch.from_numpy(place_R).to(self._results.device)
        sampled = sample(self._logits[where], batch.sampling)
        self._results[0, where] = torch.tensor(
            sampled.tokens, dtype=torch.int32, device=where.device
        )
        return lambda: sampled

    def _mark(self) -> torch.cuda.Event | None:
        if self.trace is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _fed_back(self, tokens_N: Ints) -> Ints:
        """References to tokens of the pass before, as -1 - place in `_results` for -1 - row."""
        if not len(self._last_place_R):
            return tokens_N
        return -1 - self._last_place_R[np.clip(-1 - tokens_N, 0, len(self._last_place_R) - 1)]

    def _prefill_inputs(self, batch: ForwardBatch, tokens_N: Ints) -> HostGraphInputs | None:
        begin = batch.num_decode  # of the sequences, and of the tokens
        if begin == len(batch.query_starts_B):
            return None
        starts_B = batch.query_starts_B[begin:] - begin
        ends_B = np.append(starts_B[1:], len(batch.tokens_N) - begin)
        step = attention.tile_tokens(self._network.layers[0].attention_params)
        tiles = [
            (b, n)
            for b, (s, e) in enumerate(zip(starts_B, ends_B, strict=True))
            for n in range(s, e, step)
        ]
        sequence_T, first_T = np.array(tiles, np.int32).T
        row_R = np.flatnonzero(batch.logits_indices_R >= begin)
        values = {
            "tokens": tokens_N[begin:], "slot_mapping": batch.slot_mapping_N[begin:],
            "positions": batch.positions_N[begin:], "lengths": batch.seq_lens_B[begin:],
            "ends": ends_B, "logits_indices": batch.logits_indices_R[row_R] - begin,
            "sequence": sequence_T, "first": first_T,
        }  # fmt: skip
        packed = _packed(values) | _sampling_inputs(batch, row_R)
        return HostGraphInputs(
            packed,
            batch.block_table_BM[begin:],
            len(batch.tokens_N) - begin,
            len(starts_B),
            len(tiles),
            row_R,
        )

    def _upload(self, part: HostGraphInputs, host: _PinnedBuffers) -> GraphShape:
        """Copy the inputs of a part to the device, and return the shape that it is computed for."""
        wanted = GraphShape(
            part.num_tokens, part.num_sequences, max(1, len(part.row_indices_R)), part.num_tiles
        )
        shape = next((shape for shape in self._shapes if _fits(wanted, shape)), wanted)
        which = 1 if part.num_tiles else 0
        words = host.words[which]
        count = InputLayout(shape).fill(words.numpy(), part.values, part.block_table_BM)
        self._words[which, :count].copy_(words[:count], non_blocking=True)
        return shape

    def _compute(self, shape: GraphShape) -> None:
        which = 1 if shape.tiles else 0
        got = InputLayout(shape).views(self._words[which])
        pdl = self._words.is_cuda
        attend = self._prefill_attention(got) if shape.tiles else self._decode_attention(got)
        hidden_NE = self._network.hidden(
            got["tokens"], got["slot_mapping"], self._results[0], attend, self.expert_ids, pdl
        )
        if shape.tiles:
            hidden_NE = hidden_NE.index_select(0, got["logits_indices"])
        rows = slice(which * self.max_num_seqs, which * self.max_num_seqs + shape.rows)
        self._network.sample(
            hidden_NE, got["temperature"], got["u"], self._logits[rows],
            self._results[0, rows], self._results[1, rows].view(torch.float32), pdl,
        )  # fmt: skip

    def _decode_attention(self, got: Mapping[str, Tensor]) -> Callable[[int, Tensor], Tensor]:
        first, rows = self._network.layers[0].attention_params, len(got["tokens"])
        decode = (
            batch_invariant.decode
            if self._invariant
            else partial(attention.decode, splits=self._split_buffers(rows, first))
        )

        def attend(number: int, qkv: Tensor) -> Tensor:
            layer = self._network.layers[number]
            out = qkv.new_empty(rows, first.num_q_heads * first.head_dim)
            decode(
                layer.attention_params, qkv, self._k[number], self._v[number], got["blocks"],
                got["stride"], got["lengths"], got["slot_mapping"], out, page_size=self.block_size,
                pdl=qkv.is_cuda,
            )  # fmt: skip
            return out

        return attend

    def _split_buffers(
        self, rows: int, layer: attention.AttentionLayerParams
    ) -> attention.SplitBuffers:
        splits = attention.num_splits(rows, layer.num_kv_heads)
        shape = (rows, layer.num_kv_heads, splits, attention.group_rows(layer))
        device = self._words.device
        return attention.SplitBuffers(
            splits,
            torch.empty(*shape, layer.head_dim, device=device),
            torch.empty(*shape, 2, device=device),
            torch.zeros(rows * layer.num_kv_heads, dtype=torch.int32, device=device),
        )

    def _prefill_attention(self, got: Mapping[str, Tensor]) -> Callable[[int, Tensor], Tensor]:
        prefill = batch_invariant.prefill if self._invariant else attention.prefill

        def attend(number: int, qkv: Tensor) -> Tensor:
            heads = self._network.layers[number].attention_params
            k = self._k[number]
            v = self._v[number]
            attention.write(
                heads,
                qkv,
                k,
                v,
                got["positions"],
                got["slot_mapping"],
                page_size=self.block_size,
                pdl=qkv.is_cuda,
            )
            out = qkv.new_empty(len(qkv), heads.num_q_heads * heads.head_dim)
            prefill(
                heads, qkv, k, v, got["blocks"], got["stride"], got["ends"], got["lengths"],
                got["sequence"], got["first"], out, page_size=self.block_size, pdl=qkv.is_cuda,
            )  # fmt: skip
            return out

        return attend

    def routed_experts(self, blocks: Ints, length: int) -> bytes | None:
        if self.expert_ids is None:
            return None
        # Beside the passes under way: those that wrote what is asked for were read back.
        with torch.cuda.stream(self._copies):
            by_block = self.expert_ids.view(
                self.num_blocks, self.block_size, *self.expert_ids.shape[1:]
            )
            where = torch.from_numpy(blocks).to(self.expert_ids.device)
            return by_block[where].flatten(0, 1)[:length].cpu().numpy().tobytes()

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        # In place, so that the graphs go on to be right; in the order of the stream, so after all
        # passes so far.
        return stage_weights(self._model, tensors)

    def weights(self) -> dict[str, Tensor]:
        return hf_state_dict(self._model)


class _PinnedBuffers:
    """The pinned host memory of one pass, and the event after which it may be used again."""

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

    def read(self, place_R: Ints) -> SamplerOutput:
        self.wait()
        tokens, logprobs = self.results[0].numpy(), self.results[1].numpy().view(np.float32)
        return SamplerOutput(
            tokens=tokens[place_R].tolist(), logprobs=logprobs[place_R].tolist(), top_logprobs=[]
        )


def _fits(wanted: GraphShape, shape: GraphShape) -> bool:
    return (
        bool(wanted.tiles) == bool(shape.tiles)
        and wanted.tokens <= shape.tokens
        and wanted.sequences <= shape.sequences
        and wanted.rows <= shape.rows
        and wanted.tiles <= shape.tiles
    )


def _packed(values: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.int32]]:
    return {name: np.ascontiguousarray(value, np.int32) for name, value in values.items()}


def _sampling_inputs(batch: ForwardBatch, row_R: Ints) -> dict[str, NDArray[Any]]:
    """The temperature and u of the rows. Padded rows take the likeliest token, which is not
    read."""
    return {"temperature": batch.sampling.temperature_R[row_R], "u": batch.sampling.u_R[row_R]}


def _decode_inputs(batch: ForwardBatch, tokens_N: Ints) -> HostGraphInputs | None:
    count = batch.num_decode
    if not count:
        return None
    row_R = np.arange(count)  # each of them is sampled
    values = {
        "tokens": tokens_N[:count],
        "slot_mapping": batch.slot_mapping_N[:count],
        "lengths": batch.seq_lens_B[:count],
    }
    return HostGraphInputs(
        _packed(values) | _sampling_inputs(batch, row_R),
        batch.block_table_BM[:count],
        count,
        count,
        0,
        row_R,
    )
