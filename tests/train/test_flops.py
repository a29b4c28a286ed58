"""The arithmetic of a forward pass, compared with torch's own count."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from etude.core.types import Row
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.train import flops
from etude.train.flops import forward_flops, matrix_flops, peak_flops, step_flops
from etude.train.loss import token_logprobs
from etude.train.packing import TokenSequence, pack_batch
from tests.train.distributed_work import MODELS

DENSE = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=64,
)
MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
MOE |= {"mlp_only_layers": [0]}
SHARED = MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24}
MLA = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
MLA |= {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
}
MLA |= {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "head_dim": None}


@pytest.mark.parametrize(
    "shape",
    [{}, MOE, SHARED, MLA | {"q_lora_rank": None}, MLA | {"q_lora_rank": 12}],
    ids=["dense", "moe", "shared", "mla", "mla-q"],
)
def test_a_forward_pass_is_what_torch_counts(shape: dict[str, object]) -> None:
    config = ModelConfig.from_json(json.dumps(json.loads(DENSE.to_json()) | shape))
    model, length = init_from_scratch(config, 0), 30
    mask = [False] * 10 + [True] * 9 + [False] * 10 + [True]
    packed = pack_batch([TokenSequence(torch.randint(64, (length,)).tolist(), mask)])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        token_logprobs(model, packed)
    size = length - 1
    every_pair = forward_flops(config, 2 * size, 0) - 2 * forward_flops(config, size, 0)
    products = forward_flops(config, size, 10) - every_pair * (size + 1) / (2 * size)
    # Torch cannot count its fused attention on a CPU; elsewhere it counts all pairs, masked or not.
    assert counter.get_total_flops() in (products, products + every_pair)


def test_a_step_is_three_forward_passes_of_every_row() -> None:
    row = Row(
        sample="a",
        tokens=(1,) * 5,
        mask=(False, True, True, False, True),
        logprobs=(),
        advantages=(),
        versions=(),
    )
    assert step_flops(DENSE, [row, row]) == 6 * forward_flops(DENSE, 4, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_peak_is_measured_where_none_is_known(dtype: torch.dtype) -> None:
    assert peak_flops(torch.device("cpu"), dtype, size=64, tries=1) > 0


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_the_peak_of_a_known_accelerator_is_what_its_maker_states(
    name: str, teraflops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), torch.bfloat16) == teraflops * 1e12


def test_to_measure_a_peak_draws_nothing_from_the_generator_of_a_run() -> None:
    before = torch.get_rng_state()
    peak_flops(torch.device("cpu"), torch.float32, size=8, tries=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("wall_s", "cpu_s", "best_s"),
    [
        ((3.0, 2.0, 4.0), (4.0, 9.0, 9.0), 2.0),  # two threads: 4 s of them are 2 s
        ((3.0, 5.0, 4.0), (9.0, 9.0, 3.0), 1.5),
        ((3.0, 5.0, 4.0), (0.0, 0.0, 0.0), 3.0),  # a clock that is too coarse
    ],
)
def test_a_measured_peak_is_of_the_best_try(
    wall_s: tuple[float, ...],
    cpu_s: tuple[float, ...],
    best_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the cores worked less than that for this process, their time counts."""

    def clock(start: float, spans: tuple[float, ...]) -> Iterator[float]:
        for span in spans:
            yield start
            yield start + span
            start += span + 1.0

    clocks = SimpleNamespace(
        perf_counter=clock(100.0, wall_s).__next__, process_time=clock(7.0, cpu_s).__next__
    )
    monkeypatch.setattr(flops, "time", clocks)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    found = matrix_flops(torch.device("cpu"), torch.float32, size=4, tries=3)
    assert found == pytest.approx(2 * 4**3 / best_s)


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_a_token_meets_every_weight_of_a_layer_once(name: str) -> None:
    """Counts all matrices of the model, and the memory of recurrent layers, which is read twice and
    written once; in a hybrid model the other layers attend."""
    config = MODELS[name]
    model = init_from_scratch(config, 0)
    matrices = sum(
        parameter.numel()
        for name, parameter in model.model.layers.named_parameters()
        if parameter.ndim >= 2
    )
    linear = config.linear
    if linear is not None:
        each = linear.num_value_heads * linear.key_head_dim * linear.value_head_dim
        matrices += 3 * len(linear.layers) * each
    looked_back = len(config.cached_layers) * config.num_attention_heads * 2 * config.head_dim
    head = config.hidden_size * config.vocab_size
    assert forward_flops(config, 1, 0) == 2.0 * (matrices + looked_back)
    assert forward_flops(config, 5, 2) == 2.0 * (5 * matrices + 15 * looked_back + 2 * head)
