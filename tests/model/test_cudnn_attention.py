"""The code around cuDNN's attention, with attention written out in place of cuDNN; cuDNN itself is
tested in tests/train/test_on_cuda.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from etude.model import cudnn_attention
from etude.model.attention import CausalAttention
from etude.model.scoring import Scoring

CPU = torch.device("cpu")


def written_out(tensors: dict[str, Tensor], borders: Tensor, longest: int, scale: float) -> None:
    """Softmax attention and its gradient; autograd does not reach into an operator."""
    cudnn_attention.check_layouts(tensors)
    places = borders.tolist()
    assert len(borders) in (8, 16, 32) and max(borders.diff().tolist()) <= longest
    group = tensors["q"].shape[1] // tensors["k"].shape[1]
    for own in map(slice, places[:-1], places[1:]):
        q, k, v = (tensors[name][own].float().transpose(0, 1) for name in ("q", "k", "v"))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q @ k.mT * scale
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        seen = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        if "dO" not in tensors:
            tensors["o"][own] = (seen @ v).transpose(0, 1)
            continue
        slope = tensors["dO"][own].float().transpose(0, 1)
        ahead = slope @ v.mT
        back = seen * (ahead - (seen * ahead).sum(-1, keepdim=True)) * scale
        tensors["dQ"][own] = (back @ k).transpose(0, 1)
        for name, each in (("dK", back.mT @ q), ("dV", seen.mT @ slope)):
            tensors[name][own] = each.unflatten(0, (-1, group)).sum(1).transpose(0, 1)


class ByCudnn(CausalAttention):
    """Attention as on a CUDA device."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        scoring: Scoring | None = None,
    ) -> Tensor:
        assert scoring is None
        return self._together(q, k, v, scale)


@pytest.fixture
def by_cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cudnn_attention, "available", lambda device: True)
    monkeypatch.setattr(cudnn_attention, "_run", written_out)
    for op in (cudnn_attention._forward, cudnn_attention._backward):
        op.register_kernel("cpu")(op._init_fn)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("by_cudnn")
@pytest.mark.parametrize("keys", [2, 4])
def test_a_compiled_layer_hands_over_what_cudnn_takes_and_gets_its_gradient(keys: int) -> None:
    """Compiled once for all lengths; queries, keys and values are parts of one wider tensor."""

    def layer(qkv: Tensor, attend: CausalAttention) -> Tensor:
        q, k, v = qkv.view(-1, 4 + 2 * keys, 16).split((4, keys, keys), 1)
        return attend(0, q, k, v)

    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend="aot_eager")
    generator, stance = torch.Generator().manual_seed(0), "default"
    for lengths in [(70, 1, 30), (64, 40, 9, 9), (5,), (3,) * 20]:
        shape = (sum(lengths), (4 + 2 * keys) * 16)
        rough = torch.randn(shape, generator=generator).bfloat16().requires_grad_()
        exact = rough.detach().float().requires_grad_()
        slope = torch.randn(sum(lengths), 4, 16, generator=generator)
        with torch.compiler.set_stance(stance):
            found = compiled(rough, ByCudnn(lengths, CPU))
        stance = "fail_on_recompile"
        expected = layer(exact, CausalAttention(lengths, CPU))
        found.backward(slope.bfloat16())
        expected.backward(slope)
        assert rough.grad is not None and exact.grad is not None
        assert (found - expected).norm() < 0.02 * expected.norm()
        assert (rough.grad - exact.grad).norm() < 0.02 * exact.grad.norm()


@pytest.mark.parametrize("wide", ["q", "k", "v"])
def test_tensors_that_cudnn_would_write_beside_are_refused(wide: str) -> None:
    heads = {"q": 4, "k": 4, "v": 4, "o": 4}
    tensors = {name: torch.zeros(9, own, 16) for name, own in heads.items()}
    cudnn_attention.check_layouts(tensors)
    tensors[wide] = torch.zeros(9, 12, 16)[:, :4]
    with pytest.raises(ValueError, match=wide):
        cudnn_attention.check_layouts(tensors)


def test_it_is_used_where_it_works_unless_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(cudnn_attention.SWITCH, raising=False)
    assert not cudnn_attention.available(CPU)
    monkeypatch.setattr(cudnn_attention, "_works", lambda device: True)
    assert cudnn_attention.available(CPU)
    monkeypatch.setenv(cudnn_attention.SWITCH, "0")
    assert not cudnn_attention.available(CPU)


def test_there_is_room_for_few_numbers_of_sequences() -> None:
    assert [len(cudnn_attention.padded([0] * n)) for n in (2, 8, 9, 17)] == [8, 8, 16, 32]
    assert cudnn_attention.padded([0, 3, 7]) == [0, 3, 7, 7, 7, 7, 7, 7]
