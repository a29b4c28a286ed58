"""In invariant mode a token's log-prob has the same bits in any batch, piece or cache, and in the trainer's pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from etude.core.types import Batch, Row, Sample
from etude.engine.engine import Engine, Finished, Request
from etude.engine.invariant import InvariantRunner
from etude.engine.plan import Plan
from etude.model.files import weights
from etude.model.numerics import INVARIANT, PLAIN
from etude.model.transformer import Transformer
from etude.train.learner import Learner
from etude.train.loss import token_logprobs
from etude.train.rows import pad
from tests.engine.reference import FAMILIES
from tests.small_model import drain, request, sharp

Bits = NDArray[np.int32]

COMPOSITIONS = 1000
TEMPERATURE = 0.7


def small(name: str) -> Transformer:
    return sharp(FAMILIES[name], seed=0, factor=3.0).compute_with(INVARIANT)


@dataclass
class Watching(InvariantRunner):
    """Notes the shape of every pass: how many new tokens of sequences of which lengths."""

    model: Transformer
    blocks: int
    seen: set[tuple[tuple[int, int], ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__(self.model, self.blocks)

    def start(self, plan: Plan):  # type: ignore[no-untyped-def]
        counts_B = np.diff(np.append(plan.starts_B, len(plan.tokens_N)))
        self.seen.add(tuple(zip(counts_B.tolist(), plan.lengths_B.tolist(), strict=True)))
        return super().start(plan)


def random_request(rng: Random, id: int) -> Request:
    """Many begin alike, so that later ones find what earlier ones left."""
    prompt = [1 + i % 7 for i in range(rng.randrange(70))] + [rng.randrange(1, 60) for _ in range(rng.randrange(1, 20))]
    return request(
        str(id), prompt, max_tokens=rng.randrange(1, 9), temperature=TEMPERATURE, stop=frozenset(),
        priority=rng.choice((0, 0, 0, 1)),
    )  # fmt: skip


def serve(runner: Watching, rng: Random, compositions: int) -> dict[str, tuple[Request, Sample]]:
    """Requests come and go, some are given up or put off, until so many different passes were made."""
    engine = Engine(runner.model, max_batch=6, step_tokens=rng.choice((8, 16, 40)), runner=runner)
    asked: dict[str, Request] = {}
    done: dict[str, Sample] = {}
    while len(runner.seen) < compositions or not engine.idle:
        if len(runner.seen) < compositions and rng.random() < 0.4:
            new = random_request(rng, len(asked))
            asked[new.id] = new
            engine.add(new)
        if asked and rng.random() < 0.02:
            engine.abort(rng.choice(list(asked)))
        done |= {event.id: event.sample for event in engine.step() if isinstance(event, Finished)}
    assert engine.stats().preempted and engine.stats().cached_tokens
    return {id: (asked[id], sample) for id, sample in done.items()}


def bits(values: object) -> Bits:
    return np.asarray(values, np.float32).view(np.int32)


def trained(model: Transformer, sessions: dict[str, tuple[Request, Sample]], rng: Random) -> dict[str, Bits]:
    """The trainer's pass over rows of any lengths beside each other, the short ones padded."""
    order, found = rng.sample(sorted(sessions), len(sessions)), {}
    while order:
        group = [order.pop() for _ in range(min(len(order), rng.randrange(1, 12)))]
        rows = [sessions[id][0].prompt + sessions[id][1].tokens for id in group]
        masks = [[False] * len(sessions[id][0].prompt) + [True] * len(sessions[id][1].tokens) for id in group]
        with torch.no_grad():
            logp_N, _ = token_logprobs(model, pad(rows, torch.int64), pad(masks, torch.bool), TEMPERATURE)
        parts = logp_N.split([sum(mask) for mask in masks])
        found |= {id: bits(part) for id, part in zip(group, parts, strict=True)}
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_no_bit_depends_on_the_batch(name: str) -> None:
    model, rng = small(name), Random(name)
    runner = Watching(model, blocks=16)
    sessions = serve(runner, rng, -(-COMPOSITIONS // len(FAMILIES)))
    alone = Engine(model, max_batch=1, prefix_cache=False)
    for id in rng.sample(sorted(sessions), 12):
        alone.add(sessions[id][0])
        assert drain(alone) == {id: sessions[id][1]}
    in_training = trained(model, sessions, rng)
    differing = [id for id, (_, sample) in sessions.items() if (bits(sample.logprobs) != in_training[id]).any()]
    assert len(sessions) > 50 and not differing


def test_otherwise_bits_do_depend_on_it() -> None:
    """So the test above can fail."""
    model, rng = small("llama").compute_with(PLAIN), Random(0)
    engine = Engine(model, max_batch=6, step_tokens=16)
    asked = [random_request(rng, id) for id in range(12)]
    for each in asked:
        engine.add(each)
    done = drain(engine)
    sessions = {each.id: (each, done[each.id]) for each in asked}
    in_training = trained(model, sessions, rng)
    assert any((bits(sample.logprobs) != in_training[id]).any() for id, (_, sample) in sessions.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_across_a_swap_of_weights(name: str) -> None:
    """Both halves of an answer are what the two versions compute over the keys that are there: a second run of the same
    requests, in other company, gives the same bits."""
    other = weights(sharp(small(name).config, seed=1, factor=3.0), torch.float32)

    def run(company: int) -> Sample:
        engine = Engine(small(name), max_batch=4, step_tokens=11)
        engine.add(request("0", [5, 9, 20] * 9, max_tokens=12, stop=frozenset()))
        for id in range(1, 1 + company):
            engine.add(request(str(id), [3, id, 4] * 5 * id, max_tokens=3, stop=frozenset()))
        done: dict[str, Sample] = {}
        while not engine.idle:
            done |= {event.id: event.sample for event in engine.step() if isinstance(event, Finished)}
            running = next((s for s in engine._scheduler.running if s.request.id == "0"), None)
            if engine.version == 0 and running and len(running.logprobs) == 5:
                engine.load(1, other)
        return done["0"]

    first, second = run(company=0), run(company=3)
    assert first == second and [span.count for span in first.versions] == [5, 7]


def row(asked: Request, sample: Sample) -> Row:
    blank, count = len(asked.prompt), len(sample.tokens)
    return Row(
        sample=asked.id,
        tokens=asked.prompt + sample.tokens,
        mask=(False,) * blank + (True,) * count,
        logprobs=(0.0,) * blank + sample.logprobs,
        advantages=(0.0,) * blank + (1.0,) * count,
        versions=sample.versions,
    )


def test_a_step_on_fresh_samples_finds_no_drift() -> None:
    model, rng = small("qwen3_moe"), Random(0)
    learner = Learner(model.requires_grad_())
    engine = Engine(model, max_batch=4, step_tokens=16)
    asked = [random_request(rng, id) for id in range(8)]
    for each in asked:
        engine.add(each)
    done = drain(engine)
    rows = tuple(row(each, done[each.id]) for each in asked)
    stats = learner.step(Batch(step=1, rows=rows, oldest=0), lr=1e-4, temperature=TEMPERATURE, microbatch_tokens=300)
    assert stats.drift.k1 == stats.drift.k3 == stats.drift.k3_p99 == 0.0 and stats.grad_norm > 0


def test_gradients_are_those_of_the_plain_arithmetic() -> None:
    tokens, mask = torch.tensor([[5, 9, 20, 7, 3, 8, 11]]), torch.ones(1, 7, dtype=torch.bool)
    for name in FAMILIES:
        found = []
        for arithmetic in (PLAIN, INVARIANT):
            model = small(name).compute_with(arithmetic).requires_grad_()
            token_logprobs(model, tokens, mask)[0].sum().backward()
            found.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
        plain, invariant = found
        assert plain.keys() == invariant.keys()
        for key, grad in plain.items():
            assert torch.allclose(grad, invariant[key], rtol=1e-3, atol=1e-3 * float(grad.abs().max())), (name, key)
