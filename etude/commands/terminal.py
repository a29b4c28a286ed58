"""Output for people, wrapped at the width of the terminal. If the output is not a terminal, lines
stay whole."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

LINE_EVERY_S = 60.0
"""Without a terminal, such as in a log file, progress is printed at this interval at most."""
DOING_WIDTH = 48
OF_THE_PLACE = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)

HowFar = Callable[[int, int, str], None]
"""Called with the amount done, the total, and the present activity."""


class PipeConsole(Console):
    """A console that raises BrokenPipeError when its reader goes away, and prints nothing from then
    on. rich's own console raises SystemExit."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError


def say(console: Console, text: str | Text, *, indent: int = 0) -> None:
    """Print a text. The continuation of a wrapped line is indented by `indent` more columns than
    the line."""
    whole = Text(text) if isinstance(text, str) else text
    for line in whole.split("\n", allow_blank=True):
        margin = indent + len(line.plain) - len(line.plain.lstrip())
        breaks = _breaks(line.plain, console.width, margin) if console.is_terminal else []
        for number, piece in enumerate(line.divide(breaks)):
            if breaks:
                piece.rstrip()
            shown = Text(" " * margin).append_text(piece) if number else piece
            console.print(shown, highlight=False, soft_wrap=True)


@contextmanager
def showing_progress(
    console: Console, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[HowFar]:
    """Progress of a long command: a bar, or lines if there is no terminal."""
    if console.is_terminal:
        text = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
        with Progress(*columns, console=console) as bars:
            bar = bars.add_task("", total=None)
            yield lambda done, total, doing: bars.update(
                bar, completed=done, total=total, description=doing[:DOING_WIDTH]
            )
        return
    began = told = clock()

    def tell(done: int, total: int, doing: str) -> None:
        nonlocal told
        if (now := clock()) - told >= LINE_EVERY_S:
            told = now
            since = timedelta(seconds=round(now - began))
            say(console, f"{done} of {total} after {since}: {doing}")

    yield tell


def print_error(text: str) -> None:
    """Print an error on standard error."""
    say(Console(stderr=True), text, indent=2)


def file_error(e: BaseException) -> str | None:
    """The message for an error caused by the location of a file rather than by the program; None
    for other errors."""
    if isinstance(e, OSError) and e.errno in OF_THE_PLACE and e.filename is not None:
        return f"cannot use {os.fsdecode(e.filename)}: {os.strerror(e.errno)}"
    return None


def print_stopped(text: str) -> None:
    """Print on standard error, without wrapping, so that the command to resume can be copied."""
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


def _breaks(line: str, width: int, margin: int) -> list[int]:
    """The positions at which to break a line. A word that is too long, such as a path, stays whole,
    so that it can be copied."""
    found: list[int] = []
    column = 0
    for word in re.finditer(r"\s*\S+\s*", line):
        if column > margin and column + cell_len(word[0].rstrip()) > width:
            found.append(word.start())
            column = margin
        column += cell_len(word[0])
    return found


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: `1 engine`, `2 engines`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"
