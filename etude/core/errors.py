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
# "<": code that has no file, such as the methods that dataclasses write.
_NOT_THE_USERS = (*(f"{place}/" for place in (Path(__file__).parents[1], *_LIBRARIES)), "<")


_TRACEBACK = re.compile(
    r"(?:\+ Exception Group )?Traceback \(most recent call last\):|File \"[^\"\n]+\", line \d+"
)
"""Where one begins; of one that has lost its beginning, a frame."""
_RAISED = re.compile(r"^(?: *\| )?(?![ |+])(.*\S)", re.M)
"""After the frames of a traceback, which are indented: what was raised. In one of a group of
exceptions a bar stands before every line."""


class EtudeError(Exception):
    """Something the user can act on. The message says what, where, and what to do; the CLI prints
    no traceback."""


class RolloutFailure(Exception):
    """A rollout broke at a named boundary. It becomes a `Trajectory(status="failed")`, never a
    reward of 0."""


class Interrupted(RolloutFailure):
    """An attempt lost the process that ran it, through no fault of its own: it can be made again,
    in a session of its own."""


@contextlib.asynccontextmanager
async def boundary(what: str) -> AsyncIterator[None]:
    """Name the place that a failure crossed; anything already named passes through."""
    with user_code(what, RolloutFailure):
        yield


@contextlib.contextmanager
def user_code(what: str, kind: type[Exception] = EtudeError) -> Iterator[None]:
    """Run code of the user's own in the block: what it raises becomes one line, with its place in
    that code."""
    try:
        yield
    except kind:
        raise
    except Exception as e:
        raise kind(f"{what}: {_describe(e)}") from e


def user_traceback(e: BaseException) -> str:
    """The traceback of what was raised, without the lines that are not of the user's own code, if
    any are; with what caused it."""
    told = traceback.TracebackException.from_exception(e)
    link: traceback.TracebackException | None = told
    while link is not None:
        link.stack = traceback.StackSummary.from_list(_own(link.stack) or link.stack)
        link = link.__cause__ or link.__context__
    return "".join(told.format()).rstrip()


def error_line(error: str) -> str:
    """An error to be shown where there is little room: in place of a traceback what was raised, its
    last line."""
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
    """With the innermost place that is the user's own, if there is one."""
    frames = _own(traceback.extract_tb(e.__traceback__))
    where = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return f"{type(e).__name__}{where}: {e}"
