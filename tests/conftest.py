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

# Without a device kernels are interpreted. Triton reads this when it is first imported, which may
# happen in any test.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same commit always gets the same result, and a slow machine does not fail tests.
settings.register_profile("etude", deadline=None, derandomize=True)
settings.load_profile("etude")


@pytest.fixture(autouse=True)
def _as_torch_is() -> Iterator[None]:
    """Restore torch's settings: a trainer that a test runs in this process may have made torch
    deterministic, which must not affect the next test."""
    yield
    torch = sys.modules.get("torch")
    if torch and torch.are_deterministic_algorithms_enabled():
        torch.set_deterministic_debug_mode("default")
