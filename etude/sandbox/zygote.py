"""The zygote: a small process that has walled itself in, and of which every sandbox is a fork.

It is started once by the controller and builds the one root directory that all sandboxes share:
read-only, with the system's programs, a Python, and empty places for /work, /tmp and /proc. Then it
moves into it, and if it is root, gives up all of that but the rights to tidy up its cgroups and to
become somebody else, which every sandbox does first. A sandbox is a fork with namespaces and a
/work of its own, so opening one costs two forks and four mounts, however many others there are; no
wall is built outside of the sandbox's own mount namespace.

Over the control socket come lines: a sandbox that is wanted, as JSON and with the socket that it is
to answer on; "-" and a name, for one that is gone; "?" for a sign of life, which is sent back. The
control socket closes when the controller ends, however it ends, and so does every sandbox's: each
process in here ends at the end of its socket, and no other means is needed to leave nothing behind.

Standard library only, one thread, and no state of the controller: forks of this run other people's
code.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import site
import socket
import sys
from collections.abc import Iterator

from etude.sandbox import kernel, landlock
from etude.sandbox.cgroups import Cgroups
from etude.sandbox.command import environment
from etude.sandbox.guest import GUEST_ID, Link, serve
from etude.sandbox.limits import MEMORY_BYTES
from etude.sandbox.root import Shown, build_root

NOBODY = 65534
OWN_IDS = range(1_879_048_192, 2_147_483_648)
"""Users and groups that no distribution gives to anybody."""
_DAY_S = 24 * 3600
_TRIAL_S = 600.0
"""For the first sandbox to be up; the owner may lose its patience before."""

_NAMESPACES = (
    kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)  # fmt: skip


def main(control: socket.socket, mountpoint: str, told: str) -> None:
    """`told`: what the root is made of (`root.Shown`), as JSON."""
    # the kernel reaps; nobody here asks how a sandbox ended
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    cgroups, refused = _open_cgroups()
    try:
        zygote = Zygote(control, mountpoint, Shown(**json.loads(told)), cgroups, refused)
        error = zygote.try_one()
    except OSError as e:
        error = str(e.strerror)
    said = {"error": error} if error else {"walls": zygote.walls}
    with contextlib.suppress(ConnectionError):  # the owner is gone, which is noticed below
        control.sendall(json.dumps(said).encode() + b"\n")
    while not error and zygote.serve_one():
        pass
    if cgroups:
        cgroups.close()
    os._exit(0)


class Zygote:
    """This process, walled in."""

    def __init__(
        self,
        control: socket.socket,
        mountpoint: str,
        shown: Shown,
        cgroups: Cgroups | None,
        refused: str,
    ) -> None:
        """`refused`: why there are no cgroups."""
        self._control = control
        self._buffer = b""
        self._descriptors: list[int] = []
        self._cgroups = cgroups
        root = os.geteuid() == 0
        _wall_in(mountpoint, shown, with_cgroups=self._cgroups is not None)
        self._own_ids = _own_ids() if root else itertools.repeat(None)
        _become_template()
        self.walls = {
            "seccomp": kernel.can_filter_calls(),
            "landlock": landlock.version(),
            "own_users": root and next(self._own_ids) != NOBODY,
            "cgroup": self._cgroups.version if self._cgroups else "",
            "cgroup_refused": refused,
        }
        self._users: dict[str, int | None] = {}
        self._lived_in = bool(shown.user)

    def serve_one(self) -> bool:
        """False at the end of the host's side, which is a reset if it had not read our last
        word."""
        try:
            words, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 64)
            self._descriptors += descriptors
            *lines, self._buffer = (self._buffer + words).split(b"\n")
            for line in lines:
                self._do(line)
        except ConnectionError:
            return False
        return bool(words)

    def _do(self, line: bytes) -> None:
        if line == b"?":
            self._control.sendall(line)
        elif line.startswith(b"-"):
            name = line[1:].decode()
            self._users.pop(name, None)
            if self._cgroups:
                self._cgroups.leave(name)
        else:
            link = socket.socket(fileno=self._descriptors.pop(0))
            self._spawn(link, self._control, **json.loads(line))

    def _spawn(
        self,
        link: socket.socket,
        control: socket.socket,
        name: str,
        memory_bytes: int,
        cpus: float | None,
        like: str | None = None,
    ) -> None:
        """Fork twice: the first child makes the namespaces, and only a child of its own is process
        1 in them. `like`: the sandbox whose user it is to be, since they share files."""
        own_id = self._users[like] if like in self._users else next(self._own_ids)
        self._users[name] = own_id
        if self._cgroups:
            self._cgroups.expect(name)
        if os.fork():
            link.close()
            return
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            if self._cgroups:
                self._cgroups.enter(name, memory_bytes, cpus)
            if own_id is not None:
                _become(own_id)
            user, group = os.geteuid(), os.getegid()
            kernel.unshare(_NAMESPACES)
            _map_ids(GUEST_ID, user, GUEST_ID, group)
            kernel.leave_keyring()
            if self._lived_in:
                _been_up(own_id or os.getpid())
        except OSError as e:
            Link(link).send({"error": ["RolloutFailure", f"sandbox: {e.strerror}"]})
            os._exit(1)
        if os.fork() == 0:
            serve(link)
        os._exit(0)

    def try_one(self) -> str:
        """Open a sandbox and close it again. Empty, or the call that the kernel refused."""
        here, there = socket.socketpair()
        # A child of this process must not hold `here`, or the sandbox would never see it close.
        here.settimeout(_TRIAL_S)
        self._spawn(there, here, "trial", MEMORY_BYTES, None)
        with here, here.makefile("r") as lines:
            line = lines.readline()
        if self._cgroups:
            self._cgroups.leave("trial")
        answer = (
            json.loads(line)
            if line
            else {"error": ["", "the first process of a sandbox ended without a word"]}
        )
        return str(answer["error"][1]) if "error" in answer else ""


def _open_cgroups() -> tuple[Cgroups | None, str]:
    """Or what is in the way."""
    try:
        return Cgroups(), ""
    except OSError as e:
        return None, str(e.strerror)


def _wall_in(mountpoint: str, shown: Shown, *, with_cgroups: bool) -> None:
    kernel.forbid_new_privileges()
    kernel.adopt_orphans()
    if root := os.geteuid() == 0:
        kernel.unshare(kernel.CLONE_NEWNS)
    else:
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        _map_ids(user, user, group, group)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    build_root(mountpoint, shown)
    kernel.change_root(mountpoint)
    if root:
        os.setgroups([])
        # the uppermost cgroups are writable to nobody, root included
        tidying = (kernel.CAP_DAC_OVERRIDE,) if with_cgroups else ()
        kernel.drop_capabilities(kernel.CAP_SETUID, kernel.CAP_SETGID, *tidying)


def _own_ids() -> Iterator[int]:
    """A user for each sandbox, which nobody else is: the kernel counts pipes, watches and more by
    user. One for all where this root is that of a container and has too few."""
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as ranges:
            spans = [[int(word) for word in line.split()] for line in ranges]
        if not any(start <= OWN_IDS.start and OWN_IDS.stop <= start + n for start, _, n in spans):
            return itertools.repeat(NOBODY)
    # where another pool of this machine is unlikely to be
    start = int.from_bytes(os.urandom(4))
    return (OWN_IDS[(start + number) % len(OWN_IDS)] for number in itertools.count())


def _become(user: int) -> None:
    """User 0 of the host is never inside, under whatever name: it owns /proc/sys and is exempt from
    limits."""
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    kernel.own_proc_entry()


def _been_up(number: int) -> None:
    """Let the sandbox find a machine that was started days ago: children of this process are born
    into a time of their own. `number`: anything, so that sandboxes differ."""
    kernel.unshare(kernel.CLONE_NEWTIME)
    kernel.put("/proc/self/timens_offsets", f"boottime {_DAY_S + number * 7919 % (20 * _DAY_S)} 0")


def _map_ids(inside_user: int, outside_user: int, inside_group: int, outside_group: int) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside_user} {outside_user} 1"),
        ("gid_map", f"{inside_group} {outside_group} 1"),
    ):
        kernel.put(f"/proc/self/{name}", text)


def _become_template() -> None:
    """What a script that runs in a fork of this process finds: a Python just started, with no
    packages but its own."""
    os.environ.clear()
    os.environ.update(environment())
    site.setquit()
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.partition(".")[0] == "etude"]:
        del sys.modules[name]
