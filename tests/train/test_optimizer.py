from __future__ import annotations

import json

import pytest
import torch

from etude.model.files import hf_tensors
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.train.distributed import SINGLE_PROCESS
from etude.train.optimizer import AdamW, Muon, is_hidden, orthogonal
from tests.small_model import config

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "model_type": "qwen3_moe",
}
ONE = torch.tensor(1.0)
SPARSE = ModelConfig.from_json(json.dumps(json.loads(config().to_json()) | EXPERTS))


@pytest.mark.parametrize("shape", [(16, 16), (12, 40), (40, 12)])
def test_a_matrix_becomes_nearly_orthogonal_and_keeps_its_directions(
    shape: tuple[int, int],
) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 7
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    made = u.T @ orthogonal(matrix) @ v.T
    assert made.diagonal().min() > 0.6 and made.diagonal().max() < 1.25
    torch.testing.assert_close(made, torch.diag(made.diagonal()), rtol=0, atol=1e-9)


def test_small_singular_values_become_large_too() -> None:
    made = orthogonal(torch.diag(torch.tensor([1.0, 0.004], dtype=torch.float64))).diagonal()
    assert made.min() > 0.6 and made.max() < 1.25


def test_muon_moves_each_matrix_by_its_own_orthogonal_momentum() -> None:
    """The first step, with momentum and Nesterov's look-ahead written out, for every matrix as
    files name it."""
    model = init_from_scratch(SPARSE, 0)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = {name: m.clone() for name, m in masters.items()}
    generator = torch.Generator().manual_seed(1)
    gradients = {name: torch.randn(m.shape, generator=generator) for name, m in masters.items()}
    Muon(masters, model, SINGLE_PROCESS).step(gradients, lr=0.1, weight_decay=0.5, divisor=ONE)
    hidden = {name for name, m in masters.items() if is_hidden(name, m)}
    after, old, slopes = (
        hf_tensors(model, {n: t for n, t in tensors.items() if n in hidden})
        for tensors in (masters, before, gradients)
    )
    assert {name.rpartition(".layers.0.")[2] for name in after if ".layers.0." in name} >= {
        "self_attn.q_proj.weight",
        "self_attn.v_proj.weight",
        "mlp.experts.3.up_proj.weight",
        "mlp.experts.0.down_proj.weight",
    }
    for name, slope in slopes.items():
        ahead = 0.05 * slope + 0.95 * (0.05 * slope)
        expected = old[name] * (1 - 0.1 * 0.5) - 0.1 * 0.2 * max(slope.shape) ** 0.5 * orthogonal(
            ahead
        )
        torch.testing.assert_close(after[name], expected, rtol=1e-4, atol=1e-5)


def test_what_is_no_hidden_matrix_moves_as_with_adamw() -> None:
    model = init_from_scratch(SPARSE, 0)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    other = {name: m.clone() for name, m in masters.items()}
    gradients = {name: torch.ones_like(m) for name, m in masters.items()}
    how = {"lr": 0.1, "weight_decay": 0.5, "divisor": ONE}
    Muon(masters, model, SINGLE_PROCESS).step(dict(gradients), **how)
    AdamW(other, model, SINGLE_PROCESS).step(dict(gradients), **how)
    same = {name for name in masters if torch.equal(masters[name], other[name])}
    assert same == {name for name, m in masters.items() if not is_hidden(name, m)}
    assert {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.mlp.gate.weight",
    } <= same


def test_a_restarted_optimizer_remembers_nothing() -> None:
    model = init_from_scratch(config(), 0)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    muon = Muon(masters, model, SINGLE_PROCESS)
    assert not any(tensor.any() for tensor in muon.state().values())
    gradients = {name: torch.ones_like(m) for name, m in masters.items()}
    muon.step(gradients, lr=0.1, weight_decay=0.0, divisor=ONE)
    assert all(tensor.any() for tensor in muon.state().values())
    muon.reset()
    assert not any(tensor.any() for tensor in muon.state().values())


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-8])
def test_adamw_is_the_one_of_torch(scale: float) -> None:
    """Over several steps, clipped, with gradients as small as epsilon. Only matrices decay."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (4, 3), "a.bias": (4,), "norm.weight": (3,), "experts.bias": (2, 3)}
    masters = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    theirs = {name: m.clone().requires_grad_() for name, m in masters.items()}
    decayed = [theirs.pop("a.weight")]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": [*theirs.values()]}],
        lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0,
    )  # fmt: skip
    theirs["a.weight"] = decayed[0]
    ours = AdamW(masters, init_from_scratch(config(), 0), SINGLE_PROCESS)
    for divisor in (1.0, 4.0, 1.0):
        gradients = {n: scale * torch.randn(s, generator=generator) for n, s in shapes.items()}
        for name, parameter in theirs.items():
            parameter.grad = gradients[name] / divisor
        reference.step()
        ours.step(gradients, lr=0.01, weight_decay=0.1, divisor=torch.tensor(divisor))
    for name, parameter in theirs.items():
        torch.testing.assert_close(masters[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_what_has_no_gradient_stays() -> None:
    masters = {name: torch.ones(2, 2) for name in ("a", "b")}
    optimizer = AdamW(masters, init_from_scratch(config(), 0), SINGLE_PROCESS)
    optimizer.step({"b": torch.ones(2, 2), "c": ONE}, lr=0.1, weight_decay=0.5, divisor=ONE)
    assert torch.equal(masters["a"], torch.ones(2, 2)) and not optimizer.state()["step.a"]
    assert masters["b"].max() < 1.0 and optimizer.state()["step.b"] == 1.0


def test_muon_remembers_its_momentum_and_divides_the_gradient() -> None:
    """Two steps of a matrix, written out, against one optimizer; a third that is not finite changes
    nothing."""
    model = init_from_scratch(config(), 0)
    name = "model.layers.0.self_attn.o_proj.weight"
    masters = {n: p.detach().clone() for n, p in model.named_parameters()}
    expected = masters[name].clone()
    muon = Muon(masters, model, SINGLE_PROCESS)
    generator = torch.Generator().manual_seed(2)
    momentum = torch.zeros_like(expected)
    for divisor in (1.0, 3.0):
        gradients = {n: torch.randn(m.shape, generator=generator) for n, m in masters.items()}
        slope = gradients[name] / divisor
        momentum = 0.95 * momentum + 0.05 * slope
        ahead = orthogonal(0.05 * slope + 0.95 * momentum)
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * 0.2 * max(slope.shape) ** 0.5 * ahead
        muon.step(gradients, lr=0.1, weight_decay=0.5, divisor=torch.tensor(divisor))
    torch.testing.assert_close(masters[name], expected, rtol=1e-4, atol=1e-5)
    before = {n: t.clone() for n, t in (masters | muon.state()).items()}
    gradients = {n: torch.full_like(m, torch.inf) for n, m in masters.items()}
    muon.step(gradients, lr=0.1, weight_decay=0.5, divisor=torch.tensor(torch.inf))
    assert all(torch.equal(before[n], t) for n, t in (masters | muon.state()).items())
