"""Days of users under virtual time: the real engine with its scheduler, its blocks and
`core.lending`, over a runner that computes nothing and advances a clock instead. The figures so do
not depend on the load of the machine, and a day takes seconds.

The time of a pass is either measured here, as processor time of the real engine, or computed from
the data sheet of a GPU (`core.placement`), where a pass reads all weights for any number of
requests.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from etude.core.clock import ManualClock
from etude.core.lending import SlotPolicy
from etude.core.placement import DECODE_BANDWIDTH, GPUS, PREFILL_MFU
from etude.core.sampling import Priority, Request
from etude.engine.batch import ForwardBatch, Ints, SamplerOutput
from etude.engine.engine import Engine, FinishedRequest, StreamedToken
from etude.model.lora import Adapter
from etude.model.transformer import ModelConfig, Transformer, init_from_scratch

TOKEN = 11
"""The token that the runner always samples."""
DECIDE_S = 1.0
PASSES = 30
"""Measured passes of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """The duration of a forward pass, in seconds."""

    base_s: float
    sequence_s: float
    """Addition for each sequence that decodes."""
    token_s: float
    """Addition for each token of a prompt."""

    def of(self, num_decode: int, num_prompt_tokens: int) -> float:
        return self.base_s + self.sequence_s * num_decode + self.token_s * num_prompt_tokens


def gpu_cost(
    name: str, *, parameters: float, kv_bytes: float, context: int, weight_bytes: float = 2.0
) -> PassCost:
    """The cost of a dense model on one GPU. `context` is the number of tokens that a sequence has
    read."""
    gpu = GPUS[name]
    bandwidth = DECODE_BANDWIDTH * gpu.bandwidth
    return PassCost(
        base_s=parameters * weight_bytes / bandwidth,
        sequence_s=context * kv_bytes / bandwidth,
        token_s=2 * parameters / (PREFILL_MFU * gpu.flops),
    )


def measured_cost(config: ModelConfig, slots: int, prompt: int) -> PassCost:
    """The cost of the real engine, in processor time, so that other processes on the machine do not
    count."""
    torch.set_num_threads(1)
    engine = Engine(init_from_scratch(config, seed=0), max_num_seqs=slots)
    rng = random.Random(0)

    def passes_s(count: int) -> tuple[float, float]:
        """The time of the pass that reads `count` prompts, and the median of those that decode
        them."""
        for number in range(count):
            tokens = tuple(rng.randrange(10, config.vocab_size) for _ in range(prompt))
            engine.add(Request(prompt=tokens, max_tokens=PASSES, seed=number), str(number))
        taken = []
        while not engine.idle:
            began = time.process_time()
            engine.step()
            taken.append(time.process_time() - began)
        return taken[0], median(taken[1:])

    passes_s(slots)  # warmup
    one, all_slots = (zip(*(passes_s(n) for _ in range(5)), strict=True) for n in (1, slots))
    (read_one, decode_one), (_, decode_all) = (map(median, pair) for pair in (one, all_slots))
    sequence_s = max(0.0, (decode_all - decode_one) / (slots - 1))
    base_s = max(0.0, decode_one - sequence_s)
    return PassCost(
        base_s=base_s, sequence_s=sequence_s, token_s=max(0.0, read_one - base_s) / prompt
    )


class TimedRunner:
    """A `ModelRunner` that advances a clock instead of computing."""

    num_windowed_blocks = 0
    block_size = 16
    overlaps = False

    def __init__(self, clock: ManualClock, cost: PassCost, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._clock = clock
        self._cost = cost

    def launch(self, batch: ForwardBatch) -> Callable[[], SamplerOutput]:
        self._clock.move(self._cost.of(batch.num_decode, len(batch.tokens_N) - batch.num_decode))
        count = len(batch.logits_indices_R)
        return lambda: SamplerOutput(tokens=[TOKEN] * count, logprobs=[0.0] * count)

    def routed_experts(self, blocks: Ints, length: int) -> bytes | None:
        return None

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        raise NotImplementedError

    def prepare_adapter(self, slot: int, adapter: Adapter | None) -> Callable[[], None]:
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The sizes of requests in tokens, and the number of slots."""

    prompt: int
    answer: int
    rollout: int
    slots: int


@dataclass(slots=True)
class Played:
    """The measurements of a day."""

    ttft_s: list[float] = field(default_factory=list)
    turn_s: list[float] = field(default_factory=list)
    users_slot_s: float = 0.0
    rl_slot_s: float = 0.0
    busy_s: float = 0.0
    """Time in which the engine computed."""
    rl_tokens: int = 0
    seconds: float = 0.0
    preemptions: int = 0


class Day:
    """One engine, users who come at their times, and RL if there is a policy for it."""

    def __init__(
        self, config: ModelConfig, cost: PassCost, work: Work, policy: SlotPolicy | None
    ) -> None:
        self._clock = ManualClock()
        self._work = work
        self._policy = policy
        blocks = work.slots * math.ceil(config.max_position_embeddings / TimedRunner.block_size)
        self._engine = Engine(
            Transformer(config),
            max_num_seqs=work.slots,
            runner=TimedRunner(self._clock, cost, blocks),
        )
        self._rng = random.Random(0)
        self._vocabulary = config.vocab_size
        self._came: dict[str, tuple[float, float]] = {}
        self._answered: set[str] = set()
        self._ids = itertools.count()
        self._rl_at = -math.inf
        self.played = Played()

    def play(self, arrivals: Sequence[float], seconds: float) -> Played:
        """Run until the day is over and all users have their answers."""
        engine = self._engine
        clock = self._clock
        coming = list(reversed(arrivals))
        decide_at = 0.0
        for _ in range(self._work.slots * 3 // 2 if self._policy else 0):
            self._sample()
        while coming or self._came or clock.now() < seconds:
            while coming and coming[-1] <= clock.now():
                self._ask(coming.pop())
            if self._policy and clock.now() >= decide_at:
                engine.limit_batch(self._policy.decide(clock.now()))
                decide_at = clock.now() + DECIDE_S
            began = clock.now()
            self._take(engine.step())
            if clock.now() == began:  # it had nothing to do
                soon = min(coming[-1] if coming else seconds, decide_at or math.inf)
                clock.move(max(soon, began + 1e-3) - began)
                continue
            self._count(clock.now() - began)
        self.played.seconds = clock.now()
        self.played.preemptions = engine.stats().preemptions
        return self.played

    def _ask(self, came: float) -> None:
        id = f"user {next(self._ids)}"
        since = 0.0 if self._engine.num_batch else came - self._rl_at
        self._came[id] = (came, max(0.0, since))
        self._add(id, self._work.prompt, self._work.answer, "standard")

    def _sample(self) -> None:
        id = f"rollout {next(self._ids)}"
        self._add(id, self._work.rollout // 2, self._work.rollout, "batch")

    def _add(self, id: str, prompt: int, answer: int, priority: Priority) -> None:
        tokens = tuple(self._rng.randrange(10, self._vocabulary) for _ in range(prompt))
        asked = Request(prompt=tokens, max_tokens=answer, seed=0, priority=priority)
        self._engine.add(asked, id, stream=priority != "batch")

    def _take(self, events: Sequence[StreamedToken | FinishedRequest]) -> None:
        now = self._clock.now()
        for event in events:
            is_whole = isinstance(event, FinishedRequest)
            if event.id not in self._came:
                self.played.rl_tokens += self._work.rollout
                self._sample()
                continue
            came, since_rl_s = self._came[event.id]
            if event.id not in self._answered:
                self._answered.add(event.id)
                self.played.ttft_s.append(now - came)
                if self._policy:
                    self._policy.first_token(now - came, since_rl_s=since_rl_s)
            if is_whole:
                self._answered.remove(event.id)
                del self._came[event.id]
                self.played.turn_s.append(now - came)

    def _count(self, passed_s: float) -> None:
        batch = self._engine.num_batch
        if batch:
            self._rl_at = self._clock.now()
        self.played.busy_s += passed_s
        self.played.rl_slot_s += passed_s * batch
        self.played.users_slot_s += passed_s * (self._engine.num_running - batch)
