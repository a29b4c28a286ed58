from __future__ import annotations

import pytest
import torch

from etude.model.files import hf_state_dict
from etude.model.transformer import Transformer
from tests.small_model import config, sharp


@pytest.fixture
def model() -> Transformer:
    return sharp(config(), seed=0)


@pytest.fixture
def other_model() -> Transformer:
    return sharp(config(), seed=1)


@pytest.fixture
def other_weights(other_model: Transformer) -> dict[str, torch.Tensor]:
    return hf_state_dict(other_model, torch.float32)
