"""The device and runner of a model, and the size of its KV cache."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from etude.core.errors import EtudeError
from etude.engine import select
from etude.engine.adapters import AdapterLimits
from etude.engine.runner import TorchRunner, block_size, kv_bytes, state_bytes
from etude.engine.select import KvCacheSize, kv_cache_size, select_device, select_runner
from etude.model.config import LatentConfig, LinearConfig
from etude.model.lora import LoraConfig, add_adapter
from etude.model.transformer import ModelConfig, Transformer, init_from_scratch

SHAPE = ModelConfig(
    vocab_size=8,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=16,
    max_position_embeddings=64,
)
ADAPTER = LoraConfig(rank=2, alpha=4.0, targets=("q_proj",))
TOKEN_BYTES = 2 * 2 * 8 * 4 * 2  # layers, heads, numbers of each, bytes of a number, key and value


@pytest.mark.parametrize("there", [True, False])
def test_the_device_is_what_was_asked_for_or_what_is_there(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert select_device("cpu").type == "cpu"
    assert select_device("auto").type == ("cuda" if there else "cpu")
    if there:
        assert select_device("cuda").type == "cuda"
    else:
        with pytest.raises(EtudeError, match="sees no CUDA device"):
            select_device("cuda")


def test_a_cache_has_room_for_four_times_what_runs_within_its_memory() -> None:
    model = Transformer(SHAPE)
    assert kv_cache_size(model, 3, None).tokens == 4 * 3 * 64
    assert kv_cache_size(model, 3, 100 * TOKEN_BYTES).tokens == 100
    assert kv_cache_size(model, 3, 100 * TOKEN_BYTES + 1).tokens == 100
    assert kv_cache_size(model, 3, 1).tokens == 64, "one sequence in any case"
    assert kv_cache_size(model.bfloat16(), 3, 100 * TOKEN_BYTES).tokens == 200
    # a GiB if nothing is set
    assert kv_cache_size(Transformer(SHAPE), 1 << 20, None).tokens == (1 << 30) // TOKEN_BYTES


def test_the_memory_holds_the_states_of_recurrent_layers_too() -> None:
    linear = LinearConfig(
        num_key_heads=2, num_value_heads=2, key_head_dim=8, value_head_dim=8, conv_kernel_dim=4,
        layers=(0,),
    )  # fmt: skip
    model = Transformer(replace(SHAPE, model_type="qwen3_next", linear=linear))
    memory = 1 << 20
    tokens = kv_cache_size(model, 1 << 20, memory).tokens
    blocks = tokens / block_size(model.config)
    taken = tokens * TOKEN_BYTES / 2 + blocks * state_bytes(model.config, 4)
    assert 0.9 * memory < taken <= memory and blocks > 1


def test_a_latent_is_kept_once() -> None:
    latent = LatentConfig(
        kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    )
    model = Transformer(replace(SHAPE, model_type="deepseek_v3", latent=latent))
    heads, size = model.config.cached_heads
    assert heads * size == 16 + 4
    assert kv_cache_size(model, 3, 100 * 2 * (16 + 4) * 4).tokens == 100


@pytest.mark.parametrize("windowed_layers", [(0,), (0, 1)])
def test_layers_with_a_window_leave_room_for_the_others(windowed_layers: tuple[int, ...]) -> None:
    """The same memory holds more tokens, up to the point where it holds all windows of running
    sequences."""
    shape = replace(SHAPE, num_hidden_layers=2, max_position_embeddings=4096)
    windows = replace(shape, sliding_window=32, sliding_layers=windowed_layers)
    plain, model = Transformer(shape), Transformer(windows)
    memory = 20_000 * kv_bytes(shape, 4)
    before = kv_cache_size(plain, 8, memory, 512)
    found = kv_cache_size(model, 8, memory, 512)
    assert before == KvCacheSize(20_000) == kv_cache_size(model, 8, memory)
    layers = len(windowed_layers)
    taken = (found.tokens * (2 - layers) + found.windowed * layers) * kv_bytes(shape, 4) / 2
    assert 0.99 * memory < taken <= memory and found.tokens > 1.2 * before.tokens
    assert found.windowed > 8 * 32 + 512 + found.tokens / 4 - 1
    runner = select_runner(model, 8, memory, max_batched_tokens=512)
    assert runner.num_windowed_blocks * runner.block_size >= found.windowed
    # Windows as wide as the whole cache: no gain.
    wide = Transformer(replace(windows, sliding_window=4000))
    assert kv_cache_size(wide, 8, memory, 512) == before


def test_an_adapter_has_no_invariant_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are refused where kernels would compute the trainer's model; elsewhere torch's
    operators do."""
    for there in (False, True):
        monkeypatch.setattr(select, "has_kernels", lambda *_, there=there, **__: there)
        model = add_adapter(init_from_scratch(SHAPE, 0), ADAPTER, 0)
        if there:
            with pytest.raises(
                EtudeError, match="batch_invariant is not available with trainer.lora"
            ):
                select.invariant_trainer_model(model, torch.float32)
        else:
            assert select.invariant_trainer_model(model, torch.float32).invariant


def test_what_our_kernels_cannot_do_is_done_by_torch() -> None:
    """An adapter of the weights is merged in float32 only, and named ones are not merged."""
    kept, named = AdapterLimits(own=ADAPTER), AdapterLimits(num_named=1, max_rank=2)
    plain = type(select_runner(Transformer(SHAPE), 8, 1 << 20))
    for dtype, limits, expected in (
        (torch.float32, None, plain),
        (torch.float32, kept, plain),
        (torch.float32, named, TorchRunner),
        (torch.bfloat16, kept, TorchRunner),
    ):
        model = Transformer(SHAPE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert type(select_runner(model.to(dtype), 8, 1 << 20, limits)) is expected
