"""The inference engine: continuous batching, with weights that are swapped between steps.

    add(request)  ->  waiting  ->  running: step, step, step  ->  FinishedRequest(id, sample)

A step is one forward pass over new tokens of many sequences: one token of each that is decoding,
and chunks of the prompts of the others. The `Scheduler` chooses them, `build_batch` makes the
`ForwardBatch`, and a `ModelRunner` computes it. `swap_weights` puts new weights in place between
two steps. Running requests keep their keys and values and continue, and every token records the
version that computed it; requests that start later use nothing that the old weights computed.

With a runner that overlaps, a step launches one pass and returns the output of the previous one. A
request that speculates needs its tokens before the next pass, so the step waits for its output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from etude.core.sampling import Request, Sample, SamplingParams
from etude.engine.adapters import OWN_SLOT, AdapterLimits, AdapterManager
from etude.engine.batch import ForwardBatch, ModelRunner, SamplerOutput, SamplingBatch
from etude.engine.blocks import BlockManager
from etude.engine.sampler import uniforms
from etude.engine.scheduler import Constraint, Scheduler, Sequence
from etude.engine.select import select_runner
from etude.engine.speculate import NgramDrafter
from etude.model.lora import Adapter
from etude.model.transformer import Transformer

CHUNK_TOKENS = {"cpu": 512, "cuda": 2048}
"""The most tokens of a pass, by device, unless the caller sets it."""
GATHER_TOKENS = 1024
"""Tokens of batch-class prompts that are worth a pass: fewer take just as long on a device, because
launches and reading its weights dominate."""

__all__ = [
    "Constraint",
    "Engine",
    "EngineStats",
    "ExpiredRequest",
    "FinishedRequest",
    "StreamedToken",
]

_Row = tuple[int, float, list[tuple[int, float]]]
"""A sampled token, its log-prob, and the top log-probs at its position."""


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """A token of a streaming request, reported as soon as it is sampled."""

    id: str
    token: int
    logprob: float
    version: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A finished request with its whole sample."""

    id: str
    sample: Sample


@dataclass(frozen=True, slots=True)
class ExpiredRequest:
    """A request that was dropped because its deadline has passed."""

    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The load of an engine, and its counters since it was created."""

    running: int
    waiting: int
    preemptions: int
    blocks: int
    blocks_free: int
    prompt_tokens: int
    """Prompt tokens; those of a preempted request count again."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    generation_tokens: int
    draft_tokens: int
    """Draft tokens that were computed."""
    accepted_tokens: int
    """Draft tokens that were accepted."""


@dataclass(frozen=True, slots=True)
class _SampledSequence:
    """A sequence that a pass samples tokens for: one after its last token, and one after every
    token of its draft."""

    sequence: Sequence
    incarnation: int
    draft: list[int]


@dataclass(frozen=True, slots=True)
class _InFlightPass:
    """A forward pass that has been launched; `read` waits for its output."""

    version: int
    sequences: list[_SampledSequence]
    read: Callable[[], SamplerOutput]

    @property
    def must_be_read_first(self) -> bool:
        """True if the next pass cannot be planned without the output of this one."""
        return any(each.sequence.drafter for each in self.sequences)


class Engine:
    """A synchronous inference engine: add requests, call `step`, swap weights between steps."""

    def __init__(
        self, model: Transformer, *, max_num_seqs: int, version: int = 0,
        max_batched_tokens: int | None = None, prefix_cache: bool = True,
        kv_cache_bytes: int | None = None, adapters: AdapterLimits | None = None,
        runner: ModelRunner | None = None,
    ) -> None:  # fmt: skip
        """Create an engine for a model. `max_batched_tokens`: the most tokens of one pass, by
        default a number that suits the device; a longer prompt is computed in chunks. Without
        `prefix_cache` every prompt is computed in full. `adapters`: reserve room for them; None:
        neither weights with an adapter nor requests for one are accepted. `runner`: by default the
        fastest that supports the model."""
        c = model.config
        self.version = version
        self.max_context = c.max_position_embeddings
        self.vocab_size = c.vocab_size
        self._is_recurrent = c.linear is not None
        if max_batched_tokens is None:
            max_batched_tokens = CHUNK_TOKENS[model.model.embed_tokens.weight.device.type]
        # Chunks keep long prompts from stalling other requests; with one sequence there are none,
        # and a prompt is computed at once.
        batched = max_batched_tokens if max_num_seqs > 1 else self.max_context
        self._runner = runner or select_runner(
            model, max_num_seqs, kv_cache_bytes, adapters, max_batched_tokens=batched
        )
        self._adapters = AdapterManager(adapters, self._runner)
        self._block_manager = BlockManager(
            self._runner.num_blocks,
            self._runner.block_size,
            prefix_cache=prefix_cache,
            window=c.sliding_window,
            num_windowed_blocks=self._runner.num_windowed_blocks,
        )
        self._scheduler = Scheduler(
            self._block_manager,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=batched,
            gather_tokens=GATHER_TOKENS if self._runner.overlaps else 0,
        )
        self._arrivals = itertools.count()
        self._in_flight: _InFlightPass | None = None
        self._whole: list[FinishedRequest] = []  # requests that were complete when they arrived
        self._generation_tokens = self._draft_tokens = self._accepted_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_batch(self) -> int:
        """Running requests of the class batch."""
        return self._scheduler.num_batch

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def idle(self) -> bool:
        return not (
            self._scheduler.running or self._scheduler.waiting or self._in_flight or self._whole
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self.num_running,
            waiting=self.num_waiting,
            preemptions=self._scheduler.num_preempted,
            blocks=self._block_manager.num_blocks,
            blocks_free=self._block_manager.num_free,
            prompt_tokens=self._scheduler.num_prompt_tokens,
            cached_tokens=self._scheduler.num_cached_tokens,
            generation_tokens=self._generation_tokens,
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that cannot be served. Any thread may call it: it reads
        only constants."""
        self._adapters.find(request.adapter)
        prompt = request.prompt
        room = self.max_context - len(request.prompt)
        if not prompt or not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise ValueError(
                f"the prompt must have at least one token, and token ids from 0 to "
                f"{self.vocab_size - 1}"
            )
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, which leaves no room for an answer in a "
                f"context of {self.max_context}"
            )
        guesses = list(itertools.chain(request.prediction or (), *request.drafts))
        if guesses and not 0 <= min(guesses) <= max(guesses) < self.vocab_size:
            raise ValueError(
                f"prediction and drafts must have token ids from 0 to {self.vocab_size - 1}"
            )
        if len(request.begun) > min(request.max_tokens, room):
            raise ValueError(
                f"the tokens that begin the answer exceed max_tokens = {request.max_tokens} "
                f"or the context"
            )
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {request.max_tokens}")
        if request.top_logprobs < 0:
            raise ValueError(f"top_logprobs must be 0 or more, not {request.top_logprobs}")
        request.params.check()
        needed = self._block_manager.num_blocks_for(len(prompt) + min(request.max_tokens, room))
        if needed > self._block_manager.num_blocks:
            most = self._block_manager.num_blocks * self._block_manager.block_size
            raise ValueError(
                f"prompt and max_tokens together exceed the {most} tokens that fit in this "
                f"engine's KV cache"
            )

    def add(
        self, request: Request, id: str, *, stream: bool = False,
        constraint: Constraint | None = None, stop_check: Callable[[int], bool] | None = None,
        deadline: float = math.inf,
    ) -> None:  # fmt: skip
        """Add a request to the queue. `id`: its name in the results of `step`. `constraint`: its
        grammar. `stop_check`: detects its stop texts. `deadline`: by the clock of `expire`."""
        self.check(request)
        limit = min(request.max_tokens, self.max_context - len(request.prompt))
        sequence = Sequence(
            request,
            id,
            next(self._arrivals),
            uniforms(request.seed, limit),
            tokens=list(request.prompt),
            adapter=self._adapters.find(request.adapter),
            stream=stream,
            constraint=constraint,
            stop_check=stop_check,
            deadline=deadline,
        )
        # A rejected draft could not be removed from a recurrent state.
        if request.speculates and not self._is_recurrent:
            sequence.drafter = NgramDrafter(
                request.prompt, limit, request.prediction or (), request.drafts
            )
        for token in request.begun:
            sequence.num_pending += 1
            sequence.append(token.token, token.logprob, token.version, token.top)
        if sequence.finish_reason:  # the begun answer was complete, only the result was missing
            self._whole.append(FinishedRequest(id, sequence.to_sample(experts=None)))
        else:
            self._scheduler.add(sequence)

    def abort(self, id: str) -> None:
        """Abort a request. An id that is finished or unknown is not an error."""
        if sequence := self._scheduler.find(id):
            self._scheduler.release(sequence)

    def limit_batch(self, max_batch_seqs: int) -> None:
        """Set the number of batch-class requests that may run at once from now on."""
        self._scheduler.limit_batch(max_batch_seqs)

    def expire(self, now: float) -> list[ExpiredRequest]:
        """Abort the requests whose deadline has passed."""
        return [ExpiredRequest(sequence.id) for sequence in self._scheduler.expire(now)]

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Prepare new weights, the slow part of a swap; any thread may do it while the engine runs.
        Pass the result to `swap_weights`. Tensors of an adapter go to its slot; the base is left
        alone if it is already in use, in the same memory."""
        return self._adapters.prepare_weights(tensors)

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Load an adapter that requests may name, replacing any adapter of that name. Raises
        ValueError for one that does not fit, and if there is no room."""
        self._adapters.load(name, adapter)
        self._scheduler.stop_sharing()

    def swap_weights(self, version: int, put_in_place: Callable[[], None]) -> None:
        """Put prepared weights in place: every token from the next step on is sampled from them."""
        put_in_place()
        self._scheduler.stop_sharing()
        self.version = version

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights in use. Do not call it while weights are prepared or swapped."""
        return self._runner.weights()

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.swap_weights(version, self.prepare_weights(tensors))

    def step(self) -> list[StreamedToken | FinishedRequest]:
        """Run one forward pass; return the tokens of requests that stream, and the requests that
        are finished."""
        events: list[StreamedToken | FinishedRequest] = [*self._whole]
        self._whole.clear()
        if self._in_flight and self._in_flight.must_be_read_first:
            events += self._process_output(self._in_flight)
            self._in_flight = None
        done = started = self._launch()
        if self._runner.overlaps:
            done, self._in_flight = self._in_flight, started
        return events + (self._process_output(done) if done else [])

    def _launch(self) -> _InFlightPass | None:
        chosen, num_decode = self._scheduler.schedule(self.version)
        if not chosen:
            return None
        sampled = [sequence for sequence, _ in chosen if not sequence.num_uncomputed_tokens]
        read = self._runner.launch(build_batch(chosen, num_decode, self._block_manager.block_size))
        started = _InFlightPass(
            self.version,
            [_SampledSequence(each, each.incarnation, each.draft) for each in sampled],
            read,
        )
        row = 0
        for sequence in sampled:
            count = 1 + len(sequence.draft)
            sequence.row = row
            sequence.num_pending += count
            sequence.draft = []
            row += count
        return started

    def _process_output(self, done: _InFlightPass) -> list[StreamedToken | FinishedRequest]:
        sampled = done.read()
        rows = iter(
            zip(
                sampled.tokens,
                sampled.logprobs,
                sampled.top_logprobs or [[]] * len(sampled.tokens),
                strict=True,
            )
        )
        events: list[StreamedToken | FinishedRequest] = []
        for each in done.sequences:
            own = list(itertools.islice(rows, 1 + len(each.draft)))
            # otherwise finished, aborted or preempted meanwhile
            if each.sequence.incarnation == each.incarnation:
                events += self._take(each, own, done.version)
        return events

    def _take(
        self, sampled: _SampledSequence, rows: list[_Row], version: int
    ) -> list[StreamedToken | FinishedRequest]:
        """Accept the sampled tokens as long as the draft before them was right."""
        sequence, request = sampled.sequence, sampled.sequence.request
        events: list[StreamedToken | FinishedRequest] = []
        num_taken = num_accepted = 0
        for (token, logprob, likeliest), expected in zip(rows, [*sampled.draft, None], strict=True):
            num_taken += 1
            num_accepted += token == expected
            top = tuple(likeliest[: request.top_logprobs])
            sequence.append(token, logprob, version, top)
            if sequence.stream:
                events.append(StreamedToken(sequence.id, token, logprob, version, top))
            if sequence.finish_reason or token != expected:
                break
        sequence.rollback(len(rows) - num_taken)
        sequence.num_drafted += len(sampled.draft)
        sequence.num_accepted += num_accepted
        self._generation_tokens += num_taken
        self._draft_tokens += len(sampled.draft)
        self._accepted_tokens += num_accepted
        return [*events, self._finish(sequence)] if sequence.finish_reason else events

    def _finish(self, sequence: Sequence) -> FinishedRequest:
        experts = self._experts(sequence)
        self._scheduler.release(sequence)
        return FinishedRequest(sequence.id, sequence.to_sample(experts))

    def _experts(self, sequence: Sequence) -> bytes | None:
        # the last token was sampled, not computed
        first = sequence.request.experts_from
        num_read = len(sequence.tokens) - 1
        if first is None or sequence.block_table is None:
            return None
        experts = self._runner.routed_experts(np.array(sequence.block_table.blocks), num_read)
        return None if experts is None else experts[first * len(experts) // num_read :]


def build_batch(
    scheduled: list[tuple[Sequence, int]], num_decode: int, block_size: int
) -> ForwardBatch:
    """Build the forward batch that computes the last `count` computed tokens of each sequence, its
    draft at their end. Sequences with no uncomputed tokens left are sampled."""
    sequences = [sequence for sequence, _ in scheduled]
    counts_B = np.array([count for _, count in scheduled])
    lengths_B = np.array([s.num_computed_tokens for s in sequences])
    ends_B = counts_B.cumsum()
    tables = [sequence.block_table for sequence in sequences if sequence.block_table]
    groups = [[table.blocks for table in tables]]
    if tables[0].windowed:
        groups.append([table.windowed for table in tables])
    longest = max(map(len, groups[0]))
    block_table_GBM = np.array(
        [[blocks + [0] * (longest - len(blocks)) for blocks in group] for group in groups]
    )
    sequence_N = np.arange(len(scheduled)).repeat(counts_B)
    from_end_N = ends_B[sequence_N] - np.arange(ends_B[-1])  # 1 is a sequence's last token
    positions_N = lengths_B[sequence_N] - from_end_N
    num_rows_B = np.array(
        [0 if sequence.num_uncomputed_tokens else 1 + len(sequence.draft) for sequence in sequences]
    )
    return ForwardBatch(
        tokens_N=np.array(
            [token for sequence, count in scheduled for token in new_tokens(sequence, count)]
        ),
        positions_N=positions_N,
        slot_mapping_GN=block_table_GBM[:, sequence_N, positions_N // block_size] * block_size
        + positions_N % block_size,
        seq_ids_B=np.array([sequence.arrival for sequence in sequences]),
        query_starts_B=ends_B - counts_B,
        seq_lens_B=lengths_B,
        block_table_GBM=block_table_GBM,
        num_decode=num_decode,
        adapters_B=np.array(
            [sequence.adapter.slot if sequence.adapter else OWN_SLOT for sequence in sequences]
        ),
        logits_indices_R=np.flatnonzero(from_end_N <= num_rows_B[sequence_N]),
        sampling=sampling_batch(
            [sequence for sequence in sequences if not sequence.num_uncomputed_tokens]
        ),
    )


def new_tokens(sequence: Sequence, count: int) -> list[int]:
    """The last `count` computed tokens; -1 - row for one that is not read back yet."""
    known = (
        sequence.tokens[sequence.num_computed_tokens - count : sequence.num_computed_tokens]
        + sequence.draft
    )
    return known if len(known) == count else [*known, -1 - sequence.row]


def sampling_batch(sequences: list[Sequence]) -> SamplingBatch:
    """The sampling parameters of a batch: for every sequence one row, and one more for each draft
    token."""
    params: list[SamplingParams] = []
    u: list[float] = []
    allowed: dict[int, NDArray[np.bool_]] = {}
    histories: dict[int, list[int]] = {}
    for sequence in sequences:
        first = len(params)
        count = 1 + len(sequence.draft)
        begin = sequence.num_sampled_tokens
        if (constraint := sequence.constraint) is not None:
            # No mask is needed after a token that is not allowed: it cannot be sampled, so those
            # rows are never read.
            allowed |= enumerate(
                [constraint.allowed(), *constraint.allowed_after(sequence.draft)], first
            )
        if sequence.request.params.reads_history:
            histories |= {
                first + number: sequence.tokens + sequence.draft[:number] for number in range(count)
            }
        params += [sequence.request.params] * count
        u += sequence.uniforms[begin : begin + count].tolist()
    return SamplingBatch(
        params_R=params,
        u_R=np.array(u, dtype=np.float64),
        token_masks=allowed,
        histories=histories,
        num_top_logprobs=max((sequence.request.top_logprobs for sequence in sequences), default=0),
    )
