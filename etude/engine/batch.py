"""The forward batch: what the scheduler hands to a runner for one pass. Plain numbers on the host,
no tensor.

The new tokens of all sequences stand one after the other, without padding. Sequences that draw
token after token come first, `num_decode` of them: they have one new token each (so their place in
the batch is the place in `tokens`), and all that they have read before was read in earlier passes.
Then come those that read a draft behind their last token and draw behind every token of it, and
those that read a piece of their prompt; what stands before that piece may be another's, read in
this very pass. Keys and values live in blocks: token i of a sequence lies in slot `block *
block_size + i % block_size`, where `block` is entry i // block_size of the sequence's row of the
block table.

Shapes: N new tokens, B sequences, M blocks of the longest of them, R places where a token is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from etude.core.sampling import SamplingParams

Ints = NDArray[np.int64]
"""Everything that indexes is int64, which is what torch wants on a CPU; a device copies it to what
it likes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """The sampling parameters of the R rows of a batch. A sampler makes the arrays that it needs of
    them."""

    params_R: list[SamplingParams]
    u_R: NDArray[np.float64]
    """Uniform in [0, 1): all the randomness there is. The token is the inverse of the cumulative
    distribution at u."""
    token_masks: Mapping[int, NDArray[np.bool_]] = field(default_factory=dict)
    """Row -> mask over the vocabulary, for the rows that are constrained."""
    histories: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Row -> the prompt and all that was drawn before, for the rows whose parameters read them."""
    num_top_logprobs: int = 0
    """How many of the likeliest tokens of every row to report."""

    @property
    def temperature_R(self) -> NDArray[np.float32]:
        """0: the likeliest token."""
        return np.array([params.temperature for params in self.params_R], dtype=np.float32)

    @property
    def is_unfiltered(self) -> bool:
        """Nothing but the temperature changes the distribution of any row."""
        return not self.token_masks and not any(params.filters for params in self.params_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """The inputs of one forward pass over new tokens of many sequences."""

    tokens_N: Ints
    """-1 - r stands for the token that row r of the batch before this one has sampled: it need not
    have been read back."""
    positions_N: Ints
    slot_mapping_N: Ints
    """Where the keys and values of each new token are written, before anything is read."""
    seq_ids_B: Ints
    """A number for each sequence, the same for as long as the engine knows it, and nobody else's
    ever."""
    query_starts_B: Ints
    """Where the new tokens of each sequence begin."""
    seq_lens_B: Ints
    """Tokens that each sequence has after this pass, its new ones included: what its last new token
    sees."""
    block_table_BM: Ints
    """The block table. Past the end of a sequence it says 0, and whatever lies there must not
    matter."""
    num_decode: int
    logits_indices_R: Ints
    """Places in `tokens` after which a token is drawn, in order: the last of each sequence that has
    read all it has; with a draft, the token before it and all of its own."""
    sampling: SamplingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """The sampled tokens of the R rows of a batch."""

    tokens: list[int]
    logprobs: list[float]
    """Under the distribution that the token was drawn from; for temperature 0 that of temperature
    1."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Per row the likeliest tokens under that distribution, without those of probability 0; empty
    if none was asked."""


class Runner(Protocol):
    """A model on a device, with the memory for its keys and values."""

    num_blocks: int
    block_size: int
    overlaps: bool
    """True if `start` returns before the work is done. The engine then plans the next pass
    meanwhile, and reads the result one pass later. Passes are carried out in the order in which
    they were started."""

    def start(self, batch: ForwardBatch) -> Callable[[], SamplerOutput]:
        """Start the pass; what it returns waits for the result."""

    def experts(self, blocks: Ints, length: int) -> bytes | None:
        """The experts that the first `length` tokens of a sequence in these blocks were routed to,
        [length, layers with experts, experts per token], uint8 or (with more than 256 experts)
        int16; None for a dense model. The ids are kept by slot, like keys and values, so that
        tokens found in the prefix cache have theirs too."""

    def prepare(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Prepare new weights as far as possible, on any thread. What it returns puts them in
        place, after all passes started so far."""

    def weights(self) -> dict[str, Tensor]:
        """A copy of what it computes with, as it is published: by Hugging Face names, in bf16. Any
        thread may ask, but not while new weights are prepared or put in place."""
