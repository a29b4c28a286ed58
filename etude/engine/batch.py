"""The forward batch: the inputs of one pass of a runner, as plain numbers on the host; and its
output.

The new tokens of all sequences are concatenated without padding. Sequences that decode come first,
`num_decode` of them: they have one new token each (so their index in the batch is the index in
`tokens`), and all their earlier tokens were computed in earlier passes. Then come sequences with a
draft, which are sampled after their last token and after every draft token, and sequences with a
chunk of their prompt; the tokens before that chunk may be shared with another sequence, and may be
computed in this same pass. Keys and values are kept in blocks: token i of a sequence has slot
`block * block_size + i % block_size`, where `block` is entry i // block_size of the sequence's row
of the block table. If layers with a window have their own blocks, there are two groups of layers:
these layers are the second group, and have their own block table.

Shapes: N new tokens, B sequences, M blocks of the longest of them, R sampled rows, G groups of
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from etude.core.sampling import SamplingParams
from etude.model.lora import Adapter

Ints = NDArray[np.int64]
"""All indices are int64, the type that torch wants on a CPU; a device copies them to the type it
prefers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """The sampling parameters of the R rows of a batch."""

    params_R: list[SamplingParams]
    u_R: NDArray[np.float64]
    """Uniform in [0, 1), the only source of randomness. The token is the inverse of the cumulative
    distribution at u."""
    token_masks: Mapping[int, NDArray[np.bool_]] = field(default_factory=dict)
    """Row -> mask over the vocabulary, for the rows that are constrained."""
    histories: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Row -> the prompt and the answer so far, for the rows whose parameters need them."""
    num_top_logprobs: int = 0
    """The number of top log-probs to report for every row."""

    @property
    def temperature_R(self) -> NDArray[np.float32]:
        """The temperature of each row; 0 is greedy."""
        return np.array([params.temperature for params in self.params_R], dtype=np.float32)

    @property
    def filtered_rows(self) -> list[int]:
        """The rows whose distribution is changed by more than the temperature."""
        return [
            row
            for row, params in enumerate(self.params_R)
            if params.filters or row in self.token_masks
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """The inputs of one forward pass over new tokens of many sequences."""

    tokens_N: Ints
    """Token ids; -1 - r stands for the token that row r of the previous batch sampled, which need
    not have been read back."""
    positions_N: Ints
    slot_mapping_GN: Ints
    """The slots that the keys and values of the new tokens are written to, before any is read."""
    seq_ids_B: Ints
    """A unique number of each sequence, the same in every pass."""
    query_starts_B: Ints
    """The start of each sequence's new tokens."""
    seq_lens_B: Ints
    """The length of each sequence after this pass, new tokens included."""
    block_table_GBM: Ints
    """The block tables, padded with 0. Windowed blocks are only valid within the window."""
    num_decode: int
    adapters_B: Ints
    """The slot of each sequence's adapter (`adapters`)."""
    logits_indices_R: Ints
    """Positions in `tokens` whose logits are sampled, in order: the last token of each sequence
    whose tokens are all computed; with a draft, the token before it and all of the draft."""
    sampling: SamplingBatch

    @property
    def slot_mapping_N(self) -> Ints:
        """The slots of the first group of layers, by which per-token data such as routed experts is
        kept."""
        own: Ints = self.slot_mapping_GN[0]
        return own

    @property
    def block_table_BM(self) -> Ints:
        """The block table of the first group."""
        own: Ints = self.block_table_GBM[0]
        return own

    @property
    def adapters_N(self) -> Ints:
        """The slot of each token's adapter."""
        counts_B = np.diff(self.query_starts_B, append=len(self.tokens_N))
        return self.adapters_B.repeat(counts_B)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """The sampled tokens of the R rows of a batch."""

    tokens: list[int]
    logprobs: list[float]
    """The log-prob of each token under the distribution that it was sampled from; for temperature 0
    under that of temperature 1."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """The top log-probs of each row, without tokens of probability 0; empty if none were asked
    for."""


class ModelRunner(Protocol):
    """A model on a device, with its KV cache."""

    num_blocks: int
    num_windowed_blocks: int
    """Blocks of layers with a window; 0: these use the same blocks as the others."""
    block_size: int
    overlaps: bool
    """True if `launch` returns before the pass is computed. The engine then plans the next pass
    meanwhile, and reads the output one pass later. Passes are computed in the order in which they
    were launched."""

    def launch(self, batch: ForwardBatch) -> Callable[[], SamplerOutput]:
        """Launch a forward pass. Call the result to wait for its output."""

    def routed_experts(self, blocks: Ints, length: int) -> bytes | None:
        """The routed experts of the first `length` tokens of a sequence in these blocks, [length,
        layers with experts, experts per token], uint8 or (with more than 256 experts) int16; None
        for a dense model. The ids are kept by slot, like keys and values, so that tokens found in
        the prefix cache have theirs too."""

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Prepare new weights as far as possible, on any thread. Call the result to put them in
        place, after all passes launched so far."""

    def prepare_adapter(self, slot: int, adapter: Adapter | None) -> Callable[[], None]:
        """Prepare the adapter in a slot in the same way; None empties it. Raises ValueError for an
        adapter that does not fit. Only for a runner created with adapters."""

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights in use, as they are published: by Hugging Face names, in bf16; only
        the adapter, if the weights have one. Any thread may call it, but not while new weights are
        prepared or put in place."""
