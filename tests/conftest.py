"""Settings that every test shares."""

from __future__ import annotations

import os

from hypothesis import settings

# Tests run side by side, one core each; torch reads this when it is first imported, here and in child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same commit gets the same verdict, and a slow machine fails nothing.
settings.register_profile("etude", deadline=None, derandomize=True)
settings.load_profile("etude")
