"""Marks in the names of files and cgroups that may outlive their process; they tell which process
is the owner. Standard library only: this runs in the zygote."""

from __future__ import annotations

import os


def owner_mark() -> str:
    """Mark of this process: its number, and the PID namespace that the number belongs to.
    Containers that share files, processes or cgroups with us count their own processes."""
    return f"{os.getpid()}-{_namespace()}-"


def owner_of(mark: str) -> int | None:
    """The process that a name with this mark at its beginning belongs to. None if there is no mark,
    or if it is of a namespace whose processes we cannot see."""
    pid, _, rest = mark.partition("-")
    here = pid.isdigit() and rest.startswith(f"{_namespace()}-")
    return int(pid) if here else None


def is_abandoned(mark: str) -> bool:
    """True if the owner of this mark is known to be gone."""
    owner = owner_of(mark)
    return owner is not None and not os.path.exists(f"/proc/{owner}")


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
