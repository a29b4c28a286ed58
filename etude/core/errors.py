"""The two kinds of failure. A rollout that fails is data; anything else is a crash with one clear message."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

_LIBRARIES = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_NOT_THE_USERS = (*(f"{place}/" for place in (Path(__file__).parents[1], *_LIBRARIES)), "<frozen")


class EtudeError(Exception):
    """Something the user can act on. The message says what, where, and what to do; the CLI prints no traceback."""


class RolloutFailure(Exception):
    """A rollout broke at a named boundary. It becomes a `Trajectory(status="failed")`, never a reward of 0."""


@contextlib.asynccontextmanager
async def boundary(what: str) -> AsyncIterator[None]:
    """Name the place that a failure crossed; anything already named passes through."""
    with blame(what, RolloutFailure):
        yield


@contextlib.contextmanager
def blame(what: str, kind: type[Exception] = EtudeError) -> Iterator[None]:
    """Code of the user's own is called in the block: what it raises is told in one line, with its place there."""
    try:
        yield
    except kind:
        raise
    except Exception as e:
        raise kind(f"{what}: {_told(e)}") from e


def _told(e: Exception) -> str:
    """With the innermost place that is the user's own, if there is one."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith(_NOT_THE_USERS)]
    where = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return f"{type(e).__name__}{where}: {e}"
