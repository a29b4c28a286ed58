"""The engine on a CUDA device; skipped on machines without one."""

from __future__ import annotations

import pytest
import torch

from etude.model.config import ModelConfig
from tests.engine.test_sampling_params import check_on_kernels
from tests.small_model import sharp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CONFIG = ModelConfig(
    model_type="qwen3", vocab_size=5000, hidden_size=256, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64, intermediate_size=512,
    max_position_embeddings=2048,
)  # fmt: skip


@pytest.mark.parametrize("invariant", [False, True])
def test_sampling_parameters_on_graphs(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp(CONFIG, seed=0, factor=2.0).to("cuda", torch.bfloat16)
    check_on_kernels(model, monkeypatch, max_tokens=40, invariant=invariant)
