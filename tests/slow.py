"""Cases that run only in `make test-slow`; in `make test` similar ones represent them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    return [value if value in kept else slow(value) for value in values]
