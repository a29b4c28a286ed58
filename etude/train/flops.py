"""FLOPs of a step and of the device: model FLOPs utilisation (MFU) is their quotient.

Only the arithmetic of the model itself is counted: matrix products and attention of the real
tokens, the head where a token is predicted, backward at twice the forward pass. Padding and
recomputation lower the utilisation, as they should.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from etude.core.types import Row
from etude.model.config import ModelConfig
from etude.model.transformer import Transformer
from etude.train.packing import SequenceCostModel

BACKWARD_COST = 2  # times the forward pass: one product for the inputs, one for the weights

# Dense bf16 FLOPs per second, as stated by the vendor.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
}


def step_flops(config: ModelConfig, rows: Iterable[Row]) -> float:
    """FLOPs of one forward and backward pass over the rows."""
    return sum(
        (1 + BACKWARD_COST) * forward_flops(config, len(row.tokens) - 1, sum(row.mask))
        for row in rows
    )


def forward_flops(config: ModelConfig, length: int, num_predicted: int) -> float:
    """FLOPs of a forward pass: one multiplication and one addition for each weight that a token
    meets, and for each number of each key and value that a query attends to."""
    weights = sum(
        _mixer_weights(config, layer) + _mlp_weights(config, layer)
        for layer in range(config.num_hidden_layers)
    )
    latent = config.latent
    key = latent.qk_nope_head_dim + latent.qk_rope_head_dim if latent else config.head_dim
    value = latent.v_head_dim if latent else config.head_dim
    pairs = length * (length + 1) / 2
    looked_back = len(config.cached_layers) * config.num_attention_heads * (key + value) * pairs
    head = config.hidden_size * config.vocab_size * num_predicted
    return 2.0 * (weights * length + looked_back + head)


def _mixer_weights(config: ModelConfig, layer: int) -> int:
    """Weights of attention, or of a recurrent layer, whose memory is read twice and written
    once."""
    c = config.linear
    if c is None or layer not in c.layers:
        return _attention_weights(config)
    values = c.num_value_heads * c.value_head_dim
    projected = c.conv_dim + values + 2 * c.num_value_heads
    memory = 3 * c.num_value_heads * c.key_head_dim * c.value_head_dim
    return config.hidden_size * (projected + values) + c.conv_dim * c.conv_kernel_dim + memory


def _attention_weights(config: ModelConfig) -> int:
    size, heads = config.hidden_size, config.num_attention_heads
    if (latent := config.latent) is None:
        gates = heads if config.family.gated_attention else 0
        return size * config.head_dim * (2 * (heads + config.num_key_value_heads) + gates)
    query = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    down = latent.q_lora_rank
    queries = size * query if down is None else (size + query) * down
    keys_and_values = latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    compress = size * (latent.kv_lora_rank + latent.qk_rope_head_dim)
    return queries + compress + keys_and_values + heads * latent.v_head_dim * size


def _mlp_weights(config: ModelConfig, layer: int) -> int:
    experts = config.experts
    if experts is None or layer not in experts.layers:
        return 3 * config.hidden_size * config.intermediate_size
    met = experts.num_experts_per_tok + experts.n_shared_experts
    inner = met * experts.moe_intermediate_size + experts.shared_expert_intermediate_size
    # the gate of a shared expert is one more column
    gates = experts.num_experts + bool(experts.shared_expert_intermediate_size)
    return config.hidden_size * (gates + 3 * inner)


def peak_flops(
    device: torch.device, dtype: torch.dtype, *, size: int = 1024, tries: int = 5
) -> float:
    """The peak FLOPs of a known accelerator in bf16; otherwise the speed of this device on a large
    product in that dtype, with the threads of the process."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if known := next((peak for part, peak in PEAK_FLOPS.items() if part in name), None):
        return known
    return matrix_flops(device, dtype, size=size, tries=tries)


def matrix_flops(device: torch.device, dtype: torch.dtype, *, size: int, tries: int = 5) -> float:
    """The FLOPs per second of a device on large products of random numbers; zeros and ones would
    take less power."""
    generator = torch.Generator(device).manual_seed(0)  # leaves the generator of a run alone
    x, y = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    at_once = 50 if device.type == "cuda" else 1
    best = float("inf")
    for _ in range(tries):
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(at_once):
            z = x @ y
        z[0, 0].item()
        seconds = time.perf_counter() - began
        if device.type == "cpu":
            # time that other processes take says nothing about the cores
            cpu_s = time.process_time() - cpu_began
            seconds = min(seconds, cpu_s / torch.get_num_threads() or seconds)
        best = min(best, seconds / at_once)
    return 2.0 * size**3 / best


def sequence_cost(model: Transformer) -> SequenceCostModel:
    """The cost of a sequence in multiplications: every weight that a token meets, and in each layer
    a key and a value for each pair of tokens."""
    c = model.config
    used = c.experts.num_experts_per_tok / c.experts.num_experts if c.experts else 1.0
    weights = sum(
        p.numel() * (used if ".experts." in name else 1.0) for name, p in model.named_parameters()
    )
    return SequenceCostModel(
        per_token=weights, per_pair=2.0 * len(c.cached_layers) * c.num_attention_heads * c.head_dim
    )
