"""A spare: a sandbox that is nobody's yet.

Its cgroup, its namespaces and its first process are there, and every wall that is the same for all.
What differs it is told when somebody wants a sandbox: its limits, the socket that it answers on,
and whose user it is, if not its own. From then on it is that sandbox, to its end; none ever comes
back.

The kernel waits before it moves a process into a cgroup or raises a network device, 10 ms and more
where little else goes on. A spare has these waits behind it. Standard library only.
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
"""All but that of cgroups, which begins with the last one that is entered."""
_LINKS = 2
"""Descriptors that a spare is given at most: its link, and a cgroup that it has yet to enter."""


class Ids(NamedTuple):
    """Of the host."""

    user: int
    group: int


class Spare:
    """One, as the zygote sees it."""

    def __init__(self, name: str, ids: Ids, way: socket.socket) -> None:
        """`name`: of its cgroup. `ids`: who has made its namespaces, and is in there unless it is
        said otherwise. `way`: to its first process, which ends with it."""
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
        """Empty if it is up now; otherwise why it never will be, or is no more."""
        words, descriptors, _, _ = socket.recv_fds(self._way, 1 << 10, 1)
        if not descriptors:
            return words.decode() or "the first process of a sandbox ended without a word"
        self._process = descriptors[0]
        return ""

    def name_user(self, ids: Ids) -> None:
        """Another one than its own, of one that is up."""
        _map_guest(f"/proc/self/fd/{self._process}", ids)

    def give(
        self, link: socket.socket, cgroup: Sequence[int], *, named: bool, bounds: Sequence[int]
    ) -> None:
        """Make it the sandbox of whoever holds the other end of `link`. `cgroup`: what it has yet
        to enter. `named`: whether its user is. `bounds`: as `guest.serve` takes them."""
        told = " ".join(str(int(each)) for each in (named, *bounds))
        socket.send_fds(self._way, [told.encode()], [link.fileno(), *cgroup])

    def close(self) -> None:
        """It ends with this, unless it was given to somebody."""
        self._way.close()
        if self._process is not None:
            os.close(self._process)


def be_spare(
    way: socket.socket, name: str, ids: Ids, cgroups: Cgroups | None, *, lived_in: bool
) -> NoReturn:
    """Make one of this fork of the zygote. It forks once more: only a child is process 1 in a new
    namespace. `lived_in`: whether it is to look like a machine that was started days ago."""
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
    """What the zygote gives, or nothing if it has ended."""
    try:
        socket.send_fds(way, [words.encode()], process)
        told, descriptors, _, _ = socket.recv_fds(way, 1 << 10, _LINKS)
    except ConnectionError:
        # It has closed its side without having read ours, which the kernel says once, before it
        # gives what was sent.
        told, descriptors, _, _ = socket.recv_fds(way, 1 << 10, _LINKS)
    for descriptor in (way.detach(), *process):
        os.close(descriptor)
    return told, descriptors


def _become(user: int, group: int) -> None:
    """User 0 of the host is never inside, under whatever name: it owns /proc/sys and is exempt from
    limits. Nor has it made the namespaces: what is used in there counts as its maker's, too."""
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    kernel.own_proc_entry()


def _become_sandbox(ids: Ids, cgroup: Sequence[int], *, named: bool) -> str:
    """Empty, or the call that the kernel refused."""
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
    """Children of this process are born into a time of their own. `number`: anything, so that
    sandboxes differ."""
    kernel.unshare(kernel.CLONE_NEWTIME)
    kernel.put("/proc/self/timens_offsets", f"boottime {_DAY_S + number * 7919 % (20 * _DAY_S)} 0")


def _map_guest(process: str, ids: Ids) -> None:
    map_ids(process, Ids(GUEST_ID, GUEST_ID), ids)


def map_ids(process: str, inside: Ids, outside: Ids) -> None:
    """The one user and the one group of the user namespace that a process is in. `process`: its
    directory in /proc."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside.user} {outside.user} 1"),
        ("gid_map", f"{inside.group} {outside.group} 1"),
    ):
        kernel.put(f"{process}/{name}", text)
