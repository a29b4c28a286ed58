"""The scheduler: selects the sequences of the next pass, and the number of tokens of each. Pure: no
tensor, no clock.

    waiting  ->  running  ->  released
        ^ preempted |

A sequence that is decoding takes part in every pass, so a long prompt never stalls the others: it
is read in chunks, within what `max_batched_tokens` leaves. A request is admitted when there are
blocks for all tokens that it has to read. If blocks run out later, the sequence last in rank gives
up its blocks and waits; it loses no token, only the work of reading them again. Rank is the
priority class (interactive, standard, batch), then arrival. Waiting requests of a higher class take
the places of running ones at once. A request whose deadline has passed is released, waiting or
running.

The class batch takes what others leave: at most `max_batch_seqs` of its sequences run, and they sit
out the passes that read the prompt of a higher class, so that its first token comes as if the
engine were otherwise idle. Where it pays, prompts of the class batch wait a few passes for each
other and are read together.

A sequence with a drafter may compute draft tokens after its last token, and sample after each of
them. Drafts take what is left when every other sequence has what it needs to continue: no sequence
is preempted for them, and prompts keep half of the room.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from etude.core.sampling import Priority, Request, Sample, version_spans
from etude.engine.blocks import BlockManager, BlockTable
from etude.engine.speculate import MAX_DRAFT_TOKENS, NgramDrafter

PRIORITIES = get_args(Priority)
GATHER_PASSES = 8
"""The most passes that batch-class prompts wait for more of them."""
TopLogprobs = tuple[tuple[int, float], ...]


class Constraint(Protocol):
    """A constraint on the next token of a request, such as a grammar with its state."""

    def allowed(self) -> NDArray[np.bool_]:
        """A mask over the vocabulary of the tokens that may come next; at least one is True."""

    def allowed_after(self, draft: Iterable[int]) -> list[NDArray[np.bool_]]:
        """The masks after each token of the draft, up to the first token that is not allowed
        itself."""

    def accept(self, token: int) -> None:
        """Advance by a token that was sampled."""


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """A LoRA adapter that is loaded in a slot; requests ask for it by name."""

    slot: int
    number: int
    """The number of the load, from 1 on: blocks cached for an earlier adapter of the same name are
    not reused."""


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of a request in the scheduler. `tokens` is the prompt and the answer so far;
    further tokens may be pending, sampled by passes that were launched and not yet read back."""

    request: Request
    id: str
    arrival: int
    uniforms: NDArray[np.float64]
    tokens: list[int]
    adapter: LoadedAdapter | None = None
    """The adapter that its request names."""
    stream: bool = False
    """Report every token as soon as it is sampled."""
    constraint: Constraint | None = None
    stop_check: Callable[[int], bool] | None = None
    """Called with every sampled token; True makes it the last."""
    deadline: float = math.inf
    """The time to drop the request, by the clock of `expire`."""
    drafter: NgramDrafter | None = None
    draft: list[int] = field(default_factory=list)
    """Draft tokens that the pass being planned computes after `tokens`."""
    block_table: BlockTable | None = None
    """Its blocks; None while it is waiting."""
    num_computed_tokens: int = 0
    """Tokens computed by the passes launched since it was last admitted."""
    num_pending: int = 0
    """Sampled tokens that are not read back yet."""
    row: int = -1
    """Its row in the last pass that sampled for it."""
    num_to_read: int | None = None
    """Uncached tokens at the time when it first might have been admitted."""
    incarnation: int = 0
    """The number of times it lost its blocks. Tokens sampled for an earlier incarnation are
    ignored."""
    gave_way: bool = False
    """True for a batch-class sequence that had to wait for requests of a higher class, or for the
    capacity that is left to its class."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    stopped: bool = False
    """Ended by a stop token or stop text."""
    num_drafted: int = 0
    num_accepted: int = 0
    """Draft tokens that were computed, and those of them that were accepted."""

    @property
    def schedule_order(self) -> tuple[int, int]:
        return PRIORITIES.index(self.request.priority), self.arrival

    @property
    def is_batch(self) -> bool:
        return self.request.priority == "batch"

    @property
    def num_sampled_tokens(self) -> int:
        """The number of sampled tokens, pending ones included."""
        return len(self.logprobs) + self.num_pending

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.tokens) + len(self.draft) + self.num_pending - self.num_computed_tokens

    @property
    def awaits_output(self) -> bool:
        """True while it waits for its pending token, which is the last one or decides which tokens
        may follow."""
        return self.num_pending > 0 and (
            self.num_sampled_tokens == len(self.uniforms)
            or self.constraint is not None
            or self.request.params.reads_history
        )

    def append(self, token: int, logprob: float, version: int, top: TopLogprobs) -> None:
        self.num_pending -= 1
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.request.top_logprobs:
            self.top_logprobs.append(top)
        if self.constraint is not None:
            self.constraint.accept(token)
        self.stopped = token in self.request.stop_token_ids or (
            self.stop_check is not None and self.stop_check(token)
        )

    def rollback(self, count: int) -> None:
        """Take back the last `count` pending tokens, which follow a rejected draft token. Their
        keys and values will be overwritten."""
        self.num_computed_tokens -= count
        self.num_pending -= count

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        if self.stopped:
            return "stop"
        return "length" if len(self.logprobs) == len(self.uniforms) else None

    def to_sample(self, experts: bytes | None) -> Sample:
        assert self.finish_reason is not None
        return Sample(
            tokens=tuple(self.tokens[len(self.request.prompt) :]),
            logprobs=tuple(self.logprobs),
            versions=version_spans(self.versions),
            finish_reason=self.finish_reason,
            experts=experts,
            top_logprobs=tuple(self.top_logprobs),
            accepted_draft_tokens=self.num_accepted,
            rejected_draft_tokens=self.num_drafted - self.num_accepted,
            gave_way=self.gave_way,
        )


class Scheduler:
    """Continuous batching with chunked prefill, priorities and preemption."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        gather_tokens: int = 0,
    ) -> None:
        """`gather_tokens`: fewer prompt tokens than this, if they are of the class batch and more
        may come, are not worth a pass together with sequences that decode."""
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_batch_seqs = max_num_seqs
        # when all but one decode, the last still makes progress
        self.max_batched_tokens = max(max_batched_tokens, max_num_seqs + 1)
        self.waiting: list[Sequence] = []  # both in order of rank
        self.running: list[Sequence] = []
        self._gather_tokens = gather_tokens
        self._num_gathering = 0  # passes, for the sequences that wait now
        self.num_preempted = self.num_prompt_tokens = self.num_cached_tokens = 0

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_schedule_order)

    def find(self, id: str) -> Sequence | None:
        return next((s for s in (*self.running, *self.waiting) if s.id == id), None)

    def release(self, sequence: Sequence) -> None:
        """Release a sequence that is finished or aborted."""
        sequence.num_pending = 0
        sequence.incarnation += 1
        if sequence.block_table is None:
            self.waiting.remove(sequence)
        else:
            self.block_manager.free(sequence.block_table)
            sequence.block_table = None
            self.running.remove(sequence)

    def expire(self, now: float) -> list[Sequence]:
        """Release the sequences whose deadline has passed, and return them."""
        expired = [each for each in (*self.running, *self.waiting) if each.deadline <= now]
        for sequence in expired:
            self.release(sequence)
        return expired

    @property
    def num_batch(self) -> int:
        """Batch-class sequences that are running."""
        return len(self.running) - self._num_others

    @property
    def _num_others(self) -> int:
        """The number of running sequences of a higher class, which come first."""
        return bisect_left(self.running, (PRIORITIES.index("batch"), -1), key=_schedule_order)

    def limit_batch(self, max_batch_seqs: int) -> None:
        """Set the number of batch-class sequences that may run from now on; those last in rank give
        up their places."""
        self.max_batch_seqs = max_batch_seqs
        for sequence in self.running[::-1][: max(0, self.num_batch - max_batch_seqs)]:
            self._preempt(sequence)

    def stop_sharing(self) -> None:
        """Stop sharing what running sequences compute from now on: the weights have changed."""
        for sequence in self.running:
            assert sequence.block_table is not None
            self.block_manager.stop_sharing(sequence.block_table)

    def schedule(self, version: int) -> tuple[list[tuple[Sequence, int]], int]:
        """Schedule the next pass: its sequences, and the number of tokens that each computes,
        drafts included. Running sequences that compute a single token come first; the second value
        is their number."""
        self._preempt_for_priority()
        for sequence in self.running:  # a sequence that sits out holds only its window
            if sequence.block_table is not None:
                self.block_manager.pass_window(sequence.block_table, sequence.num_computed_tokens)
        ready = [sequence for sequence in self.running if not sequence.awaits_output]
        if self._reads_for_others:
            for sequence in ready:
                sequence.gave_way |= sequence.is_batch
            ready = [sequence for sequence in ready if not sequence.is_batch]
        for sequence in ready:
            self._ensure_blocks(sequence)
        ready = [sequence for sequence in ready if sequence.block_table is not None]
        self._propose_drafts(
            [sequence for sequence in ready if sequence.num_uncomputed_tokens == 1]
        )
        chosen = [(sequence, 1) for sequence in ready if sequence.num_uncomputed_tokens == 1]
        num_decode = len(chosen)
        chosen += [
            (sequence, sequence.num_uncomputed_tokens) for sequence in ready if sequence.draft
        ]
        left = self.max_batched_tokens - sum(count for _, count in chosen)
        # From here on no sequence is preempted: every chosen token is computed. So its blocks may
        # be shared from here on, even within the same pass, which in every layer writes all keys
        # and values before it reads any.
        for sequence in ready:
            if left and sequence.num_uncomputed_tokens > 1 and not sequence.draft:
                chosen.append((sequence, min(left, sequence.num_uncomputed_tokens)))
                left -= chosen[-1][1]
        for sequence, count in chosen:
            self._mark_computed(sequence, count)
        if self._gathers(version, beside=num_decode, reads=len(chosen) > num_decode):
            left = 0
        while left and (newcomer := self._admit(version)):
            chosen.append((newcomer, min(left, newcomer.num_uncomputed_tokens)))
            left -= chosen[-1][1]
            self._mark_computed(*chosen[-1])
        if self._num_others or self.max_batch_seqs < self.max_num_seqs:
            for sequence in self.waiting:
                sequence.gave_way |= sequence.is_batch
        return chosen, num_decode

    def _gathers(self, version: int, *, beside: int, reads: bool) -> bool:
        """True if batch-class sequences that could be admitted should wait for more. A device that
        decodes reads a few hundred tokens in hardly less time than a thousand. `beside`: number of
        sequences that decode. `reads`: this pass reads prompt tokens anyway."""
        newcomers = self.waiting[: self.max_num_seqs - len(self.running)]
        if reads or not beside or not newcomers or not newcomers[0].is_batch:
            self._num_gathering = 0
            return False
        few = sum(self._num_to_read(each, version) for each in newcomers) < self._gather_tokens
        self._num_gathering = (self._num_gathering + 1) * few % (GATHER_PASSES + 1)
        return self._num_gathering > 0

    def _num_to_read(self, sequence: Sequence, version: int) -> int:
        if sequence.num_to_read is None:
            table = self._match_prefix(sequence, version)
            cached = len(table.blocks) * self.block_manager.block_size
            self.block_manager.free(table)
            sequence.num_to_read = len(sequence.tokens) - cached
        return sequence.num_to_read

    def _match_prefix(self, sequence: Sequence, version: int) -> BlockTable:
        number = sequence.adapter.number if sequence.adapter else 0
        return self.block_manager.match_prefix(sequence.tokens, version, number)

    @property
    def _reads_for_others(self) -> bool:
        """True if a sequence above the class batch waits for its first token."""
        others = self.running[: self._num_others]
        if self.waiting and not self.waiting[0].is_batch:
            others.append(self.waiting[0])
        return any(not sequence.num_sampled_tokens for sequence in others)

    def _propose_drafts(self, answering: list[Sequence]) -> None:
        """Give drafts to the sequences that have a drafter; the budget that one leaves goes to the
        others."""
        able = [sequence for sequence in answering if sequence.drafter and not sequence.num_pending]
        left = min(MAX_DRAFT_TOKENS, (self.max_batched_tokens - len(answering)) // 2)
        for number, sequence in enumerate(able):
            assert sequence.block_table is not None and sequence.drafter is not None
            to_draw = len(sequence.uniforms) - len(sequence.logprobs)
            room = self.block_manager.max_tokens_for(sequence.block_table) - len(sequence.tokens)
            limit = min(left // (len(able) - number), to_draw - 1, room)
            sequence.draft = sequence.drafter.propose(sequence.tokens, limit)
            self.block_manager.allocate(
                sequence.block_table, len(sequence.tokens) + len(sequence.draft)
            )
            left -= len(sequence.draft)

    def _mark_computed(self, sequence: Sequence, count: int) -> None:
        assert sequence.block_table is not None
        sequence.num_computed_tokens += count
        self.block_manager.allocate_windowed(sequence.block_table, sequence.num_computed_tokens)
        self.block_manager.cache_full_blocks(
            sequence.block_table,
            sequence.tokens,
            min(sequence.num_computed_tokens, len(sequence.tokens)),
        )

    def _ensure_blocks(self, sequence: Sequence) -> None:
        """Allocate the blocks for its uncomputed tokens, preempting the sequence last in rank if
        necessary, which may be itself."""
        while sequence.block_table is not None and not self.block_manager.allocate(
            sequence.block_table, sequence.num_computed_tokens + sequence.num_uncomputed_tokens
        ):
            self._preempt(self.running[-1])

    def _preempt_for_priority(self) -> None:
        """Make room for all waiting sequences of a higher class: a burst of them takes the places
        of the others in one pass, not in one pass each."""
        num_blocks = 0
        for coming, first in enumerate(list(self.waiting)):
            num_blocks += self.block_manager.num_blocks_for(len(first.tokens))
            while self.running and first.schedule_order[0] < self.running[-1].schedule_order[0]:
                if self._has_room(coming, num_blocks):
                    break
                self._preempt(self.running[-1])
            else:
                return

    def _has_room(self, coming: int, num_blocks: int) -> bool:
        """True if there is room for another sequence after `coming` admitted ones, with this many
        blocks for all of them."""
        # Running sequences keep room to grow: admitting one only to preempt it at once would be
        # wasted work.
        num_running = len(self.running) + coming
        enough_blocks = num_blocks + num_running <= self.block_manager.num_free
        return num_running < self.max_num_seqs and enough_blocks

    def _admit(self, version: int) -> Sequence | None:
        if not self.waiting or len(self.running) == self.max_num_seqs:
            return None
        sequence = self.waiting[0]
        if sequence.is_batch and (self.num_batch >= self.max_batch_seqs or self._reads_for_others):
            return None
        table = self._match_prefix(sequence, version)
        spare = self.block_manager.num_free - (
            self.block_manager.num_blocks_for(len(sequence.tokens)) - len(table.blocks)
        )
        if spare < len(self.running):
            self.block_manager.free(table)
            return None
        self.block_manager.allocate(table, len(sequence.tokens))
        del self.waiting[0]
        insort(self.running, sequence, key=_schedule_order)
        sequence.block_table = table
        sequence.num_computed_tokens = table.num_cached_blocks * self.block_manager.block_size
        self.num_prompt_tokens += len(sequence.tokens)
        self.num_cached_tokens += sequence.num_computed_tokens
        return sequence

    def _preempt(self, sequence: Sequence) -> None:
        """Move a sequence back to the queue. Its pending token is sampled again later, with the
        same random number."""
        self.release(sequence)
        sequence.num_computed_tokens = 0
        self.add(sequence)
        self.num_preempted += 1


def _schedule_order(sequence: Sequence) -> tuple[int, int]:
    return sequence.schedule_order
