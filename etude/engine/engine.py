"""Continuous batching: requests come and go between steps, and so do weights.

    add(request)  ->  waiting  ->  running: step, step, step  ->  Finished(id, sample)

A step is one forward pass over new tokens of many sequences (`scheduler` says whose, `plan` is the result, a `Runner`
carries it out): one token of everyone who is answering, and pieces of the prompts of those who are not that far. `swap`
puts in new weights between two steps. Running requests keep their keys and values and go on, and every token says which
version computed it; nothing that the old weights computed is used for a request that starts later.

With a runner that overlaps, a step starts one pass and returns what came of the one before. But when what was drawn
decides what is to be read next, because a request speculates, the result is waited for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from etude.core.types import Sample
from etude.engine.blocks import Blocks
from etude.engine.choose import runner_for
from etude.engine.plan import Drawn, Draws, Plan, Runner
from etude.engine.sampler import draws
from etude.engine.scheduler import Constraint, Request, Scheduler, Sequence
from etude.engine.speculate import Drafter
from etude.model.transformer import Transformer

__all__ = ["Constraint", "Engine", "Finished", "Request", "Stats", "Token"]

_Row = tuple[int, float, list[tuple[int, float]]]
"""A token that was drawn, its log-prob, and the likeliest in its place."""
MIN_TEMPERATURE = 1e-3
"""Short of 0, which is the likeliest token: logits divided by less overflow, and nothing can be drawn from that."""


@dataclass(frozen=True, slots=True)
class Token:
    """Of a request with `stream`, as soon as it is drawn."""

    id: str
    token: int
    logprob: float
    version: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    id: str
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    running: int
    waiting: int
    preempted: int
    """So far; so are the tokens."""
    blocks: int
    blocks_free: int
    read_tokens: int
    """Of prompts, and again of what was preempted."""
    cached_tokens: int
    """Those among them that the prefix cache knew."""
    drawn_tokens: int
    drafted_tokens: int
    """Of drafts that were read."""
    accepted_tokens: int
    """Those among them that were drawn."""


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A sequence in a pass that draws for it: behind its last token, and behind every token of the draft."""

    sequence: Sequence
    life: int
    draft: list[int]


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass that was started."""

    version: int
    drawing: list[_Drawing]
    read: Callable[[], Drawn]

    @property
    def is_awaited(self) -> bool:
        """Without its result nobody can say what may come next."""
        return any(each.sequence.drafter for each in self.drawing)


class Engine:
    def __init__(
        self, model: Transformer, *, max_batch: int, version: int = 0, step_tokens: int = 512,
        prefix_cache: bool = True, kv_bytes: int | None = None, runner: Runner | None = None,
    ) -> None:  # fmt: skip
        """`step_tokens`: what a pass may read in all; a long prompt is read in pieces of it. Without `prefix_cache`
        every request is computed from nothing. `runner`: what computes; by default the fastest that can."""
        c = model.config
        self.version, self.max_context, self.vocab_size = version, c.max_position_embeddings, c.vocab_size
        self._runner = runner or runner_for(model, max_batch, kv_bytes)
        self._blocks = Blocks(self._runner.num_blocks, self._runner.block_size, reuse=prefix_cache)
        # Pieces are for the others' sake; where there are none, a prompt is read at once.
        self._scheduler = Scheduler(
            self._blocks, max_batch=max_batch, step_tokens=step_tokens if max_batch > 1 else self.max_context
        )
        self._arrivals = itertools.count()
        self._under_way: _Pass | None = None
        self._drawn_tokens = self._drafted_tokens = self._accepted_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def idle(self) -> bool:
        return not (self._scheduler.running or self._scheduler.waiting or self._under_way)

    def stats(self) -> Stats:
        return Stats(
            running=self.num_running,
            waiting=self.num_waiting,
            preempted=self._scheduler.num_preempted,
            blocks=self._blocks.num_blocks,
            blocks_free=self._blocks.num_free,
            read_tokens=self._scheduler.num_to_read,
            cached_tokens=self._scheduler.num_cached,
            drawn_tokens=self._drawn_tokens,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that cannot be served. Reads only constants, so any thread may ask."""
        prompt, room = request.prompt, self.max_context - len(request.prompt)
        if not prompt or not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise ValueError(f"the prompt must be token ids from 0 to {self.vocab_size - 1}, and at least one")
        if room < 1:
            raise ValueError(f"the prompt has {len(prompt)} of {self.max_context} tokens: no room to answer")
        guesses = list(itertools.chain(request.prediction or (), *request.drafts))
        if guesses and not 0 <= min(guesses) <= max(guesses) < self.vocab_size:
            raise ValueError(f"prediction and drafts must be token ids from 0 to {self.vocab_size - 1}")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {request.max_tokens}")
        if request.temperature != 0 and not MIN_TEMPERATURE <= request.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or at least {MIN_TEMPERATURE}, not {request.temperature}")
        if not 0 < request.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {request.top_p}")
        if request.top_k < 0 or request.top_logprobs < 0:
            raise ValueError("top_k and top_logprobs must be 0 or more")
        needed = self._blocks.needed(len(prompt) + min(request.max_tokens, room))
        if needed > self._blocks.num_blocks:
            most = self._blocks.num_blocks * self._blocks.block_size
            raise ValueError(f"prompt and max_tokens are more than the {most} tokens that this engine has memory for")

    def add(self, request: Request) -> None:
        self.check(request)
        limit = min(request.max_tokens, self.max_context - len(request.prompt))
        sequence = Sequence(request, next(self._arrivals), draws(request.seed, limit), tokens=list(request.prompt))
        if request.speculates:
            sequence.drafter = Drafter(request.prompt, limit, request.prediction or (), request.drafts)
        self._scheduler.add(sequence)

    def abort(self, id: str) -> None:
        """Forgets a request; a request that is already finished, or was never added, is no mistake."""
        if sequence := self._scheduler.find(id):
            self._scheduler.release(sequence)

    def prepare(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """The slow part of putting in new weights. Any thread may do it while the engine runs; `swap` does the rest."""
        return self._runner.prepare(tensors)

    def swap(self, version: int, put_in_place: Callable[[], None]) -> None:
        """Every token that is drawn from the next step on comes from the weights that were prepared."""
        put_in_place()
        self._scheduler.seal()
        self.version = version

    def weights(self) -> dict[str, Tensor]:
        """A copy of what the engine computes with; not to be asked while weights are prepared or swapped."""
        return self._runner.weights()

    def load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.swap(version, self.prepare(tensors))

    def step(self) -> list[Token | Finished]:
        """One forward pass; returns the tokens of requests that stream, and the requests that are finished."""
        events: list[Token | Finished] = []
        if self._under_way and self._under_way.is_awaited:
            events, self._under_way = self._collect(self._under_way), None
        done = started = self._start()
        if self._runner.overlaps:
            done, self._under_way = self._under_way, started
        return events + (self._collect(done) if done else [])

    def _start(self) -> _Pass | None:
        chosen, num_single = self._scheduler.choose(self.version)
        if not chosen:
            return None
        drawing = [sequence for sequence, _ in chosen if not sequence.num_unread]
        read = self._runner.start(lay_out(chosen, num_single, self._blocks.block_size))
        started = _Pass(self.version, [_Drawing(each, each.life, each.draft) for each in drawing], read)
        row = 0
        for sequence in drawing:
            count = 1 + len(sequence.draft)
            sequence.row, sequence.num_pending, sequence.draft = row, sequence.num_pending + count, []
            row += count
        return started

    def _collect(self, done: _Pass) -> list[Token | Finished]:
        drawn = done.read()
        rows = iter(zip(drawn.tokens, drawn.logprobs, drawn.top or [[]] * len(drawn.tokens), strict=True))
        events: list[Token | Finished] = []
        for each in done.drawing:
            own = list(itertools.islice(rows, 1 + len(each.draft)))
            if each.sequence.life == each.life:  # otherwise finished, aborted or preempted meanwhile
                events += self._take(each, own, done.version)
        return events

    def _take(self, drawing: _Drawing, rows: list[_Row], version: int) -> list[Token | Finished]:
        """What was drawn counts as far as it was drawn behind the right tokens."""
        sequence, request = drawing.sequence, drawing.sequence.request
        events: list[Token | Finished] = []
        num_taken = num_accepted = 0
        for (token, logprob, likeliest), expected in zip(rows, [*drawing.draft, None], strict=True):
            num_taken += 1
            num_accepted += token == expected
            top = tuple(likeliest[: request.top_logprobs])
            sequence.append(token, logprob, version, top)
            if request.stream:
                events.append(Token(request.id, token, logprob, version, top))
            if sequence.finish or token != expected:
                break
        sequence.give_up(len(rows) - num_taken)
        sequence.num_drafted += len(drawing.draft)
        sequence.num_accepted += num_accepted
        self._drawn_tokens += num_taken
        self._drafted_tokens += len(drawing.draft)
        self._accepted_tokens += num_accepted
        return [*events, self._finish(sequence)] if sequence.finish else events

    def _finish(self, sequence: Sequence) -> Finished:
        experts = self._experts(sequence)
        self._scheduler.release(sequence)
        return Finished(sequence.request.id, sequence.sample(experts))

    def _experts(self, sequence: Sequence) -> bytes | None:
        first, num_read = sequence.request.experts_from, len(sequence.tokens) - 1  # the last token was drawn, not read
        if first is None or sequence.table is None:
            return None
        experts = self._runner.experts(np.array(sequence.table.blocks), num_read)
        return None if experts is None else experts[first * len(experts) // num_read :]


def lay_out(chosen: list[tuple[Sequence, int]], num_single: int, block_size: int) -> Plan:
    """The plan of a pass that reads the last `count` of the tokens that each sequence counts as read, its draft being
    the end of them. Those that have read all they have are to draw."""
    sequences = [sequence for sequence, _ in chosen]
    counts_B, lengths_B = np.array([count for _, count in chosen]), np.array([s.num_read for s in sequences])
    ends_B = counts_B.cumsum()
    tables = [sequence.table.blocks for sequence in sequences if sequence.table]
    longest = max(map(len, tables))
    blocks_BM = np.array([table + [0] * (longest - len(table)) for table in tables])
    sequence_N = np.arange(len(chosen)).repeat(counts_B)
    from_end_N = ends_B[sequence_N] - np.arange(ends_B[-1])  # 1 is a sequence's last
    positions_N = lengths_B[sequence_N] - from_end_N
    num_rows_B = np.array([0 if sequence.num_unread else 1 + len(sequence.draft) for sequence in sequences])
    return Plan(
        tokens_N=np.array([token for sequence, count in chosen for token in new_tokens(sequence, count)]),
        positions_N=positions_N,
        slots_N=blocks_BM[sequence_N, positions_N // block_size] * block_size + positions_N % block_size,
        ids_B=np.array([sequence.arrival for sequence in sequences]),
        starts_B=ends_B - counts_B,
        lengths_B=lengths_B,
        blocks_BM=blocks_BM,
        num_single=num_single,
        rows_R=np.flatnonzero(from_end_N <= num_rows_B[sequence_N]),
        draws=how_to_draw([sequence for sequence in sequences if not sequence.num_unread]),
    )


def new_tokens(sequence: Sequence, count: int) -> list[int]:
    known = sequence.tokens[sequence.num_read - count : sequence.num_read] + sequence.draft
    return known if len(known) == count else [*known, -1 - sequence.row]


def how_to_draw(drawing: list[Sequence]) -> Draws:
    """For every sequence as many rows as its draft has tokens, and one more."""
    rows: list[tuple[Request, float]] = []
    allowed: dict[int, NDArray[np.bool_]] = {}
    for sequence in drawing:
        request, begin = sequence.request, sequence.num_drawn
        if (constraint := request.constraint) is not None:
            # Behind a token that is not allowed nothing need be: it cannot be drawn, so nobody will look there.
            allowed |= enumerate([constraint.allowed(), *constraint.ahead(sequence.draft)], len(rows))
        rows += [(request, u) for u in sequence.draws[begin : begin + 1 + len(sequence.draft)]]
    return Draws(
        temperature_R=np.array([request.temperature for request, _ in rows], dtype=np.float32),
        top_p_R=np.array([request.top_p for request, _ in rows], dtype=np.float32),
        top_k_R=np.array([request.top_k for request, _ in rows], dtype=np.int64),
        u_R=np.array([u for _, u in rows], dtype=np.float64),
        allowed=allowed,
        top=max((request.top_logprobs for request, _ in rows), default=0),
    )
