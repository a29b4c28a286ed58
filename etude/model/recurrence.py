"""Layers that keep a state instead of keys and values: a short convolution and the gated delta rule
(Gated DeltaNet).

Each head has a memory, a matrix from keys to values. A token lets the memory fade, removes what its
key finds in it, adds its own value instead, and reads it with its query. The tokens of a chunk are
processed together: what each of them removes follows from the others through a triangular system
(the WY form), and only the memory is passed from chunk to chunk.

In the engine the state belongs to a block of the KV cache, as keys and values do: it is the state
after the last token of the block. So a sequence that begins after a cached block finds its state
there, and the state goes along when blocks are freed, shared or overwritten. Chunks end where
blocks end.

Shapes: N tokens, B sequences, U chunks, J tokens of a chunk, C channels and W width of the
convolution, Y states to keep, H heads of the memory, K size of a key, V of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from etude.model.config import ModelConfig

Ints = NDArray[np.int64]
CHUNK = 64
"""The most tokens that are processed together."""
NORM_EPS = 1e-6


class StateCache:
    """The states of all recurrent layers after the last token of each block."""

    def __init__(self, config: ModelConfig, num_blocks: int, like: Tensor) -> None:
        c = config.linear
        assert c is not None
        tail = (num_blocks, c.conv_kernel_dim - 1, c.conv_dim)
        memory = (num_blocks, c.num_value_heads, c.key_head_dim, c.value_head_dim)
        self.tails = [like.new_zeros(tail) for _ in c.layers]
        self.memories = [like.new_zeros(memory, dtype=torch.float32) for _ in c.layers]


@dataclass(frozen=True, slots=True)
class Span:
    """The new tokens of one sequence, `start` to `end` among those of a pass; `first` is the
    position of the first. `blocks`: those of the sequence, each with `block_size` tokens; none in
    training."""

    start: int
    end: int
    first: int = 0
    blocks: Sequence[int] = ()
    block_size: int = CHUNK

    @property
    def before(self) -> int | None:
        """The block that holds the state before the first new token; None at the beginning of a
        sequence."""
        return self.blocks[(self.first - 1) // self.block_size] if self.first else None

    @property
    def written(self) -> list[tuple[int, int]]:
        """The blocks that get a state, each with the number of new tokens up to its end."""
        if not self.blocks:
            return []
        last = self.first + self.end - self.start
        places = range(self.first // self.block_size, -(-last // self.block_size))
        ends = [(self.blocks[n], min((n + 1) * self.block_size, last)) for n in places]
        return [(block, end - self.first) for block, end in ends]


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The computation of a layer between its projections, apart from the states."""

    weight_CW: Tensor
    num_key_heads: int
    key_size: int
    value_size: int
    act: Callable[[Tensor], Tensor]

    def convolved(self, rows_RC: Tensor) -> Tensor:
        """The rows from the W-th on after the convolution, in float32."""
        count = len(rows_RC) - self.weight_CW.shape[-1] + 1
        taps = self.weight_CW.float().unbind(-1)
        # A loop over the taps: a convolution of this shape is slow on a GPU.
        convolved = rows_RC[:count] * taps[0]
        for place, tap_C in enumerate(taps[1:], 1):
            convolved = convolved + rows_RC[place : place + count] * tap_C
        return convolved.float()

    def heads(self, mixed_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """NHK, NHK, NHV in float32: queries and keys of length 1, queries also scaled; heads that
        share a key each get a copy."""
        keys = self.num_key_heads * self.key_size
        q, k, v = mixed_NC.float().split_with_sizes((keys, keys, mixed_NC.shape[-1] - 2 * keys), -1)
        v_NHV = v.view(len(v), -1, self.value_size)
        shared = v_NHV.shape[1] // self.num_key_heads
        q_NHK, k_NHK = (
            _unit(x.view(len(x), self.num_key_heads, -1)).repeat_interleave(shared, 1)
            for x in (q, k)
        )
        return q_NHK * self.key_size**-0.5, k_NHK, v_NHV


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


Recur = Callable[[int, DeltaRule, Tensor, Tensor, Tensor], Tensor]
"""(index of the recurrent layer, its rule, mixed_NC, decay_NH, beta_NH) -> what every token reads,
NHV. `decay_NH`: the log of the share of the memory that remains; `beta_NH`: the share of the new
value that is added."""


class Recurrence:
    """The sequences of a pass, as recurrent layers see them. A sequence that begins after a block
    which another sequence writes in the same pass comes after it, in a later wave."""

    def __init__(
        self,
        spans: Sequence[Span],
        states: StateCache | None = None,
        rule_of_chunks: RuleOfChunks | None = None,
    ) -> None:
        """`rule_of_chunks`: computes chunks; by default `delta_chunks`."""
        wave_of: dict[int, int] = {}
        waves: dict[tuple[int, bool], list[Span]] = {}
        for span in spans:
            wave = 0 if span.before is None else wave_of.get(span.before, -1) + 1
            wave_of |= dict.fromkeys((block for block, _ in span.written), wave)
            # Single tokens need no chunks.
            waves.setdefault((wave, span.end - span.start > 1), []).append(span)
        self._states = states
        self._spans = [waves[key] for key in sorted(waves)]
        self._rule_of_chunks = rule_of_chunks or delta_chunks
        self._waves: list[_Wave] = []

    def __call__(
        self, place: int, rule: DeltaRule, mixed_NC: Tensor, decay_NH: Tensor, beta_NH: Tensor
    ) -> Tensor:
        """A call as in `Recur`."""
        if not self._waves:
            width = rule.weight_CW.shape[-1]
            self._waves = [
                _Wave(spans, width, mixed_NC.device, self._rule_of_chunks) for spans in self._spans
            ]
        states = self._states
        tails, memories = (states.tails[place], states.memories[place]) if states else (None, None)
        read = [wave(rule, tails, memories, mixed_NC, decay_NH, beta_NH) for wave in self._waves]
        if len(read) == 1:
            return read[0]
        order_N = torch.cat([wave.tokens for wave in self._waves])
        joined = torch.cat(read)
        return torch.empty_like(joined).index_copy(0, order_N, joined)


def _on(device: torch.device, arrays: dict[str, Ints]) -> dict[str, Tensor]:
    """Copy numbers of the host to a device, in one transfer without waiting for it."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays.values()]))
    if device.type == "cuda":
        flat = flat.pin_memory()
    sizes = [array.size for array in arrays.values()]
    parts = flat.to(device, non_blocking=True).split_with_sizes(sizes)
    shaped = zip(arrays.items(), parts, strict=True)
    return {name: part.view(array.shape) for (name, array), part in shaped}


class _Wave:
    """Sequences that do not depend on each other."""

    def __init__(
        self,
        spans: Sequence[Span],
        width: int,
        device: torch.device,
        rule_of_chunks: RuleOfChunks,
    ) -> None:
        counts_B = np.array([span.end - span.start for span in spans])
        begins_B = counts_B.cumsum() - counts_B
        sequence_N = np.arange(len(spans)).repeat(counts_B)
        token_N = np.arange(len(sequence_N))
        written = [(b, block, upto) for b, span in enumerate(spans) for block, upto in span.written]
        owner_Y, blocks_Y, upto_Y = np.array(written, np.int64).reshape(-1, 3).T
        # For the convolution each sequence comes after the tail of its earlier tokens.
        tail = np.arange(width - 1)
        start_B = begins_B + np.arange(len(spans)) * len(tail)
        ends_N = token_N + sequence_N * len(tail)
        rows = np.empty(len(token_N) + len(spans) * len(tail), np.int64)
        rows[start_B[:, None] + tail] = np.arange(len(spans) * len(tail)).reshape(len(spans), -1)
        rows[ends_N + len(tail)] = len(spans) * len(tail) + token_N
        starts_B = np.array([span.start for span in spans])
        numbers = _on(
            device,
            {
                "tokens": (starts_B - begins_B)[sequence_N] + token_N,
                "before": np.array([span.before or 0 for span in spans]),
                "is_first": np.array([span.before is None for span in spans], np.int64),
                "rows": rows,
                "ends": ends_N,
                "blocks": blocks_Y,
                "tails": (start_B[owner_Y] + upto_Y)[:, None] + tail,
            },
        )
        self.tokens = numbers["tokens"]
        self._before = numbers["before"]
        self._is_first = numbers["is_first"].bool()
        self._rows = numbers["rows"]
        self._ends = numbers["ends"]
        self._blocks = numbers["blocks"]
        self._tails = numbers["tails"]
        self._chunks = Chunks(spans, device) if counts_B.max() > 1 else None
        self._rule_of_chunks = rule_of_chunks

    def __call__(
        self,
        rule: DeltaRule,
        tails: Tensor | None,
        memories: Tensor | None,
        mixed_NC: Tensor,
        decay_NH: Tensor,
        beta_NH: Tensor,
    ) -> Tensor:
        if len(self.tokens) != len(mixed_NC):
            mixed_NC, decay_NH, beta_NH = (
                x.index_select(0, self.tokens) for x in (mixed_NC, decay_NH, beta_NH)
            )
        width = rule.weight_CW.shape[-1]
        count = len(self._before)
        tail_BWC = mixed_NC.new_zeros(count, width - 1, mixed_NC.shape[-1])
        if tails is not None:
            tail_BWC = tails[self._before].masked_fill(self._is_first[:, None, None], 0)
        rows = torch.cat((tail_BWC.flatten(0, 1), mixed_NC)).index_select(0, self._rows)
        if tails is not None:
            tails[self._blocks] = rows[self._tails]
        mixed_NC = rule.act(rule.convolved(rows).index_select(0, self._ends))

        heads = decay_NH.shape[-1]
        key_size = rule.key_size
        value_size = rule.value_size
        memory_BHKV = mixed_NC.new_zeros(count, heads, key_size, value_size)
        if memories is not None:
            first = self._is_first[:, None, None, None]
            memory_BHKV = memories[self._before].masked_fill(first, 0)
        decay_NH, beta_NH = decay_NH.float(), beta_NH.float()
        if self._chunks is None:
            read, kept = delta_step(*rule.heads(mixed_NC), decay_NH, beta_NH, memory_BHKV)
        else:
            read, kept = self._rule_of_chunks(
                self._chunks, rule, mixed_NC, decay_NH, beta_NH, memory_BHKV
            )
        if memories is not None:
            memories[self._blocks] = kept
        return read


def delta_step(
    q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, decay_BH: Tensor, beta_BH: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each sequence: what it reads (BHV), and the memory after it (BHKV)."""
    memory = memory * decay_BH.exp()[..., None, None]
    found_BHV = (memory * k_BHK.unsqueeze(-1)).sum(-2)
    change_BHV = (v_BHV - found_BHV) * beta_BH.unsqueeze(-1)
    memory = memory + k_BHK.unsqueeze(-1) * change_BHV.unsqueeze(-2)
    return (memory * q_BHK.unsqueeze(-1)).sum(-2), memory


class Chunks:
    """The positions of a wave's tokens in chunks. A block's chunks begin where the block does and
    are padded with tokens that neither change the memory nor let it fade. The first chunks of all
    sequences come first, longest sequence first, then the second chunks, and so on."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        size = min(CHUNK, spans[0].block_size)
        counts_B = np.array([span.end - span.start for span in spans])
        offsets_B = np.array([span.first % size for span in spans])
        chunks_B = -(-(offsets_B + counts_B) // size)
        order_B = np.argsort(-chunks_B, kind="stable")
        rank_B = np.argsort(order_B)
        alive_S = np.array([(chunks_B > step).sum() for step in range(chunks_B.max())])
        firsts_S = alive_S.cumsum() - alive_S
        self.num_alive = alive_S.tolist()
        """Number of sequences that have a chunk in each step."""

        sequence_N = np.arange(len(spans)).repeat(counts_B)
        begins_B = counts_B.cumsum() - counts_B
        token_N = np.arange(len(sequence_N))
        within_N = token_N - begins_B[sequence_N] + offsets_B[sequence_N]
        places_N = (firsts_S[within_N // size] + rank_B[sequence_N]) * size + within_N % size
        nobody = len(token_N)
        tokens = np.full(alive_S.sum() * size, nobody)
        tokens[places_N] = token_N
        kept_Y = [
            firsts_S[(span.first + upto - 1) // size - span.first // size] + rank_B[b]
            for b, span in enumerate(spans)
            for _, upto in span.written
        ]
        keep_U = np.full(alive_S.sum(), -1)
        keep_U[kept_Y] = np.arange(len(kept_Y))
        numbers = _on(
            device,
            {
                "tokens": tokens.reshape(-1, size),
                "places": places_N,
                "sequences": order_B,
                "num_chunks": chunks_B[order_B],
                "firsts": firsts_S,
                "keep": keep_U,
                "kept": np.array(kept_Y, np.int64),
            },
        )
        self.tokens_UJ = numbers["tokens"]
        """The token at each position; the number of tokens N for padding."""
        self.places_N = numbers["places"]
        self.sequences_B = numbers["sequences"]
        self.num_chunks_B = numbers["num_chunks"]
        """Of each sequence, in the order of `sequences_B`."""
        self.firsts_S = numbers["firsts"]
        """The first chunk of each step."""
        self.keep_U = numbers["keep"]
        """Index of the kept state that follows this chunk; -1: none."""
        self.kept_Y = numbers["kept"]


RuleOfChunks = Callable[[Chunks, DeltaRule, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(chunks, rule, mixed_NC, decay_NH, beta_NH, memory_BHKV) -> what every token reads, NHV, and the
memories to keep, YHKV."""


def delta_chunks(
    chunks: Chunks,
    rule: DeltaRule,
    mixed_NC: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    memory_BHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """`RuleOfChunks` on torch's operators."""

    def cut(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0) * (x.ndim - 1) + (0, 1))[chunks.tokens_UJ].transpose(1, 2)

    q, k, v = map(cut, rule.heads(mixed_NC))
    decay_UHJ, beta_UHJ = cut(decay_NH), cut(beta_NH)
    faded_UHJ, beta_UHJ1 = decay_UHJ.cumsum(-1), beta_UHJ.unsqueeze(-1)
    between = faded_UHJ.unsqueeze(-1) - faded_UHJ.unsqueeze(-2)
    later = torch.ones(between.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    left_UHJJ = between.masked_fill(later, -torch.inf).exp()

    left_UHJ1 = faded_UHJ.exp().unsqueeze(-1)
    both = torch.cat((v * beta_UHJ1, k * beta_UHJ1 * left_UHJ1), -1)
    system = (k * beta_UHJ1) @ k.transpose(-1, -2) * left_UHJJ
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    values, taken = solved.split_with_sizes((v.shape[-1], k.shape[-1]), -1)
    within = q @ k.transpose(-1, -2) * left_UHJJ
    q = q * left_UHJ1
    k_UHKJ = (k * (faded_UHJ[..., -1:] - faded_UHJ).exp().unsqueeze(-1)).transpose(-1, -2)
    whole = left_UHJ1[..., -1:, :]

    memory = memory_BHKV[chunks.sequences_B]
    read = []
    kept = []
    parts = (x.split(chunks.num_alive) for x in (q, within, values, taken, k_UHKJ, whole))
    for q_n, within_n, values_n, taken_n, k_n, whole_n in zip(*parts, strict=True):
        memory = memory[: len(q_n)]
        new = values_n - taken_n @ memory
        read.append(q_n @ memory + within_n @ new)
        memory = memory * whole_n + k_n @ new
        kept.append(memory)
    read_UJHV = torch.cat(read).transpose(1, 2)
    return read_UJHV.flatten(0, 1)[chunks.places_N], torch.cat(kept)[chunks.kept_Y]
