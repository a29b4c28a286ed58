"""Adapters with random pairs, for tests."""

from __future__ import annotations

import torch

from etude.model.files import hf_state_dict
from etude.model.lora import Adapter, LoraConfig, add_adapter, split_tensors
from etude.model.transformer import ModelConfig
from tests.small_model import sharp

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_adapter(
    config: ModelConfig, seed: int, rank: int = 4, targets: tuple[str, ...] = ALL
) -> Adapter:
    """An adapter with weights large enough to change the sampled tokens."""
    lora = LoraConfig(rank=rank, alpha=2.0 * rank, targets=targets)
    model = add_adapter(sharp(config, 0), lora, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.normal_(0.0, 0.2, generator=generator)
    return Adapter(lora, split_tensors(hf_state_dict(model, torch.float32))[1])
