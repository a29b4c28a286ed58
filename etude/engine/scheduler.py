"""Which sequences take part in the next pass, and with how many tokens. Pure: no tensor, no clock.

    waiting  ->  running  ->  released
        ^ preempted |

Whoever draws token after token takes part in every pass, so a long prompt never stalls the others: it is read in
pieces, within what `step_tokens` leaves. A request is admitted when there are blocks for all that it has to read. If
blocks run out later, the last in rank gives up its own and waits; it loses no token, only the work of reading them
again. Rank is priority, then arrival. A waiting request of higher priority takes the place of a running one at once.

Who has a drafter may read guesses behind its last token, and draw behind each of them. Guesses take what is left when
everyone else has got what it needs to go on: nobody is preempted for them, and prompts keep half of the room.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from etude.core.types import Sample, spans
from etude.engine.blocks import Blocks, Table
from etude.engine.speculate import MAX_TOGETHER, Drafter

Top = tuple[tuple[int, float], ...]


class Constraint(Protocol):
    """What a request may say next: a grammar, at some point of a text."""

    def allowed(self) -> NDArray[np.bool_]:
        """Over the vocabulary; at least one is True."""

    def ahead(self, draft: Iterable[int]) -> list[NDArray[np.bool_]]:
        """What would be allowed behind each token of the draft, up to the first that is not allowed itself."""

    def accept(self, token: int) -> None:
        """The token was drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop: frozenset[int]
    top_p: float = 1.0
    top_k: int = 0
    priority: int = 0
    stream: bool = False
    top_logprobs: int = 0
    constraint: Constraint | None = None
    ends: Callable[[int], bool] | None = None
    """Told every token as it is drawn; True makes it the last."""
    experts_from: int | None = 0
    """The first position whose routed experts are reported; None: none are."""
    prediction: tuple[int, ...] | None = None
    """What the answer may look like. It changes nothing but the time that the answer takes."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """More texts that the answer may repeat: it begins anywhere in them."""

    @property
    def speculates(self) -> bool:
        return self.prediction is not None or bool(self.drafts)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way. `tokens` is the prompt and what was drawn so far; behind them there may be tokens that are
    drawn by passes that were started and not yet read back."""

    request: Request
    arrival: int
    draws: NDArray[np.float64]
    tokens: list[int]
    drafter: Drafter | None = None
    draft: list[int] = field(default_factory=list)
    """What the pass that is being planned reads behind the tokens."""
    table: Table | None = None
    """None: waiting."""
    num_read: int = 0
    """Tokens that the passes started so far have read, or read again since it was preempted."""
    num_pending: int = 0
    """Tokens that are not read back yet."""
    row: int = -1
    """Of the last pass that drew a token for it."""
    life: int = 0
    """Counts how often it lost its blocks. What a pass drew for an earlier life is not looked at."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    ended: bool = False
    """By what it said, not by its length."""
    num_drafted: int = 0
    num_accepted: int = 0
    """Tokens of drafts that were read, and those of them that were drawn."""

    @property
    def rank(self) -> tuple[int, int]:
        return -self.request.priority, self.arrival

    @property
    def num_drawn(self) -> int:
        """With those that are pending."""
        return len(self.logprobs) + self.num_pending

    @property
    def num_unread(self) -> int:
        return len(self.tokens) + len(self.draft) + self.num_pending - self.num_read

    @property
    def blocked(self) -> bool:
        """Nothing to do before the pending token is known: it is the last, or says what may follow."""
        return self.num_pending > 0 and (self.num_drawn == len(self.draws) or self.request.constraint is not None)

    def append(self, token: int, logprob: float, version: int, top: Top) -> None:
        self.num_pending -= 1
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.request.top_logprobs:
            self.tops.append(top)
        if self.request.constraint is not None:
            self.request.constraint.accept(token)
        ends = self.request.ends
        self.ended = token in self.request.stop or (ends is not None and ends(token))

    def give_up(self, count: int) -> None:
        """So many pending tokens were drawn behind wrong ones. The keys and values of those will be written over."""
        self.num_read -= count
        self.num_pending -= count

    @property
    def finish(self) -> Literal["stop", "length"] | None:
        if self.ended:
            return "stop"
        return "length" if len(self.logprobs) == len(self.draws) else None

    def sample(self, experts: bytes | None) -> Sample:
        assert self.finish is not None
        return Sample(
            tokens=tuple(self.tokens[len(self.request.prompt) :]),
            logprobs=tuple(self.logprobs),
            versions=spans(self.versions),
            finish=self.finish,
            experts=experts,
            top=tuple(self.tops),
            accepted=self.num_accepted,
            rejected=self.num_drafted - self.num_accepted,
        )


class Scheduler:
    def __init__(self, blocks: Blocks, *, max_batch: int, step_tokens: int) -> None:
        self.blocks, self.max_batch = blocks, max_batch
        self.step_tokens = max(step_tokens, max_batch + 1)  # when all but one draw, the last still gets on
        self.waiting: list[Sequence] = []  # both in order of rank
        self.running: list[Sequence] = []
        self.num_preempted = self.num_to_read = self.num_cached = 0

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_rank)

    def find(self, id: str) -> Sequence | None:
        return next((s for s in (*self.running, *self.waiting) if s.request.id == id), None)

    def release(self, sequence: Sequence) -> None:
        """It is finished, or nobody wants it any more."""
        sequence.num_pending = 0
        sequence.life += 1
        if sequence.table is None:
            self.waiting.remove(sequence)
        else:
            self.blocks.close(sequence.table)
            sequence.table = None
            self.running.remove(sequence)

    def seal(self) -> None:
        """New weights: nothing that those who run compute from now on may be used by others."""
        for sequence in self.running:
            assert sequence.table is not None
            self.blocks.seal(sequence.table)

    def choose(self, version: int) -> tuple[list[tuple[Sequence, int]], int]:
        """The next pass: who takes part, and how many tokens it reads, its draft included. First come those that read
        one token and were there before; the second value is their number."""
        self._yield_to_priority()
        ready = [sequence for sequence in self.running if not sequence.blocked]
        for sequence in ready:
            self._make_room(sequence)
        ready = [sequence for sequence in ready if sequence.table is not None]
        self._propose([sequence for sequence in ready if sequence.num_unread == 1])
        chosen = [(sequence, 1) for sequence in ready if sequence.num_unread == 1]
        num_single = len(chosen)
        chosen += [(sequence, sequence.num_unread) for sequence in ready if sequence.draft]
        left = self.step_tokens - sum(count for _, count in chosen)
        # From here on nobody is preempted: what is chosen is read. So it may be shared from here on, even within the
        # same pass, which in every layer writes all keys and values before it reads any.
        for sequence in ready:
            if left and sequence.num_unread > 1 and not sequence.draft:
                chosen.append((sequence, min(left, sequence.num_unread)))
                left -= chosen[-1][1]
        for sequence, count in chosen:
            self._read(sequence, count)
        while left and (newcomer := self._admit(version)):
            chosen.append((newcomer, min(left, newcomer.num_unread)))
            left -= chosen[-1][1]
            self._read(*chosen[-1])
        return chosen, num_single

    def _propose(self, answering: list[Sequence]) -> None:
        """Gives drafts to those who can tell what may come next; what one does not use is there for the others."""
        able = [sequence for sequence in answering if sequence.drafter and not sequence.num_pending]
        left = min(MAX_TOGETHER, (self.step_tokens - len(answering)) // 2)
        for number, sequence in enumerate(able):
            assert sequence.table is not None and sequence.drafter is not None
            to_draw = len(sequence.draws) - len(sequence.logprobs)
            room = self.blocks.room(sequence.table) - len(sequence.tokens)
            limit = min(left // (len(able) - number), to_draw - 1, room)
            sequence.draft = sequence.drafter.propose(sequence.tokens, limit)
            self.blocks.grow(sequence.table, len(sequence.tokens) + len(sequence.draft))
            left -= len(sequence.draft)

    def _read(self, sequence: Sequence, count: int) -> None:
        assert sequence.table is not None
        sequence.num_read += count
        self.blocks.learn(sequence.table, sequence.tokens, min(sequence.num_read, len(sequence.tokens)))

    def _make_room(self, sequence: Sequence) -> None:
        """For all that it has to read. If need be the last in rank goes, and that may be itself."""
        while sequence.table is not None and not self.blocks.grow(
            sequence.table, sequence.num_read + sequence.num_unread
        ):
            self._preempt(self.running[-1])

    def _yield_to_priority(self) -> None:
        while self.waiting and self.running:
            first, last = self.waiting[0], self.running[-1]
            if first.request.priority <= last.request.priority or self._has_place(first):
                return
            self._preempt(last)

    def _has_place(self, sequence: Sequence) -> bool:
        # Room to grow is left for those who run: to admit one only to preempt it at once would be work for nothing.
        needed = self.blocks.needed(len(sequence.tokens)) + len(self.running)
        return len(self.running) < self.max_batch and needed <= self.blocks.num_free

    def _admit(self, version: int) -> Sequence | None:
        if not self.waiting or len(self.running) == self.max_batch:
            return None
        sequence = self.waiting[0]
        table = self.blocks.open(sequence.tokens, version)
        spare = self.blocks.num_free - (self.blocks.needed(len(sequence.tokens)) - len(table.blocks))
        if spare < len(self.running):
            self.blocks.close(table)
            return None
        self.blocks.grow(table, len(sequence.tokens))
        del self.waiting[0]
        insort(self.running, sequence, key=_rank)
        sequence.table, sequence.num_read = table, table.num_known * self.blocks.block_size
        self.num_to_read += len(sequence.tokens)
        self.num_cached += sequence.num_read
        return sequence

    def _preempt(self, sequence: Sequence) -> None:
        """A pending token is forgotten, and drawn again later, by the same number."""
        self.release(sequence)
        sequence.num_read = 0
        self.add(sequence)
        self.num_preempted += 1


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
