"""The two kinds of failure. A rollout that fails is data; anything else is a crash with one clear message."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator


class EtudeError(Exception):
    """Something the user can act on. The message says what, where, and what to do; the CLI prints no traceback."""


class RolloutFailure(Exception):
    """A rollout broke at a named boundary. It becomes a `Trajectory(status="failed")`, never a reward of 0."""


@contextlib.asynccontextmanager
async def boundary(what: str) -> AsyncIterator[None]:
    """Name the place that a failure crossed; anything already named passes through."""
    try:
        yield
    except RolloutFailure:
        raise
    except Exception as e:
        raise RolloutFailure(f"{what}: {type(e).__name__}: {e}") from e
