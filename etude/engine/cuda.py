"""The CUDA runner: a forward pass is two captured graphs, and the host never waits for one before
planning the next.

One graph is the decode part of a batch: one token of every sequence that is decoding. The other is
its prefill part: chunks of prompts, and drafts. All inputs that a graph reads from the host are
packed into one buffer (`InputLayout`) and copied in one transfer. Tokens are sampled on the device
and fed back there. Graphs are captured for a ladder of shapes; a smaller batch is padded with
sequences of length 0 and tokens of slot -1. A prefill part that is larger than any captured shape
runs uncaptured, by the same code; so does everything on a CPU, which is for tests only (Triton's
interpreter).

Shapes: N new tokens, B sequences, M blocks of the longest of them, R sampled rows, T tiles of
`attention.prefill`, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from etude.engine.adapters import OWN_SLOT, AdapterLimits
from etude.engine.batch import ForwardBatch, Ints, SamplerOutput, SamplingBatch
from etude.engine.graph_inputs import (
    ADAPTER_FIELDS,
    BLOCKS,
    SLOTS,
    GraphShape,
    InputLayout,
    PhaseInputs,
    PinnedBuffers,
    adapter_inputs,
    as_words,
    decode_inputs,
    fits,
    sampling_inputs,
    slot_inputs,
)
from etude.engine.kernels import attention, batch_invariant, fp8
from etude.engine.kernels.fused import ForwardContext, FusedForward, unsupported
from etude.engine.kernels.gated_delta import GatedDeltaDecode, delta_chunks
from etude.engine.kernels.lora import AdapterTiles, CudaAdapters
from etude.engine.kernels.pages import empty_pages
from etude.engine.kernels.unfused import UnfusedForward
from etude.engine.runner import block_size
from etude.engine.sampler import sample
from etude.engine.speculate import MAX_DRAFT_TOKENS
from etude.engine.staged_weights import stage_weights
from etude.model.files import hf_state_dict
from etude.model.lora import Adapter
from etude.model.recurrence import Recurrence, Span, StateCache
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
"""Sizes of a prefill part with drafts: every draft token is a row to sample."""
NUM_HOST_BUFFERS = 4
"""Host buffers, used in turn; the engine has at most two passes in flight."""


class CudaRunner:
    """A runner on CUDA graphs, with its KV cache in paged blocks."""

    overlaps = True
    block_size = 64

    def __init__(
        self, model: Transformer, num_blocks: int, max_num_seqs: int, *, invariant: bool = False,
        adapters: AdapterLimits | None = None, num_windowed_blocks: int = 0,
    ) -> None:  # fmt: skip
        """Capture the graphs. `invariant`: use batch-invariant kernels, which give a token the same
        bits in any batch. `adapters`: reserve room for them, and capture graphs both with and
        without them."""
        c = model.config
        self.num_blocks = num_blocks
        self.num_windowed_blocks = num_windowed_blocks
        if c.linear:
            self.block_size = max(self.block_size, block_size(c))
        self.max_num_seqs = max_num_seqs
        self._max_rows = max_num_seqs + MAX_DRAFT_TOKENS
        self._model = model.eval()
        for own in model.quantised_layers():
            own.quantised = fp8.quantise_rows(own.weight.detach())
        self._adapters = CudaAdapters(model, adapters) if adapters else None
        self._adapter_slots = adapters.num_slots if adapters else 0
        self._forward = _forward_of(model, invariant)
        self._forward.adapters = self._adapters
        self._invariant = invariant
        weight = model.model.embed_tokens.weight.detach()
        windowed = c.windowed_layers if num_windowed_blocks else ()
        self._group_of = [int(layer in windowed) for layer in c.cached_layers]
        counts = [(num_blocks, num_windowed_blocks)[group] for group in self._group_of]
        of_block = (c.num_key_value_heads, self.block_size, c.head_dim)
        fp8_kv = model.arithmetic.fp8_kv
        self._kv = [empty_pages(weight, (count, *of_block), fp8=fp8_kv) for count in counts]
        # One more block, for padding rows.
        self._states = StateCache(c, num_blocks + 1, weight) if c.linear else None
        self._recurrence: Recurrence | None = None  # of the prefill part of a pass
        self.expert_ids: Tensor | None = None
        if c.experts:
            kind = getattr(torch, c.experts.id_dtype)
            places = (
                num_blocks * self.block_size + 1,  # one for padding tokens
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
            PinnedBuffers(self._words, self._results) for _ in range(NUM_HOST_BUFFERS)
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
        shape = self._prefill_shape(largest, self.max_num_seqs, self._max_rows)
        return self._layout(replace(shape, adapter_slots=self._adapter_slots)).num_words

    def _layout(self, shape: GraphShape) -> InputLayout:
        blocks = -(-self._model.config.max_position_embeddings // self.block_size)
        groups = 2 if self.num_windowed_blocks else 1
        return InputLayout(shape, self.max_num_seqs * blocks, groups)

    def _prefill_shape(self, tokens: int, sequences: int, rows: int) -> GraphShape:
        """The shape of a prefill graph, with the most tiles that such a batch can have."""
        params = self._forward.layers[0].attention_config
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
        if self._states:  # the host lays out the chunks of a recurrent layer
            both = []
        plain = [GraphShape(n, n, n) for n in singles] + [
            self._prefill_shape(*each) for each in both
        ]
        if not self._adapters:
            return plain
        adapted = [replace(shape, adapter_slots=self._adapter_slots) for shape in plain]
        return adapted if self._invariant else plain + adapted

    @torch.inference_mode()
    def _capture(self) -> None:
        """Capture the graphs, largest first, so that all share the memory of the largest."""
        pool = torch.cuda.graph_pool_handle()
        for shape in sorted(self._shapes, key=lambda shape: -shape.tokens):
            self._words.zero_()
            self._compute(shape)  # compiles kernels that are not compiled yet
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
            for part in (decode_inputs(batch, tokens_N), self._prefill_inputs(batch, tokens_N))
            if part is not None
        ]
        self._add_adapters(parts, batch)
        shapes = [self._upload(part, host) for part in parts]
        self._recurrence = self._prefill_recurrence(batch)
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
        likeliest = self._sample_filtered(batch.sampling, place_R)
        host.take(self._results)
        return lambda: host.read(place_R, likeliest)

    def _sample_filtered(
        self, sampling: SamplingBatch, place_R: Ints
    ) -> list[list[tuple[int, float]]]:
        """Sample again the rows that need more than a temperature, and return the top log-probs.
        All other rows keep the kernels' result, so that no bit of it depends on these rows."""
        filtered = sampling.filtered_rows
        if not filtered and not sampling.num_top_logprobs:
            return []
        where = torch.from_numpy(place_R).to(self._results.device)
        sampled = sample(self._logits[where], sampling)
        tokens = torch.tensor([sampled.tokens[row] for row in filtered], dtype=torch.int32)
        logprobs = torch.tensor([sampled.logprobs[row] for row in filtered]).view(torch.int32)
        self._results[:, where[filtered]] = torch.stack((tokens, logprobs)).to(where.device)
        return sampled.top_logprobs

    def _add_adapters(self, parts: list[PhaseInputs], batch: ForwardBatch) -> None:
        """Give the parts of a batch the adapters of their rows, if any row has one. Rows without an
        adapter have the same bits either way only if they run in the same graph, so in
        batch-invariant mode this is always done."""
        if self._adapters is None:
            return
        for part in parts:
            own = slice(batch.num_decode, None) if part.num_tiles else slice(batch.num_decode)
            slots_N = batch.adapters_N[own]
            used = any(map(self._adapters.is_filled, np.unique(slots_N).tolist()))
            if used or self._invariant:
                part.values.update(adapter_inputs(slots_N))

    def _prefill_recurrence(self, batch: ForwardBatch) -> Recurrence | None:
        begin = batch.num_decode  # of the sequences, and of the tokens
        if self._states is None or begin == len(batch.query_starts_B):
            return None
        ends_B = np.append(batch.query_starts_B[1:], len(batch.tokens_N)) - begin
        spans = [
            Span(start - begin, end, length - (end - start + begin), row.tolist(), self.block_size)
            for start, end, length, row in zip(
                batch.query_starts_B.tolist(),
                ends_B.tolist(),
                batch.seq_lens_B.tolist(),
                batch.block_table_BM,
                strict=True,
            )
        ]
        return Recurrence(spans[begin:], self._states, delta_chunks)

    def _mark(self) -> torch.cuda.Event | None:
        if self.trace is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _fed_back(self, tokens_N: Ints) -> Ints:
        """References to tokens of the previous pass, as -1 - index in `_results` instead of -1 -
        row."""
        if not len(self._last_place_R):
            return tokens_N
        return -1 - self._last_place_R[np.clip(-1 - tokens_N, 0, len(self._last_place_R) - 1)]

    def _prefill_inputs(self, batch: ForwardBatch, tokens_N: Ints) -> PhaseInputs | None:
        begin = batch.num_decode  # of the sequences, and of the tokens
        if begin == len(batch.query_starts_B):
            return None
        starts_B = batch.query_starts_B[begin:] - begin
        ends_B = np.append(starts_B[1:], len(batch.tokens_N) - begin)
        step = attention.tile_tokens(self._forward.layers[0].attention_config)
        tiles = [
            (b, n)
            for b, (s, e) in enumerate(zip(starts_B, ends_B, strict=True))
            for n in range(s, e, step)
        ]
        sequence_T, first_T = np.array(tiles, np.int32).T
        row_R = np.flatnonzero(batch.logits_indices_R >= begin)
        values = {
            "tokens": tokens_N[begin:], **slot_inputs(batch, slice(begin, None)),
            "positions": batch.positions_N[begin:], "lengths": batch.seq_lens_B[begin:],
            "ends": ends_B, "logits_indices": batch.logits_indices_R[row_R] - begin,
            "sequence": sequence_T, "first": first_T,
        }  # fmt: skip
        packed = as_words(values) | sampling_inputs(batch, row_R)
        return PhaseInputs(
            packed,
            batch.block_table_GBM[:, begin:],
            len(batch.tokens_N) - begin,
            len(starts_B),
            len(tiles),
            row_R,
        )

    def _upload(self, part: PhaseInputs, host: PinnedBuffers) -> GraphShape:
        """Copy the inputs of a part to the device, and return the shape that it is computed for."""
        wanted = GraphShape(
            part.num_tokens, part.num_sequences, max(1, len(part.row_indices_R)), part.num_tiles,
            self._adapter_slots if part.has_adapters else 0,
        )  # fmt: skip
        shape = next((shape for shape in self._shapes if fits(wanted, shape)), wanted)
        which = 1 if part.num_tiles else 0
        words = host.words[which]
        layout = self._layout(shape)
        for written in layout.fill(words.numpy(), part.values, part.block_table_GBM):
            self._words[which, written].copy_(words[written], non_blocking=True)
        return shape

    def _compute(self, shape: GraphShape) -> None:
        which = 1 if shape.tiles else 0
        got = self._layout(shape).views(self._words[which])
        pdl = self._words.is_cuda
        if self._adapters:
            tiles = (got[name] for name in ADAPTER_FIELDS)
            self._adapters.tiles = AdapterTiles(*tiles) if shape.adapter_slots else None
        attend = self._prefill_attention(got) if shape.tiles else self._decode_attention(got)
        context = ForwardContext(got["positions"], attend, self._recurrence)
        if self._states and not shape.tiles:
            places = got["lengths"], got["blocks"], got["stride"]
            recur = GatedDeltaDecode(self._states, *places, self.block_size)
            context = replace(context, recur=recur)
        hidden_NE = self._forward.hidden(
            got["tokens"], got["slot_mapping"], self._results[0], context, self.expert_ids, pdl
        )
        if shape.tiles:
            hidden_NE = hidden_NE.index_select(0, got["logits_indices"])
        rows = slice(which * self.max_num_seqs, which * self.max_num_seqs + shape.rows)
        self._forward.sample(
            hidden_NE, got["temperature"], got["u"], self._logits[rows],
            self._results[0, rows], self._results[1, rows].view(torch.float32), pdl,
        )  # fmt: skip

    def _decode_attention(self, got: Mapping[str, Tensor]) -> Callable[[int, Tensor], Tensor]:
        first = self._forward.layers[0].attention_config
        rows = len(got["tokens"])
        decode = (
            batch_invariant.decode
            if self._invariant
            else partial(attention.decode, splits=self._split_buffers(rows, first))
        )

        def attend(number: int, qkv: Tensor) -> Tensor:
            layer, group = self._forward.layers[number], self._group_of[number]
            out = _attended(qkv, first)
            decode(
                layer.attention_config, qkv, *self._kv[number], got[BLOCKS[group]], got["stride"],
                got["lengths"], got[SLOTS[group]], out, page_size=self.block_size, pdl=qkv.is_cuda,
            )  # fmt: skip
            return out

        return attend

    def _split_buffers(
        self, rows: int, layer: attention.AttentionLayerConfig
    ) -> attention.SplitKvBuffers:
        splits = attention.num_splits(rows, layer.num_kv_heads)
        shape = (rows, layer.num_kv_heads, splits, attention.group_rows(layer))
        device = self._words.device
        return attention.SplitKvBuffers(
            splits,
            torch.empty(*shape, layer.head_dim, device=device),
            torch.empty(*shape, 2, device=device),
            torch.zeros(rows * layer.num_kv_heads, dtype=torch.int32, device=device),
        )

    def _prefill_attention(self, got: Mapping[str, Tensor]) -> Callable[[int, Tensor], Tensor]:
        prefill = batch_invariant.prefill if self._invariant else attention.prefill

        def attend(number: int, qkv: Tensor) -> Tensor:
            heads = self._forward.layers[number].attention_config
            group = self._group_of[number]
            k, v = self._kv[number]
            attention.write(
                heads,
                qkv,
                k,
                v,
                got["positions"],
                got[SLOTS[group]],
                page_size=self.block_size,
                pdl=qkv.is_cuda,
            )
            out = _attended(qkv, heads)
            prefill(
                heads, qkv, k, v, got[BLOCKS[group]], got["stride"], got["ends"], got["lengths"],
                got["sequence"], got["first"], out, page_size=self.block_size, pdl=qkv.is_cuda,
            )  # fmt: skip
            return out

        return attend

    def routed_experts(self, blocks: Ints, length: int) -> bytes | None:
        if self.expert_ids is None:
            return None
        # Concurrent with the passes in flight: the passes that wrote these ids have been read back.
        with torch.cuda.stream(self._copies):
            by_block = self.expert_ids[:-1].view(
                self.num_blocks, self.block_size, *self.expert_ids.shape[1:]
            )
            where = torch.from_numpy(blocks).to(self.expert_ids.device)
            return by_block[where].flatten(0, 1)[:length].cpu().numpy().tobytes()

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        # In place, so that the graphs stay valid; in stream order, so after all passes so far.
        put_in_place = stage_weights(self._model, tensors)
        quantised = self._model.quantised_layers()

        def swap() -> None:
            put_in_place()
            for own in quantised:
                assert own.quantised is not None
                fp8.quantise_into(own.weight, own.quantised)

        return swap

    def prepare_adapter(self, slot: int, adapter: Adapter | None) -> Callable[[], None]:
        assert self._adapters is not None
        return self._adapters.prepare(slot, adapter)

    def weights(self) -> dict[str, Tensor]:
        own = self._adapters.tensors(OWN_SLOT) if self._adapters else {}
        return own or hf_state_dict(self._model)


def _attended(qkv: Tensor, layer: attention.AttentionLayerConfig) -> Tensor:
    """Buffer for the attention output. Padding rows are never written: on a device this is
    harmless, but Triton's interpreter fails on values that may be in that memory."""
    shape = len(qkv), layer.num_q_heads * layer.head_dim
    return qkv.new_empty(shape) if qkv.is_cuda else qkv.new_zeros(shape)


def _forward_of(model: Transformer, invariant: bool) -> FusedForward | UnfusedForward:
    """The forward pass that fuses most of the model's layers."""
    if invariant:
        return batch_invariant.BatchInvariantForward(model)
    return UnfusedForward(model) if unsupported(model.config) else FusedForward(model)
