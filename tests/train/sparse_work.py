"""Steps of sparse models that ranks take together in tests, importable by their processes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.core.types import Batch
from etude.model.attention import CausalAttention
from etude.model.config import ExpertsConfig, LatentConfig, ModelConfig
from etude.model.experts import Routing
from etude.model.lora import LoraConfig, add_adapter
from etude.model.transformer import Transformer, init_from_scratch
from etude.train.distributed import World
from etude.train.learner import Learner
from etude.train.packing import TokenSequence
from etude.train.stats import RlStats
from tests.small_model import config
from tests.train.distributed_work import MODELS, Arrays, arrays, batch, published

EXPERTS = ExpertsConfig(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    layers=(0, 1),
    router_aux_loss_coef=0.5,
)
SPARSE: dict[str, ModelConfig] = {
    "qwen3_moe": dataclasses.replace(config(), model_type="qwen3_moe", experts=EXPERTS),
    "deepseek_v3": dataclasses.replace(
        config(),
        model_type="deepseek_v3",
        latent=LatentConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10),
        experts=dataclasses.replace(EXPERTS, layers=(1,), sigmoid=True, n_shared_experts=1),
    ),
    "gpt_oss": dataclasses.replace(
        MODELS["gpt-oss"],
        experts=dataclasses.replace(EXPERTS, router_bias=True, swiglu_limit=2.0),
    ),
}
ADAPTER = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj"))


class Layout(NamedTuple):
    """A model, and the division of its work among ranks."""

    model: str
    context_parallel: int = 1
    expert_parallel: int = 1
    optimizer: str = "adamw"
    adapted: bool = False


@dataclass(frozen=True)
class SparseRun:
    steps: list[RlStats]
    loss: float
    """Loss of a supervised step, and of an evaluation after it."""
    gradients: list[Arrays]
    """This rank's rows of the gradient of every parameter, step by step."""
    rows: dict[str, tuple[int, NDArray[np.float32]]]
    """The rows that the rank publishes in the end, including those under an adapter, and the index
    of the first one."""
    state: Arrays
    num_shares: int


class GradientRecorder:
    """An optimizer that records the gradients of each step, before they are clipped."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.gradients: list[Arrays] = []

    def step(self, gradients: Mapping[str, Tensor], **told: Any) -> None:
        self.gradients.append(arrays(gradients))
        self._optimizer.step(gradients, **told)

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._optimizer.state()
        return state


@torch.no_grad()
def routed(step: int, model: Transformer) -> tuple[Batch, dict[str, bytes]]:
    """A batch, and the experts that an engine used, mostly those of the model. The first row has
    experts for all tokens but the last, the others for fewer, and one for none."""
    plain, rng = batch(step, rows=5), random.Random(step)
    assert model.config.experts is not None
    num_experts = model.config.experts.num_experts
    objects, rows = {}, []
    for number, row in enumerate(plain.rows):
        routing, size = Routing(), len(row.tokens) - 1
        model(torch.tensor(row.tokens[:-1]), torch.arange(size), CausalAttention([size]), routing)
        ids_TLk = routing.chosen()[: max(1, size - 3 * number)]
        for ids_k in ids_TLk.flatten(0, 1):
            if rng.random() < 0.2:
                ids_k.copy_(torch.tensor(rng.sample(range(num_experts), len(ids_k))))
        objects[row.sample] = bytes(ids_TLk.flatten().tolist())
        rows.append(dataclasses.replace(row, experts=None if number == 2 else row.sample))
    return dataclasses.replace(plain, rows=tuple(rows)), objects


def run_sparse(world: World, layout: Layout) -> SparseRun:
    """Two steps of rl that replay experts and balance the load, a supervised one, and an
    evaluation."""
    shape = SPARSE[layout.model]
    assert shape.experts is not None
    model = init_from_scratch(shape, 0)
    if layout.adapted:
        add_adapter(model, ADAPTER, 0)
    batches = [routed(step, model) for step in (1, 2)]
    learner = Learner(
        model,
        world,
        optimizer=layout.optimizer,
        published_dtype=torch.float32,
        context_parallel=layout.context_parallel,
        expert_parallel=layout.expert_parallel,
    )
    recorder = GradientRecorder(learner._optimizer)
    learner._optimizer = recorder  # type: ignore[assignment]
    model.gradient_checkpointing = layout.model != "qwen3_moe"
    steps = []
    for told, objects in batches:
        stats = learner.rl_step(
            told,
            lr=1e-3,
            microbatch_tokens=0,  # the load-balancing loss is one of each microbatch
            fetch_experts=objects.__getitem__,
            router_replay_min_score=0.5,
            router_balance=True,
        )
        steps.append(stats)
    texts = [TokenSequence(row.tokens, row.mask) for row in batch(3, rows=5).rows]
    balance = shape.experts.sigmoid
    supervised = learner.supervised_step(texts, lr=1e-3, router_balance=balance)
    loss = supervised.loss + learner.evaluate(texts)
    rows = published(learner) | {
        name: (first, rows.float().numpy().copy())
        for name, (rows, first, _, _) in (learner.base_rows() if layout.adapted else {}).items()
    }
    state = arrays(learner.state())
    return SparseRun(steps, loss, recorder.gradients, rows, state, learner.num_shares)


def run_layouts(world: World, layouts: Sequence[Layout]) -> dict[Layout, SparseRun]:
    return {layout: run_sparse(world, layout) for layout in layouts}


def load(
    world: World, layout: Layout, states: Sequence[Arrays]
) -> dict[str, tuple[int, NDArray[np.float32]]]:
    """The tensors that a rank publishes after it has loaded the states of these ranks."""
    learner = Learner(
        init_from_scratch(SPARSE[layout.model], 1),
        world,
        optimizer=layout.optimizer,
        published_dtype=torch.float32,
        expert_parallel=layout.expert_parallel,
    )
    learner.load_shards(
        len(states), lambda rank: {n: torch.from_numpy(a) for n, a in states[rank].items()}
    )
    return published(learner)


def whole(parts: Sequence[Arrays]) -> Arrays:
    """The concatenated rows of all ranks, in the order of ranks."""
    names = {name for part in parts for name in part}
    return {name: np.concatenate([part[name] for part in parts]) for name in names}
