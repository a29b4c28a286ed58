"""Spares: sandboxes that are made in advance and belong to nobody yet.

The cgroup, the namespaces, the first process and every wall that is the same for all sandboxes
exist already. The rest is sent when somebody wants a sandbox: its limits, the socket that it
answers on, and its user, if that is another one. From then on the spare is that sandbox until its
end; it is never reused.

The kernel waits before it moves a process into a cgroup or raises a network device: 10 ms and more
on a quiet machine. A spare has these waits behind it. Standard library only.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from etude.sandbox import kernel
from etude.sandbox.cgroups import Cgroups
from etude.sandbox.guest import GUEST_ID, Link, raise_walls, serve

_DAY_S = 24 * 3600
_NAMESPACES = (
    kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
)  # fmt: skip
"""All but the cgroup namespace, whose root is the cgroup that is entered last."""
_LINKS = 2
"""Most descriptors that a spare receives: its link, and a cgroup that it has yet to enter."""


class Ids(NamedTuple):
    """User and group IDs of the host."""

    user: int
    group: int


class Spare:
    """One spare, as the zygote sees it."""

    def __init__(self, name: str, ids: Ids, way: socket.socket) -> None:
        """`name`: of its cgroup. `ids`: the user that made its namespaces, and that commands run as
        unless `name_user` sets another. `way`: socket to its first process, which ends when this is
        closed."""
        self.name = name
        self.ids = ids
        self._way = way
        self._process: int | None = None  # its directory in /proc

    def fileno(self) -> int:
        return self._way.fileno()

    @property
    def is_up(self) -> bool:
        return self._process is not None

    def hear(self) -> str:
        """Receive its report. Empty if it is up now; otherwise the reason why it never will be, or
        has ended."""
        words, descriptors, _, _ = socket.recv_fds(self._way, 1 << 10, 1)
        if not descriptors:
            return words.decode() or "the first process of a sandbox ended without a word"
        self._process = descriptors[0]
        return ""

    def name_user(self, ids: Ids) -> None:
        """Give a spare that is up another user than its own."""
        _map_guest(f"/proc/self/fd/{self._process}", ids)

    def give(
        self, link: socket.socket, cgroup: Sequence[int], *, named: bool, bounds: Sequence[int]
    ) -> None:
        """Turn it into the sandbox of the holder of the other end of `link`. `cgroup`: descriptors
        that it has yet to enter. `named`: True if its user is set already. `bounds`: as
        `guest.serve` takes them."""
        told = " ".join(str(int(each)) for each in (named, *bounds))
        socket.send_fds(self._way, [told.encode()], [link.fileno(), *cgroup])

    def close(self) -> None:
        """Close the socket, which ends the spare unless it was given away."""
        self._way.close()
        if self._process is not None:
            os.close(self._process)


def be_spare(
    way: socket.socket, name: str, ids: Ids, cgroups: Cgroups | None, *, lived_in: bool
) -> NoReturn:
    """Turn this fork of the zygote into a spare. It forks once more, since only a child is process
    1 of a new namespace. `lived_in`: make it look like a machine that was started days ago."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    refused, process = "", []
    try:
        if cgroups:
            cgroups.enter(name)
        _become(*ids)
        kernel.unshare(_NAMESPACES)
        if lived_in:
            _been_up(os.getpid())
        if os.fork():
            os._exit(0)
        raise_walls()
        process = [os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)]
    except OSError as e:
        refused = f"sandbox: {e.strerror}"
    told, descriptors = _wait(way, refused or "up", process)
    if not descriptors:  # nobody wanted it
        os._exit(0)
    named, *bounds = map(int, told.split())
    link = socket.socket(fileno=descriptors[0])
    if not refused:
        refused = _become_sandbox(ids, descriptors[1:], named=bool(named))
    if refused:
        Link(link).send({"error": ["RolloutFailure", refused]})
        os._exit(1)
    serve(link, *bounds)


def _wait(way: socket.socket, words: str, process: list[int]) -> tuple[bytes, list[int]]:
    """Wait for the zygote's message; no descriptors if the zygote has ended."""
    try:
        socket.send_fds(way, [words.encode()], process)
        told, descriptors, _, _ = socket.recv_fds(way, 1 << 10, _LINKS)
    except ConnectionError:
        # The zygote has closed its side without reading our message. The kernel reports that once,
        # before it delivers the data that was sent.
        told, descriptors, _, _ = socket.recv_fds(way, 1 << 10, _LINKS)
    for descriptor in (way.detach(), *process):
        os.close(descriptor)
    return told, descriptors


def _become(user: int, group: int) -> None:
    """Change to a user other than the host's root. Root must never be inside: it owns /proc/sys and
    is exempt from limits, under any name. Nor may it make the namespaces: what is used in one
    counts for its maker, too."""
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    kernel.own_proc_entry()


def _become_sandbox(ids: Ids, cgroup: Sequence[int], *, named: bool) -> str:
    """Turn this spare into a sandbox. Empty, or the call that the kernel refused."""
    try:
        for entry in cgroup:
            os.write(entry, b"0")
            os.close(entry)
        kernel.unshare(kernel.CLONE_NEWCGROUP)
        if not named:
            _map_guest("/proc/self", ids)
        _become(GUEST_ID, GUEST_ID)
        kernel.leave_keyring()
    except OSError as e:
        return f"sandbox: {e.strerror}"
    return ""


def _been_up(number: int) -> None:
    """Give the children of this process a clock that started days ago. `number`: any number, which
    makes sandboxes differ."""
    kernel.unshare(kernel.CLONE_NEWTIME)
    kernel.put("/proc/self/timens_offsets", f"boottime {_DAY_S + number * 7919 % (20 * _DAY_S)} 0")


def _map_guest(process: str, ids: Ids) -> None:
    map_ids(process, Ids(GUEST_ID, GUEST_ID), ids)


def map_ids(process: str, inside: Ids, outside: Ids) -> None:
    """Set the only user and group in the user namespace of a process. `process`: its directory in
    /proc."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside.user} {outside.user} 1"),
        ("gid_map", f"{inside.group} {outside.group} 1"),
    ):
        kernel.put(f"{process}/{name}", text)
