"""The end of a process of a run, in words."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from etude.core.placement import LESS_MEMORY

LAST_LINES = 15
FRESH = ("etude run ", "etude demo")
"""Commands that have `--fresh`."""


def exit_message(
    name: str,
    code: int,
    lines: Sequence[str],
    where: str,
    resume: str,
    *,
    how: str,
    restarts: int | None,
) -> str:
    """The final end of a program, as a message. `lines`: the end of its output, from `where`."""
    said = "\n".join(f"  | {line}" for line in lines[-LAST_LINES:])
    often = f", after {restarts} restarts within a minute" if restarts else ""
    again = f"Resume with: {resume}"
    if code == 2:  # it named a mistake of the user's, which would still be there next time
        again = f"After fixing this, resume with: {resume}"
        if resume.startswith(FRESH):
            again += "\nor start over with --fresh"
    end = f"The end of {where}:\n{said}" if said else f"{where} is empty."
    advice = advice_for(name, code)
    mend = f"{advice[0].upper()}{advice[1:]}.\n" if advice else ""
    return f"the {name} {how}{often}. {end}\n{mend}{again}"


def how_ended(code: int, memory: int | None = None) -> str:
    """The end of a process in words, from its exit code and the memory that it held last."""
    if code == -signal.SIGKILL and memory:
        held = f"{memory / 1e9:.1f} GB" if memory >= 1e9 else f"{memory / 1e6:.0f} MB"
        return f"was killed by SIGKILL (it held {held} of memory)"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def stop_message(names: Sequence[str], limit_s: float) -> str:
    """A message that a stop is in progress, with the programs that it waits for."""
    return f"stopping: waiting for {', '.join(names)} (at most {limit_s:g} s each)"


def advice_for(name: str, code: int) -> str:
    """Advice on a process that nobody but the kernel had a reason to kill."""
    if code != -signal.SIGKILL:
        return ""
    less = "lower harness.concurrency or engine.max_num_seqs"
    if name.startswith("trainer"):
        less = LESS_MEMORY
    return f"most likely this machine ran out of memory (check `dmesg`): free some, or {less}"
