"""Which requests wait, which run, and on which row. Pure: no tensor, no clock.

Running sequences always fill rows 0 .. n-1 of the key/value cache, so that a step reads one slice of it and never
gathers. A row that becomes free is filled by the last one; `release` says which, and the runner moves the data.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from etude.core.types import Sample, spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop: frozenset[int]


@dataclass(slots=True, eq=False)
class Running:
    """A request that holds a row. `tokens` is the prompt and what was sampled so far; the cache holds the first
    `num_cached` of them, and the rest is what the next forward pass reads."""

    request: Request
    row: int
    tokens: list[int]
    draws: list[float]
    num_cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def num_sampled(self) -> int:
        return len(self.logprobs)

    @property
    def next_draw(self) -> float:
        return self.draws[self.num_sampled]

    def append(self, token: int, logprob: float, version: int) -> None:
        """The model has read everything up to here, and said `token`."""
        self.num_cached = len(self.tokens)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    @property
    def finish(self) -> Literal["stop", "length"] | None:
        if self.tokens[-1] in self.request.stop and self.num_sampled:
            return "stop"
        return "length" if self.num_sampled == len(self.draws) else None

    def sample(self) -> Sample:
        assert self.finish is not None
        sampled = tuple(self.tokens[len(self.request.prompt) :])
        return Sample(tokens=sampled, logprobs=tuple(self.logprobs), versions=spans(self.versions), finish=self.finish)


class Scheduler:
    """First come, first served, up to `max_batch` at once."""

    def __init__(self, max_batch: int) -> None:
        self.max_batch = max_batch
        self.waiting: deque[Running] = deque()  # complete but for the row
        self.running: list[Running] = []  # the index is the row

    def add(self, request: Request, draws: list[float]) -> None:
        self.waiting.append(Running(request, row=-1, tokens=list(request.prompt), draws=draws))

    def admit(self) -> list[Running]:
        """Waiting requests take the free rows, behind those that run."""
        admitted = []
        while self.waiting and len(self.running) < self.max_batch:
            sequence = self.waiting.popleft()
            sequence.row = len(self.running)
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def drop_waiting(self, id: str) -> None:
        self.waiting = deque(sequence for sequence in self.waiting if sequence.request.id != id)

    def find_running(self, id: str) -> Running | None:
        return next((sequence for sequence in self.running if sequence.request.id == id), None)

    def release(self, sequence: Running) -> Running | None:
        """The sequence gives its row back. Returns the one that now owns that row instead of the last, if any."""
        last = self.running.pop()
        if last is sequence:
            return None
        last.row = sequence.row
        self.running[last.row] = last
        return last
