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

import glob
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
from etude.sandbox.command import PROGRAMS, environment
from etude.sandbox.guest import COVERED, GUEST_ID, TERMINALS, Link, serve
from etude.sandbox.limits import MEMORY_BYTES
from etude.sandbox.places import LINKS

NOBODY = 65534
_OWN_IDS = range(1_879_048_192, 2_147_483_648)
"""Users and groups that no distribution gives to anybody."""

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ETC = ("ld.so.cache", "alternatives")
_NAMESPACES = (
    kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)  # fmt: skip


def main(control: socket.socket, mountpoint: str, mounts: str = "[]") -> None:
    """`mounts`: as JSON, pairs of a directory of the host and its place in a sandbox."""
    # the kernel reaps; nobody here asks how a sandbox ended
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    cgroups, refused = _open_cgroups()
    try:
        zygote = Zygote(control, mountpoint, json.loads(mounts), cgroups, refused)
        error = zygote.try_one()
    except OSError as e:
        error = str(e.strerror)
    said = {"error": error} if error else {"walls": zygote.walls}
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
        mounts: list[tuple[str, str]],
        cgroups: Cgroups | None,
        refused: str,
    ) -> None:
        """`refused`: why there are no cgroups."""
        self._control = control
        self._buffer = b""
        self._descriptors: list[int] = []
        self._cgroups = cgroups
        root = os.geteuid() == 0
        _wall_in(mountpoint, mounts, with_cgroups=self._cgroups is not None)
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
        here.settimeout(30)
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


def _wall_in(mountpoint: str, mounts: list[tuple[str, str]], *, with_cgroups: bool) -> None:
    kernel.forbid_new_privileges()
    kernel.adopt_orphans()
    if root := os.geteuid() == 0:
        kernel.unshare(kernel.CLONE_NEWNS)
    else:
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        _map_ids(user, user, group, group)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    _build_root(mountpoint, mounts)
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
        if not any(start <= _OWN_IDS.start and _OWN_IDS.stop <= start + n for start, _, n in spans):
            return itertools.repeat(NOBODY)
    # where another pool of this machine is unlikely to be
    start = int.from_bytes(os.urandom(4))
    return (_OWN_IDS[(start + number) % len(_OWN_IDS)] for number in itertools.count())


def _become(user: int) -> None:
    """User 0 of the host is never inside, under whatever name: it owns /proc/sys and is exempt from
    limits."""
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    kernel.own_proc_entry()


def _map_ids(inside_user: int, outside_user: int, inside_group: int, outside_group: int) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside_user} {outside_user} 1"),
        ("gid_map", f"{inside_group} {outside_group} 1"),
    ):
        kernel.put(f"/proc/self/{name}", text)


def _build_root(root: str, mounts: list[tuple[str, str]]) -> None:
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=0755")
    for name in _SYSTEM:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            _show(f"/{name}", root)
    if not f"{sys.base_prefix}/".startswith("/usr/"):
        _show(sys.base_prefix, root)
    _hide_packages(root)
    _show_mounts(root, mounts)
    for name in _ETC:
        if os.path.exists(f"/etc/{name}"):
            _show(f"/etc/{name}", root)
    os.makedirs(f"{root}/etc", exist_ok=True)
    kernel.put(f"{root}/etc/passwd", f"user:x:{GUEST_ID}:{GUEST_ID}::/tmp:/bin/sh\n")
    kernel.put(f"{root}/etc/group", f"user:x:{GUEST_ID}:\n")
    kernel.put(f"{root}/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")
    kernel.put(f"{root}/etc/nsswitch.conf", "hosts: files\n")
    os.mkdir(f"{root}/dev")
    for name in _DEVICES:
        kernel.put(f"{root}/dev/{name}", "")
        kernel.bind(f"/dev/{name}", f"{root}/dev/{name}")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    os.symlink("/tmp", f"{root}/dev/shm")
    os.mkdir(root + TERMINALS)  # a sandbox mounts its own there
    os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    for name in ("work", "tmp", "proc"):
        os.mkdir(f"{root}/{name}")
    for name, target in LINKS.items():
        os.symlink(target, root + name)
    # The kernel lets a user namespace mount a /proc of its own only where an unobstructed one is in
    # sight. Every sandbox covers this one before anything foreign runs.
    kernel.bind("/proc", f"{root}/proc")
    # a remount forgets what it is not told again
    flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", root, None, kernel.MS_REMOUNT | kernel.MS_BIND | flags)


def _show_mounts(root: str, mounts: list[tuple[str, str]]) -> None:
    """What every sandbox shows of the host. Each has a /tmp of its own, and binds again what it
    covers with that."""
    for number, (source, target) in enumerate(mounts):
        if f"{target}/".startswith("/tmp/"):
            COVERED.append((f"/mnt/{number}", target))
            target = f"/mnt/{number}"
        _show(source, root, target)
        if os.path.isdir(f"{source}/bin"):
            PROGRAMS.append(f"{mounts[number][1]}/bin")


def _show(path: str, root: str, place: str = "") -> None:
    """Bind a file or directory of the host to the same place under the new root, or to another,
    read-only."""
    target = root + (place or path)
    os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(path):
        kernel.put(target, "")
    kernel.bind(path, target)
    kernel.protect(target)


def _hide_packages(root: str) -> None:
    """Cover what is installed beside any Python in there, this program included: a sandbox has the
    standard library."""
    for prefix in {"/usr", "/usr/local", sys.base_prefix}:
        for path in glob.glob(f"{prefix}/lib*/python*/*-packages"):
            # A link may lead to another one of these, or out of what is shown. A place covered
            # twice is no harm.
            if os.path.isdir(target := root + os.path.realpath(path)):
                kernel.mount(
                    "tmpfs", target, "tmpfs", kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
                )


def _become_template() -> None:
    """What a script that runs in a fork of this process finds: a Python just started, with no
    packages but its own."""
    os.environ.clear()
    os.environ.update(environment())
    site.setquit()
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.partition(".")[0] == "etude"]:
        del sys.modules[name]
