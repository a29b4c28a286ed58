"""Search for leftovers of sandboxes, by their visible traces on the machine, not by our own
records.

Every process of a pool ends when its socket to the owner closes, however the owner died. The
exceptions are a stopped process, which does not notice, and a directory that was to be removed a
moment later. So every pool sweeps the machine for leftovers of dead owners: when it is opened, and
periodically while it lives.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from etude.sandbox.owners import is_abandoned, owner_mark, owner_of
from etude.sandbox.zygote import OWN_IDS

SWEEP_S = 60.0
"""Seconds between two sweeps: half of the time within which nothing may be left."""
_MARK = re.compile(rb"/etude-(\d+-\d+-)\w+\0")
_CGROUPS = Path("/sys/fs/cgroup")


def mountpoint_prefix() -> str:
    """Prefix of the mountpoint directories of this process's zygotes. It stays in the command lines
    of all trusted processes of its sandboxes."""
    return f"etude-{owner_mark()}"


def sweep() -> int:
    """Kill processes of dead owners, and remove their directories. Return the number of both."""
    found = 0
    for pid in [pid for pid, mark in _marked() if is_abandoned(mark)]:
        with contextlib.suppress(PermissionError):
            with contextlib.suppress(ProcessLookupError):  # it ended with one before it
                os.kill(pid, signal.SIGKILL)
            found += 1
    for place in Path(tempfile.gettempdir()).glob("etude-*-*"):
        if is_abandoned(place.name.removeprefix("etude-")):
            with contextlib.suppress(OSError):  # not empty, or not ours
                place.rmdir()
                found += 1
    return found


@dataclass(slots=True)
class Footprint:
    """Everything that pools of some owners have on this machine, recorded while they live:
    afterwards, `left` can prove that all of it is gone."""

    directory: Path
    """The temporary files of these owners, and of nobody else."""
    owners: set[int] = field(default_factory=set)
    zygotes: set[int] = field(default_factory=set)
    own_users: set[int] = field(default_factory=set)

    def look(self, owners: set[int]) -> list[int]:
        """Record the current state. Return the processes of sandboxes."""
        self.owners |= owners
        host = os.readlink("/proc/self/ns/user")
        seen: list[int] = []
        for pid, mark in _marked():
            if (owner := owner_of(mark)) not in owners:
                continue
            with contextlib.suppress(OSError):
                if _parent_of(pid) == owner:
                    self.zygotes.add(pid)
                    continue
                # a fork of the zygote that is not a sandbox yet
                if os.readlink(f"/proc/{pid}/ns/user") == host:
                    continue
                if (user := os.stat(f"/proc/{pid}").st_uid) in OWN_IDS:
                    self.own_users.add(user)
                seen.append(pid)
        return seen

    def left(self) -> dict[str, int]:
        """Number of leftovers of each kind."""
        processes = self._processes()
        mounts = Path("/proc/self/mountinfo").read_text()
        kinds = {
            link
            for pid in processes
            for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
            if (link := _read_link(f"/proc/{pid}/ns/{name}"))
        }
        loops = [
            each
            for each in Path("/sys/block").glob("loop*/loop/backing_file")
            if str(self.directory) in each.read_text()
        ]
        names = tuple(f"etude-{pid}-" for pid in self.zygotes)
        return {
            "processes": len(processes),
            "namespaces": len(kinds),
            "mounts": mounts.count(str(self.directory)) + mounts.count(" nsfs "),
            "cgroups": sum(path.name.startswith(names) for path in _cgroups()),
            "files": sum(1 for _ in self.directory.rglob("*")),
            "loop_devices": len(loops),
        }

    def _processes(self) -> set[int]:
        """Processes with our mark in their command line, their descendants, and processes with the
        user of one of our sandboxes. Namespaces would not do: the kernel reuses their numbers."""
        found = {pid for pid, mark in _marked() if owner_of(mark) in self.owners}
        parents = {pid: parent for pid in _pids() if (parent := _parent_of(pid)) is not None}
        more = found
        while more := {pid for pid, parent in parents.items() if parent in more} - found:
            found |= more
        return found | {pid for pid in parents if _user(pid) in self.own_users}


def _marked() -> Iterator[tuple[int, str]]:
    """Processes of any pool on this machine, each with the mark of the process that owns it."""
    for pid in _pids():
        with contextlib.suppress(OSError):
            command = _command(pid)
            if b"etude.sandbox.zygote" in command and (mark := _MARK.search(command)):
                yield pid, mark[1].decode()


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _parent_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _user(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid
    return None


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read_link(path: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


def _cgroups() -> Iterator[Path]:
    for root, names, _ in os.walk(_CGROUPS):
        yield from (Path(root, name) for name in names)
        names[:] = [name for name in names if not name.startswith("etude-")]
