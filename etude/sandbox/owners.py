"""The process that something belongs to which may outlive it, told by a mark in its name. Standard
library only: this runs in the zygote."""

from __future__ import annotations

import os


def owner_mark() -> str:
    """This process, in the names of what it may leave behind: its number, and the namespace in
    which that is one. Containers that share files, processes or cgroups with us count their own."""
    return f"{os.getpid()}-{_namespace()}-"


def owner_of(mark: str) -> int | None:
    """The process that a name with this mark at its beginning belongs to; None if there is no mark,
    or one of a namespace whose processes we cannot tell."""
    pid, _, rest = mark.partition("-")
    here = pid.isdigit() and rest.startswith(f"{_namespace()}-")
    return int(pid) if here else None


def is_abandoned(mark: str) -> bool:
    """Whether the owner of what has this mark is known to be gone."""
    owner = owner_of(mark)
    return owner is not None and not os.path.exists(f"/proc/{owner}")


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
