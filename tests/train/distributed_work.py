"""Work of several ranks in tests, importable by their processes."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.core.types import Batch, Row
from etude.model.config import ExpertsConfig, LinearConfig
from etude.model.lora import LoraConfig, add_adapter
from etude.model.transformer import ModelConfig, Transformer, init_from_scratch
from etude.train.distributed import World
from etude.train.learner import Learner
from etude.train.masters import SplitMaster
from etude.train.objective import LOSS, RlObjective
from etude.train.packing import TokenSequence
from etude.train.stats import RlStats
from etude.train.supervised import PreferencePair, dpo_loss, pack_pairs
from tests.small_model import config

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "model_type": "qwen3_moe",
}
LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"))
MODELS = {
    "dense": config(),
    "windowed": dataclasses.replace(config(), sliding_window=5, sliding_layers=(0,)),
    "lora": config(),
    "moe": ModelConfig.from_json(json.dumps(json.loads(config().to_json()) | EXPERTS)),
    "gpt-oss": dataclasses.replace(
        config(),
        model_type="gpt_oss",
        attention_bias=True,
        attention_out_bias=True,
        sliding_window=5,
        sliding_layers=(0,),
        experts=ExpertsConfig(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            layers=tuple(range(config().num_hidden_layers)),
            router_bias=True,
            swiglu_limit=2.0,
        ),
    ),
    "hybrid": dataclasses.replace(
        config(),
        model_type="qwen3_next",
        linear=LinearConfig(
            num_key_heads=2,
            num_value_heads=4,
            key_head_dim=8,
            value_head_dim=10,
            conv_kernel_dim=3,
            layers=(0,),
        ),
    ),
}


Arrays = dict[str, NDArray[np.float32]]


def fresh(model: str, seed: int) -> Transformer:
    made = init_from_scratch(MODELS[model], seed)
    return add_adapter(made, LORA, seed) if model == "lora" else made


@dataclass(frozen=True)
class Curve:
    steps: list[RlStats]
    exam: float
    rows: dict[str, tuple[int, NDArray[np.float32]]]
    """The rows that the rank publishes, and the index of the first one."""
    state: Arrays


def arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Arrays, which can be sent from a process to another that outlives it."""
    return {name: tensor.float().cpu().numpy().copy() for name, tensor in tensors.items()}


def published(learner: Learner) -> dict[str, tuple[int, NDArray[np.float32]]]:
    return {
        name: (first, rows.float().cpu().numpy().copy())
        for name, (rows, first, _, _) in learner.hf_rows().items()
    }


def joined(curves: Sequence[Curve]) -> Arrays:
    """The tensors that all ranks publish together."""
    return joined_rows([curve.rows for curve in curves])


def joined_rows(ranks: Sequence[Mapping[str, tuple[int, NDArray[np.float32]]]]) -> Arrays:
    found: dict[str, list[tuple[int, NDArray[np.float32]]]] = {}
    for rank in ranks:
        for name, rows in rank.items():
            found.setdefault(name, []).append(rows)
    return {
        name: np.concatenate([r for _, r in sorted(parts, key=lambda p: p[0])])
        for name, parts in found.items()
    }


def batch(step: int, rows: int = 7) -> Batch:
    """Rows of very different lengths, an odd number of them."""
    rng = random.Random(step)

    def row(number: int) -> Row:
        size = rng.randint(8, 50)
        mask = tuple(t >= 4 and rng.random() < 0.7 for t in range(size - 1)) + (True,)
        return Row(
            sample=f"{step}-{number}",
            tokens=tuple(rng.randrange(61) for _ in range(size)),
            mask=mask,
            logprobs=tuple(-4.1 - rng.random() if sampled else 0.0 for sampled in mask),
            advantages=tuple((1.0, -0.4)[number % 2] if sampled else 0.0 for sampled in mask),
            versions=(),
        )

    return Batch(step=step, rows=tuple(row(number) for number in range(rows)), oldest=step - 1)


def train(
    world: World,
    model: str,
    optimizer: str,
    steps: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> Curve:
    learner = Learner(
        fresh(model, 0).to(device),
        world,
        optimizer=optimizer,
        published_dtype=dtype,
    )
    exam = [TokenSequence(row.tokens, row.mask) for row in batch(0).rows]
    stats = []
    for step in range(1, steps + 1):
        world.activity = f"step {step}"
        stats.append(learner.rl_step(batch(step), lr=1e-3, weight_decay=0.1, microbatch_tokens=128))
        if step == 2:
            learner.evaluate(exam)  # must change nothing
    return Curve(stats, learner.evaluate(exam), published(learner), arrays(learner.state()))


CASES = (
    ("dense", "adamw"),
    ("moe", "muon"),
    ("lora", "adamw"),
    ("gpt-oss", "muon"),
    ("hybrid", "adamw"),
)


def train_all(world: World, steps: int, device: str = "cpu") -> dict[str, Curve]:
    """All cases share one process group, which saves the time to create it."""
    return {
        model: train(world, model, optimizer, steps, torch.float32, device)
        for model, optimizer in CASES
    }


def resume(world: World, states: list[Arrays], model: str, optimizer: str) -> Curve:
    learner = Learner(
        fresh(model, 1),
        world,
        optimizer=optimizer,
        published_dtype=torch.float32,
    )
    learner.load_shards(
        len(states), lambda rank: {n: torch.from_numpy(a) for n, a in states[rank].items()}
    )
    before = published(learner)
    return Curve([learner.rl_step(batch(9), lr=1e-3)], 0.0, before, {})


def in_halves(world: World) -> tuple[Arrays, Arrays, Arrays]:
    """The state of a rank after steps with split masters, with whole ones, and with split ones that
    were loaded half-way."""

    def steps(learner: Learner, *numbers: int) -> Arrays:
        for number in numbers:
            learner.rl_step(batch(number), lr=1e-2, weight_decay=0.1, microbatch_tokens=128)
        return arrays(learner.state())

    def learner(seed: int) -> Learner:
        return Learner(fresh("dense", seed), world, compute_dtype=torch.bfloat16)

    split, loaded = learner(0), learner(1)
    with mock.patch.object(SplitMaster, "of", lambda master, parameter: master):
        whole = learner(0)
    half_way = steps(split, 1)
    loaded.load_state({name: torch.from_numpy(array) for name, array in half_way.items()})
    return steps(split, 2), steps(whole, 1, 2), steps(loaded, 2)


def die_in_step(world: World, victim: int) -> None:
    """One rank dies in the middle of a pass."""
    learner = Learner(init_from_scratch(MODELS["dense"], 0), world)
    for step in range(1, 100):
        world.activity = f"step {step} of rl"
        if step == 3 and world.rank == victim:
            learner.model.model.layers[1].register_forward_hook(
                lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            )
        learner.rl_step(batch(step), lr=1e-3)


OBJECTIVES = {
    "dense": RlObjective(kl_coef=0.1),
    "lora": RlObjective(kl_coef=0.1),
    # both of these sum over whole rows, which no rank has
    "windowed": RlObjective(
        loss=LOSS["gspo"], clip=LOSS["gspo"].clip, correction="sequence_truncated"
    ),
}


def divide(world: World, sizes: Sequence[int]) -> dict[tuple[str, int], Curve]:
    """Compute every row with this many ranks together: steps of rl, of dpo and an evaluation."""
    found = {}
    for model, objective in OBJECTIVES.items():
        for size in sizes:
            learner = Learner(
                fresh(model, 0),
                world,
                published_dtype=torch.float32,
                context_parallel=size,
            )
            learner.snapshot()
            learner.model.gradient_checkpointing = model == "windowed"
            steps = [
                learner.rl_step(batch(step), lr=1e-3, objective=objective, microbatch_tokens=128)
                for step in (1, 2)
            ]
            texts = [TokenSequence(row.tokens, row.mask) for row in batch(3, rows=6).rows]
            pairs = [PreferencePair(a, b) for a, b in zip(texts[::2], texts[1::2], strict=True)]
            loss = dpo_loss(beta=0.5, length_normalised=True)
            preferred = learner.supervised_step(pairs, lr=1e-3, pack=pack_pairs, loss=loss)
            exam = learner.evaluate(texts) + preferred.loss + preferred.metrics["margin"]
            found[model, size] = Curve(steps, exam, published(learner), {})
    return found
