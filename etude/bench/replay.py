"""What router replay is worth: a small sparse model whose engine computes in another precision than its trainer.

The model has to learn by reward alone which digit belongs to each of some prompts: what it knows lies in its experts.
Everything is in this process, an engine on the published weights and a learner in fp32, step by step. The same run is
done with the experts that the engine used (`replay`) and with those that the learner's routers choose (`own`):

    NAME.k3_start, NAME.k3_end   mean k3 between engine and learner over the first and the last tenth of the steps
    NAME.reward_end              mean reward over the last tenth; NAME is `own` or `replay`
    bf16.k3_p99_own, .._replay   k3 p99 over one batch of an engine in bf16, read both ways
    bf16.k3_p99_share            the second over the first
    bf16.disagreement            share of the tokens of that batch for which a router would choose otherwise

In the two runs the engine's matrices are rounded to 4 bits (e2m1, a scale for each row; routers, embedding and head are
left alone) and computed in bf16, as quantised servers do.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from etude.core.credit import centered
from etude.core.seeds import derive
from etude.core.types import Batch, Row, Sample
from etude.engine.engine import Engine, Finished, Request
from etude.model.config import ExpertsConfig, ModelConfig
from etude.model.files import load_weights
from etude.model.transformer import Transformer, fresh
from etude.train.learner import Learner, StepStats

DIGITS, ASK = 10, 10
NUM_PROMPTS, PROMPT_DIGITS = 96, 5
GROUPS, GROUP_SIZE = 16, 8
STEPS, WARMUP, LR = 400, 10, 1e-3
BEFORE = 100
"""Steps before the mismatch in bf16 is measured."""
PARTS = 10
"""Curves are means over so many parts of a run."""

Rounding = Callable[[Tensor], Tensor]


def to_fp4(weight: Tensor) -> Tensor:
    """The nearest number that e2m1 can say, with one scale for a row."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scale = weight.abs().amax(-1, keepdim=True) / magnitudes[-1]
    nearest = (weight.abs() / scale).unsqueeze(-1).sub(magnitudes).abs().argmin(-1)
    return magnitudes[nearest] * weight.sign() * scale


SHAPE = ModelConfig(
    model_type="qwen3_moe", vocab_size=DIGITS + 1, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=64, max_position_embeddings=16, tie_word_embeddings=False,
    experts=ExpertsConfig(
        num_experts=32, num_experts_per_tok=1, moe_intermediate_size=32, layers=(0, 1, 2), norm_topk_prob=True
    ),
)  # fmt: skip


def run() -> dict[str, float]:
    torch.set_num_threads(1)
    figures = {f"bf16.{key}": value for key, value in mismatch().items()}
    for name in ("own", "replay"):
        parts = list(curve(steps(Learner(fresh(SHAPE, 0)), replay=name == "replay", count=STEPS)))
        for number, (k3, reward) in enumerate(parts, 1):
            print(f"{name:6}  step {number * STEPS // PARTS:3}  k3 {k3:.4f}  reward {reward:.3f}", flush=True)
        figures[f"{name}.k3_start"], figures[f"{name}.k3_end"] = parts[0][0], parts[-1][0]
        figures[f"{name}.reward_end"] = parts[-1][1]
    return figures


def mismatch() -> dict[str, float]:
    """Of a model that has learnt a while from an engine in bf16: the same batch, read both ways."""
    learner = Learner(fresh(SHAPE, 0))
    for _ in steps(learner, replay=True, count=BEFORE, rounding=None):
        pass
    state = {name: tensor.clone() for name, tensor in learner.state().items()}
    engine, rng = served(learner, None), random.Random(1)
    batch, objects, _ = sampled(engine, [prompt for prompt in prompts() for _ in range(GROUP_SIZE)], rng.randrange(99))
    own = learner.step(batch, lr=0.0)
    learner.load_state(state)
    replayed = learner.step(batch, lr=0.0, fetch=objects.__getitem__)
    assert replayed.router_disagreement is not None
    return {
        "k3_p99_own": own.drift.k3_p99,
        "k3_p99_replay": replayed.drift.k3_p99,
        "k3_p99_share": replayed.drift.k3_p99 / own.drift.k3_p99,
        "disagreement": replayed.router_disagreement,
    }


def steps(
    learner: Learner, *, replay: bool, count: int, rounding: Rounding | None = to_fp4
) -> Iterator[tuple[float, StepStats]]:
    """Synchronous policy gradient; (mean reward, what the step did) of each step."""
    rng, worth = random.Random(0), list(prompts())
    for step in range(1, count + 1):
        asked = [prompt for prompt in rng.sample(worth, GROUPS) for _ in range(GROUP_SIZE)]
        batch, objects, reward = sampled(served(learner, rounding), asked, step)
        if batch.rows:
            fetch = objects.__getitem__ if replay else None
            yield reward, learner.step(batch, lr=LR * min(1.0, step / WARMUP), fetch=fetch)


def curve(stats: Iterable[tuple[float, StepStats]]) -> Iterator[tuple[float, float]]:
    """(k3, reward), part by part."""
    seen = [(step.drift.k3, reward) for reward, step in stats]
    for part in np.array_split(np.array(seen), PARTS):
        k3, reward = part.mean(0)
        yield float(k3), float(reward)


def served(learner: Learner, rounding: Rounding | None) -> Transformer:
    """What the engine computes with."""
    model = Transformer(SHAPE).requires_grad_(False)
    load_weights(model, learner.weights())
    if rounding:
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and not any(part in name for part in ("gate.weight", "embed", "lm_head")):
                weight.copy_(rounding(weight))
    return model.to(torch.bfloat16)


def sampled(model: Transformer, asked: Sequence[tuple[int, ...]], seed: int) -> tuple[Batch, dict[str, bytes], float]:
    """The attempts that teach something as a batch, the experts that its rows name, and the mean reward of all."""
    engine = Engine(model, max_batch=len(asked), prefix_cache=False, step_tokens=len(asked) * (PROMPT_DIGITS + 2))
    for number, prompt in enumerate(asked):
        engine.add(
            Request(
                id=str(number),
                prompt=prompt,
                max_tokens=1,
                temperature=1.0,
                seed=derive(seed, number),
                stop=frozenset(),
            )  # fmt: skip
        )
    samples: dict[str, Sample] = {}
    while not engine.idle:
        samples |= {event.id: event.sample for event in engine.step() if isinstance(event, Finished)}
    worth, ids = prompts(), [str(number) for number in range(len(asked))]
    rewards = [float(samples[id].tokens[0] == worth[prompt]) for id, prompt in zip(ids, asked, strict=True)]
    groups = [rewards[at : at + GROUP_SIZE] for at in range(0, len(rewards), GROUP_SIZE)]
    advantages = [advantage for group in groups for advantage in centered(group)]
    rows = [
        row_of(id, prompt, samples[id], advantage)
        for id, prompt, advantage in zip(ids, asked, advantages, strict=True)
        if advantage
    ]
    objects = {id: sample.experts or b"" for id, sample in samples.items()}
    return Batch(step=seed, rows=tuple(rows), oldest=0), objects, statistics.mean(rewards)


def row_of(id: str, prompt: tuple[int, ...], sample: Sample, advantage: float) -> Row:
    before = (0.0,) * len(prompt)
    return Row(
        sample=id, tokens=prompt + sample.tokens, mask=(False,) * len(prompt) + (True,), versions=sample.versions,
        logprobs=before + sample.logprobs, advantages=(*before, advantage), experts=id,
    )  # fmt: skip


@cache
def prompts() -> dict[tuple[int, ...], int]:
    """Each with the digit that it is worth."""
    rng = random.Random(0)
    made = [(*(rng.randrange(DIGITS) for _ in range(PROMPT_DIGITS)), ASK) for _ in range(NUM_PROMPTS)]
    return {prompt: rng.randrange(DIGITS) for prompt in made}
