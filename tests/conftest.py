"""Settings that every test shares."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Tests run side by side, one core each; torch reads this when it is first imported, here and in
# child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Kernels are interpreted where there is no device. Triton reads this when it is first imported,
# which any test may be the first to do.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same commit gets the same verdict, and a slow machine fails nothing.
settings.register_profile("etude", deadline=None, derandomize=True)
settings.load_profile("etude")


@pytest.fixture(autouse=True)
def _as_torch_is() -> Iterator[None]:
    """A trainer that a test runs in this process may have asked torch for determinism; the next
    test did not."""
    yield
    torch = sys.modules.get("torch")
    if torch and torch.are_deterministic_algorithms_enabled():
        torch.set_deterministic_debug_mode("default")
