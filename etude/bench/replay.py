"""Benchmark of router replay: a small sparse model whose engine computes in a different precision
than its trainer.

The model has to learn by reward alone which digit belongs to each of some prompts, and stores this
in its experts. An engine on the published weights and a learner in fp32 take turns in this process.
The same run is done with the experts that the engine used (`replay`) and with those that the
learner's routers choose (`own`):

    NAME.k3_p99                   between engine and learner, mean over all steps, and over SEEDS
    NAME.k3_end, NAME.k3_p99_end  over the last eighth of the steps
    NAME.reward_end               likewise
    k3_p99_share                  k3_p99 with replay over that without
    invariant.k3_max              largest k3 of any token, in a shorter run in which nothing is
                                  rounded or replayed but engine and learner compute invariantly

The engine's matrices are rounded to fp4 (e2m1, a scale for each row; routers, embedding and head
are not) and computed in bf16, as quantized servers do.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from etude.core.advantage import dr_grpo
from etude.core.sampling import Request, Sample
from etude.core.seeds import derive
from etude.core.types import Batch, Row
from etude.engine.engine import Engine, FinishedRequest
from etude.model.config import ExpertsConfig, ModelConfig
from etude.model.files import load_weights
from etude.model.numerics import INVARIANT
from etude.model.transformer import Transformer, init_from_scratch
from etude.train.learner import Learner
from etude.train.stats import RlStats

DIGITS, ASK = 10, 10
NUM_PROMPTS, PROMPT_DIGITS = 96, 5
GROUPS, GROUP_SIZE = 16, 8
STEPS, WARMUP, LR = 1200, 10, 1e-3
SEEDS = (0, 1)
PARTS = 8
"""Number of parts of a run; a curve has the mean of each."""


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_fp4(weight: Tensor) -> Tensor:
    """Round to the nearest numbers of e2m1, with a scale for each row."""
    scale = (weight.abs().amax(-1, keepdim=True) / E2M1[-1]).clamp(min=1e-12)
    nearest = ((weight / scale).abs()[..., None] - E2M1).abs().argmin(-1)
    return E2M1[nearest] * weight.sign() * scale


SHAPE = ModelConfig(
    model_type="qwen3_moe",
    vocab_size=DIGITS + 1,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=16,
    tie_word_embeddings=False,
    experts=ExpertsConfig(
        num_experts=32,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        layers=(0, 1, 2),
        norm_topk_prob=True,
    ),
)


def run() -> dict[str, float]:
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for name in ("own", "replay"):
        curves = np.array([curve(seed, replay=name == "replay") for seed in SEEDS])
        figures[f"{name}.k3_p99"] = curves[..., 1].mean()
        k3, k3_p99, reward = curves[:, -1].mean(0).tolist()
        figures |= {
            f"{name}.k3_end": k3,
            f"{name}.k3_p99_end": k3_p99,
            f"{name}.reward_end": reward,
        }
    learner = Learner(init_from_scratch(SHAPE, 0).compute_with(INVARIANT))
    stats = list(steps(learner, replay=False, count=STEPS // PARTS, serve=unrounded))
    figures["invariant.k3_max"] = max(step.mismatch.k3_max for _, step in stats)
    return figures | {"k3_p99_share": figures["replay.k3_p99"] / figures["own.k3_p99"]}


def curve(seed: int, *, replay: bool) -> list[list[float]]:
    """k3, its 99th percentile and the reward, as means over each part of a run."""
    stats = list(
        steps(Learner(init_from_scratch(SHAPE, seed)), replay=replay, count=STEPS, serve=quantised)
    )
    seen = np.array([(step.mismatch.k3, step.mismatch.k3_p99, reward) for reward, step in stats])
    means: list[list[float]] = [part.mean(0).tolist() for part in np.array_split(seen, PARTS)]
    for number, (k3, k3_p99, reward) in enumerate(means, 1):
        name = f"{'replay' if replay else 'own':6}  seed {seed}  part {number}"
        print(f"{name}  k3 {k3:.4f}  p99 {k3_p99:.3f}  reward {reward:.3f}", flush=True)
    return means


def steps(
    learner: Learner, *, replay: bool, count: int, serve: Callable[[Learner], Transformer]
) -> Iterator[tuple[float, RlStats]]:
    """Train by synchronous policy gradient. Yield (mean reward, statistics) of each step. The
    engine computes with the model that `serve` makes of the learner's weights."""
    rng, worth = random.Random(0), list(prompts())
    for step in range(1, count + 1):
        asked = [prompt for prompt in rng.sample(worth, GROUPS) for _ in range(GROUP_SIZE)]
        batch, objects, reward = sampled(serve(learner), asked, step)
        if batch.rows:
            lr = LR * min(1.0, step / WARMUP)
            fetch = objects.__getitem__ if replay else None
            yield reward, learner.rl_step(batch, lr=lr, fetch_experts=fetch)


def unrounded(learner: Learner) -> Transformer:
    model = Transformer(SHAPE).requires_grad_(False).compute_with(INVARIANT)
    load_weights(model, learner.weights())
    return model


def quantised(learner: Learner) -> Transformer:
    model = Transformer(SHAPE).requires_grad_(False)
    load_weights(model, learner.weights())
    for name, weight in model.named_parameters():
        if weight.ndim >= 2 and not any(
            part in name for part in ("gate.weight", "embed", "lm_head")
        ):
            weight.copy_(to_fp4(weight))
    return model.to(torch.bfloat16)


def sampled(
    model: Transformer, asked: Sequence[tuple[int, ...]], seed: int
) -> tuple[Batch, dict[str, bytes], float]:
    """The attempts that teach something as a batch, the expert records that its rows name, and the
    mean reward of all attempts."""
    engine = Engine(
        model,
        max_num_seqs=len(asked),
        prefix_cache=False,
        max_batched_tokens=len(asked) * (PROMPT_DIGITS + 2),
    )
    for number, prompt in enumerate(asked):
        request = Request(prompt=prompt, max_tokens=1, seed=derive(seed, number), experts_from=0)
        engine.add(request, str(number))
    samples: dict[str, Sample] = {}
    while not engine.idle:
        samples |= {
            event.id: event.sample for event in engine.step() if isinstance(event, FinishedRequest)
        }
    worth = prompts()
    ids = [str(number) for number in range(len(asked))]
    rewards = [
        float(samples[id].tokens[0] == worth[prompt]) for id, prompt in zip(ids, asked, strict=True)
    ]
    groups = [rewards[at : at + GROUP_SIZE] for at in range(0, len(rewards), GROUP_SIZE)]
    advantages = [advantage for group in groups for advantage in dr_grpo(group)]
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
        sample=id, tokens=prompt + sample.tokens, mask=(False,) * len(prompt) + (True,),
        versions=sample.versions, logprobs=before + sample.logprobs,
        advantages=(*before, advantage), experts=id,
    )  # fmt: skip


@cache
def prompts() -> dict[tuple[int, ...], int]:
    """The prompts, each with the digit that is rewarded."""
    rng = random.Random(0)
    made = [
        (*(rng.randrange(DIGITS) for _ in range(PROMPT_DIGITS)), ASK) for _ in range(NUM_PROMPTS)
    ]
    return {prompt: rng.randrange(DIGITS) for prompt in made}
