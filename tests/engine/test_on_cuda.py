"""The engine on a CUDA device; where there is none, nothing of this runs."""

from __future__ import annotations

import pytest
import torch

from tests.engine.test_sampling_params import CONFIG, check_on_kernels
from tests.small_model import sharp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("invariant", [False, True])
def test_sampling_parameters_on_graphs(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp(CONFIG, seed=0, factor=2.0).cuda().bfloat16()
    check_on_kernels(model, monkeypatch, max_tokens=40, invariant=invariant)
