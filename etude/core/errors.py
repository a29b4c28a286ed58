"""The two kinds of failure. A rollout that fails is data; anything else is a crash with one clear
message."""

from __future__ import annotations

import contextlib
import re
import sysconfig
import traceback
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

_LIBRARIES = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# "<": code without a file, such as the methods that dataclasses generate.
_NOT_THE_USERS = (*(f"{place}/" for place in (Path(__file__).parents[1], *_LIBRARIES)), "<")


_TRACEBACK = re.compile(
    r"(?:\+ Exception Group )?Traceback \(most recent call last\):|File \"[^\"\n]+\", line \d+"
)
"""The beginning of a traceback, or a frame of one that has lost its beginning."""
_RAISED = re.compile(r"^(?: *\| )?(?![ |+])(.*\S)", re.M)
"""The exception line of a traceback: the first one after the frames, which are indented. In a group
of exceptions every line starts with a bar."""


class EtudeError(Exception):
    """An error that the user can act on. The message states what happened, where, and what to do;
    the CLI prints no traceback."""


class RolloutFailure(Exception):
    """A rollout that broke at a named boundary. It becomes a `Trajectory(status="failed")`, never a
    reward of 0."""


class Interrupted(RolloutFailure):
    """An attempt that lost the process that ran it, through no fault of its own: it can be
    repeated, in a new session."""


@contextlib.asynccontextmanager
async def boundary(what: str) -> AsyncIterator[None]:
    """Name the boundary that a failure crossed; a failure that is already named passes through."""
    with user_code(what, RolloutFailure):
        yield


@contextlib.contextmanager
def user_code(what: str, kind: type[Exception] = EtudeError) -> Iterator[None]:
    """Run the user's own code in the block: an exception from it becomes one line, with its place
    in that code."""
    try:
        yield
    except kind:
        raise
    except Exception as e:
        raise kind(f"{what}: {_describe(e)}") from e


def user_traceback(e: BaseException) -> str:
    """The traceback of an exception and its causes, reduced to the lines of the user's own code if
    there are any."""
    told = traceback.TracebackException.from_exception(e)
    link: traceback.TracebackException | None = told
    while link is not None:
        link.stack = traceback.StackSummary.from_list(_own(link.stack) or link.stack)
        link = link.__cause__ or link.__context__
    return "".join(told.format()).rstrip()


def error_line(error: str) -> str:
    """An error for display in little space: a traceback is replaced by its last line, the
    exception."""
    frames = [*_TRACEBACK.finditer(error)]
    if not frames:
        return error
    _, _, behind = error[frames[-1].end() :].partition("\n")
    raised = _RAISED.search(behind)
    if raised is None:
        return error
    before, more, _ = error[: frames[0].start()].lstrip().partition("\n")
    return " ".join(filter(None, (before.rstrip(), "..." if more else "", raised[1])))


def _own(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]


def _describe(e: Exception) -> str:
    """The exception with the innermost place in the user's own code, if there is one."""
    frames = _own(traceback.extract_tb(e.__traceback__))
    where = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return f"{type(e).__name__}{where}: {e}"
