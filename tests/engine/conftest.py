from __future__ import annotations

import random

import pytest
import torch

from etude.engine.engine import Request
from etude.model.transformer import Transformer
from tests.small_model import config, request, sharp


@pytest.fixture
def model() -> Transformer:
    return sharp(config(), seed=0)


@pytest.fixture
def other_weights() -> dict[str, torch.Tensor]:
    return dict(sharp(config(), seed=1).named_parameters())


@pytest.fixture
def requests() -> list[Request]:
    rng = random.Random(0)
    return [request(str(i), [rng.randrange(61) for _ in range(rng.randrange(1, 40))]) for i in range(12)]
