"""Gradient checkpointing: the same step to the bit, with less kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from etude.core.types import Batch
from etude.model.attention import CausalAttention
from etude.model.config import ModelConfig
from etude.model.experts import Routing
from etude.model.transformer import Transformer
from etude.train.learner import Learner
from tests.small_model import config, sharp
from tests.train.test_routers import SIGMOID, SPARSE, sampled, served


def after_a_step(
    model_config: ModelConfig, batch: Batch, fetch: Callable[[str], bytes] | None, again: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    model = sharp(model_config, 0).requires_grad_(True)
    model.gradient_checkpointing = again
    learner = Learner(model)
    stats = learner.rl_step(batch, lr=1e-2, fetch_experts=fetch, router_balance=fetch is not None)
    return stats.loss, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("model_config", "replay"),
    [(SPARSE, False), (SPARSE, True), (SIGMOID, True)],
    ids=["own choice", "replay", "sigmoid"],
)
def test_a_step_of_rl_has_the_same_bits(model_config: ModelConfig, replay: bool) -> None:
    batch, objects = sampled(served(model_config, torch.float32))
    fetch = objects.__getitem__ if replay else None
    kept_loss, kept = after_a_step(model_config, batch, fetch, again=False)
    loss, weights = after_a_step(model_config, batch, fetch, again=True)
    assert loss == kept_loss
    assert all(torch.equal(weights[name], kept[name]) for name in kept)


def kept_for_backward(model: Transformer, again: bool, routing: Routing | None = None) -> int:
    """Bytes of activations that a forward pass keeps."""
    model.gradient_checkpointing = again
    parameters = {p.data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    tokens = torch.arange(48) % model.config.vocab_size
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(tokens, torch.arange(48), CausalAttention([48]), routing)
    hidden.sum().backward()
    return sum(sizes.values())


def test_layers_keep_their_inputs_alone() -> None:
    deep = replace(config(), num_hidden_layers=6)
    model = sharp(deep, 0).requires_grad_(True)
    assert kept_for_backward(model, again=True) < kept_for_backward(model, again=False) / 2


def test_what_was_chosen_stands_when_a_layer_is_computed_again() -> None:
    model = sharp(SPARSE, 0).requires_grad_(True)
    routing = Routing()
    kept_for_backward(model, again=True, routing=routing)
    assert routing.chosen().shape[1] == SPARSE.num_hidden_layers  # each layer once
