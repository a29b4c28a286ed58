"""Continuous batching: requests come and go between steps, and so do weights.

    add(request)  ->  waiting  ->  a row of the cache  ->  step, step, step  ->  Finished(id, sample)

A step is one forward pass: over the newcomers if there are any (they read their prompts together, each only what the
prefix cache does not know), otherwise over everyone who runs (one token each). `load` puts in new weights between two
steps. Running requests keep what they have in the cache and go on, and every token says which version computed it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.core.types import Sample
from etude.engine.prefix import PrefixCache
from etude.engine.runner import Runner
from etude.engine.sampler import draws, sample
from etude.engine.scheduler import Request, Running, Scheduler
from etude.model.transformer import Transformer

__all__ = ["Engine", "Finished", "Request"]

MIN_TEMPERATURE = 1e-3
"""Short of 0, which is the likeliest token: logits divided by less overflow, and nothing can be drawn from that."""


@dataclass(frozen=True, slots=True)
class Finished:
    id: str
    sample: Sample


class Engine:
    def __init__(self, model: Transformer, *, max_batch: int, version: int = 0, prefix_tokens: int = 65_536) -> None:
        self.version = version
        self.max_context = model.config.max_position_embeddings
        self.vocab_size = model.config.vocab_size
        self._scheduler = Scheduler(max_batch)
        self._runner = Runner(model, max_batch)
        self._prefix = PrefixCache(prefix_tokens)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def idle(self) -> bool:
        return not (self._scheduler.running or self._scheduler.waiting)

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that cannot be served. Reads only constants, so any thread may ask."""
        if not request.prompt or not 0 <= min(request.prompt) <= max(request.prompt) < self.vocab_size:
            raise ValueError(f"the prompt must be token ids from 0 to {self.vocab_size - 1}, and at least one")
        if len(request.prompt) >= self.max_context:
            raise ValueError(f"the prompt has {len(request.prompt)} of {self.max_context} tokens: no room to answer")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {request.max_tokens}")
        if request.temperature != 0 and not MIN_TEMPERATURE <= request.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or at least {MIN_TEMPERATURE}, not {request.temperature}")

    def add(self, request: Request) -> None:
        self.check(request)
        room = self.max_context - len(request.prompt)
        self._scheduler.add(request, draws(request.seed, min(request.max_tokens, room)))

    def abort(self, id: str) -> None:
        """Forgets a request; a request that is already finished, or was never added, is no mistake."""
        self._scheduler.drop_waiting(id)
        if sequence := self._scheduler.find_running(id):
            self._release(sequence)

    def load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Every token from the next step on comes from these weights."""
        self._runner.load(tensors)
        self._prefix.clear()
        self.version = version

    def step(self) -> list[Finished]:
        """One forward pass, one token for every sequence in it; returns the requests that it finished."""
        batch = self._admit() or self._scheduler.running
        if not batch:
            return []
        tokens, logprobs = self._draw(batch, self._runner.forward(batch))
        for sequence, token, logprob in zip(batch, tokens, logprobs, strict=True):
            sequence.append(token, logprob, self.version)
        return [self._finish(sequence) for sequence in list(batch) if sequence.finish]

    def _admit(self) -> list[Running]:
        admitted = self._scheduler.admit()
        for sequence in admitted:
            if known := self._prefix.find(sequence.request.prompt):
                sequence.num_cached, kv = known
                self._runner.cache.write(sequence.row, kv)
        return admitted

    def _draw(self, batch: Sequence[Running], logits_BV: Tensor) -> tuple[list[int], list[float]]:
        temperature_B = torch.tensor([sequence.request.temperature for sequence in batch])
        u_B = torch.tensor([sequence.next_draw for sequence in batch], dtype=torch.float64)
        tokens_B, logprobs_B = sample(logits_BV, temperature_B, u_B)
        return tokens_B.tolist(), logprobs_B.tolist()

    def _finish(self, sequence: Running) -> Finished:
        # The last token was sampled but never read, so the cache ends before it. A sequence that saw two versions, or
        # began before the last swap, is of no use to anyone who starts now.
        if sequence.versions[0] == self.version:
            kv = self._runner.cache.read(sequence.row, sequence.num_cached)
            self._prefix.put(sequence.tokens[: sequence.num_cached], kv)
        self._release(sequence)
        return Finished(sequence.request.id, sequence.sample())

    def _release(self, sequence: Running) -> None:
        if moved := self._scheduler.release(sequence):
            self._runner.cache.move(len(self._scheduler.running), moved.row, moved.num_cached)
