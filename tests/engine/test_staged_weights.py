"""Staged weights: bit for bit what was sent, and nothing before the swap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from etude.engine import staged_weights
from etude.engine.staged_weights import stage_weights
from etude.model.config import ModelConfig
from etude.model.files import hf_state_dict
from etude.model.transformer import Transformer, init_from_scratch

TINY = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


@pytest.fixture
def model() -> Transformer:
    return init_from_scratch(TINY, 0).to(torch.bfloat16).requires_grad_(False)


def changed(model: Transformer, share: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = hf_state_dict(model)
    for tensor in tensors.values():
        hit = torch.rand(tensor.shape, generator=generator) < share
        tensor[hit] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)[hit]
    return tensors


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: t.view(torch.int16).flatten().tolist() for name, t in tensors.items()}


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("chunk", [7, 1 << 26])
def test_the_swap_brings_just_what_was_sent(model, share, chunk, monkeypatch):
    monkeypatch.setattr(staged_weights, "CHUNK", chunk)
    before, new = bits(hf_state_dict(model)), changed(model, share)

    put_in_place = stage_weights(model, new)
    assert bits(hf_state_dict(model)) == before

    put_in_place()
    assert bits(hf_state_dict(model)) == bits(new)


def test_bits_are_compared_not_numbers(model):
    new = hf_state_dict(model)
    row = new["model.embed_tokens.weight"][5]
    model.model.embed_tokens.weight[5, :4] = torch.tensor([0.0, -0.0, float("nan"), 1.0])
    row[:4] = torch.tensor([-0.0, 0.0, float("nan"), float("nan")])

    stage_weights(model, new)()
    assert bits(hf_state_dict(model)) == bits(new)


def test_only_what_differs_is_kept(model):
    new = hf_state_dict(model)
    new["model.norm.weight"][3] += 1
    number = new["model.norm.weight"][3].clone()

    put_in_place = stage_weights(model, new)
    new["model.norm.weight"].zero_()  # the host's copy is no longer needed
    put_in_place()
    assert model.model.norm.weight[3] == number
    assert model.model.norm.weight[2] != 0


class OnDevice(torch.Tensor):
    """A tensor that claims to be on a device, and records the streams that use its memory."""

    told: list[tuple[torch.dtype, object]]
    is_cuda = True

    def record_stream(self, stream: object) -> None:
        OnDevice.told.append((self.dtype, stream))


def test_memory_of_the_staging_stream_is_kept_until_the_swap_has_read_it(monkeypatch):
    """The allocator reuses it as soon as the stream that it came from may write there."""
    monkeypatch.setattr(OnDevice, "told", [], raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "serving")
    target, new = torch.zeros(100).as_subclass(OnDevice), torch.zeros(100)
    new[7] = 1.0
    (write,) = staged_weights._writes(target, new)
    assert not OnDevice.told
    write.apply()
    assert target[7] == 1.0
    assert OnDevice.told == [(torch.int32, "serving")] * 2, "places and values"


def test_a_device_stages_beside_what_it_serves(monkeypatch):
    """It runs on its own stream, after the writes of the default stream, and is done at the end."""
    did: list[str] = []

    class Stream:
        device = torch.device("cuda", 0)

        def __init__(self, device: torch.device) -> None:
            did.append(f"made on {device}")

        def wait_stream(self, other: str) -> None:
            did.append(f"waits for {other}")

        def synchronize(self) -> None:
            did.append("done")

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        did.append("enters")
        yield
        did.append("leaves")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "the default")
    with staged_weights._beside_serving(torch.device("cuda", 0)):
        did.append("works")
    assert did == ["made on cuda:0", "waits for the default", "enters", "works", "leaves", "done"]


def test_weights_of_another_model_are_refused(model):
    new = hf_state_dict(model)
    del new["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        stage_weights(model, new)
