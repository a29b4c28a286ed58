"""The zygote: a small process with walls around it, from which every sandbox is forked.

The controller starts it once. It builds the one root directory that all sandboxes share: read-only,
with the system's programs, a Python, and empty places for /work, /tmp and /proc. Then it moves into
that root. If it is root, it gives up all capabilities but those to tidy up its cgroups and to
change its user, which every sandbox does first. A sandbox is a fork with namespaces and a /work of
its own, so opening one costs two forks and four mounts, however many others there are; no wall is
built outside of the sandbox's own mount namespace. A few are made in advance (`spares`).

The control socket carries lines: JSON for a sandbox that is wanted, with the socket that it is to
answer on; "-" and a name for one that is gone; "+" and the number of spares to keep; "?" for a sign
of life, which is sent back. The control socket closes when the controller ends, however it ends,
and so does every sandbox's; every spare's closes with the zygote. Each process in here ends when
its socket closes, so nothing else is needed to leave nothing behind.

Standard library only, one thread, and no state of the controller: forks of this process run other
people's code.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import site
import socket
import sys
from collections.abc import Iterator
from typing import NamedTuple

from etude.sandbox import kernel, landlock
from etude.sandbox.cgroups import Cgroups
from etude.sandbox.command import environment
from etude.sandbox.limits import MEMORY_BYTES
from etude.sandbox.root import Shown, build_root
from etude.sandbox.spares import Ids, Spare, be_spare, map_ids

NOBODY = 65534
OWN_IDS = range(1_879_048_192, 2_147_483_648)
"""Users and groups that no distribution assigns to anybody."""
_TRIAL_S = 600.0
"""Seconds for the first sandbox to be up; the owner may give up earlier."""
_PAUSE_MS = 5
"""Milliseconds without a message before a spare is made: a sandbox that was just opened is still
starting, and the next request comes first."""
_TIDY_MS = 50
"""Milliseconds between checks of a cgroup whose processes were killed and have not ended."""


def main(control: socket.socket, mountpoint: str, told: str) -> None:
    """`told`: the parts of the root (`root.Shown`), as JSON."""
    # the kernel reaps; nobody here needs the exit status of a sandbox
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
    if not error:
        zygote.close()
    if cgroups:
        cgroups.close()
    os._exit(0)


class Wanted(NamedTuple):
    """A sandbox that the host asks for."""

    link: socket.socket
    """The socket that it is to answer on."""
    name: str
    memory_bytes: int
    cpus: float | None
    bounds: list[int]
    """Limits, as `guest.serve` takes them."""
    like: str | None = None
    """A sandbox to take the user of, since the two share files."""


class Given(NamedTuple):
    """A sandbox that the host has."""

    ids: Ids
    cgroup: str


class Zygote:
    """This process, behind its walls."""

    def __init__(
        self,
        control: socket.socket,
        mountpoint: str,
        shown: Shown,
        cgroups: Cgroups | None,
        refused: str,
    ) -> None:
        """`refused`: the reason why there are no cgroups."""
        self._control = control
        self._buffer = b""
        self._descriptors: list[int] = []
        self._cgroups = cgroups
        root = os.geteuid() == 0
        self._rights = _wall_in(mountpoint, shown, with_cgroups=self._cgroups is not None)
        self._ids = _own_ids() if root else itertools.repeat(Ids(os.geteuid(), os.getegid()))
        _become_template()
        self.walls = {
            "seccomp": kernel.can_filter_calls(),
            "landlock": landlock.version(),
            "own_users": root and next(self._ids).user != NOBODY,
            "cgroup": self._cgroups.version if self._cgroups else "",
            "cgroup_refused": refused,
        }
        self._lived_in = bool(shown.user)
        self._given: dict[str, Given] = {}
        self._spares: dict[int, Spare] = {}
        self._promised: dict[Spare, Wanted] = {}
        """Spares that are not up yet, with the requests that wait for them."""
        self._spare_names = map(str, itertools.count(1))
        self._wished = 0
        """Number of spares that the host wants."""
        self._ahead = 0
        """Number of spares to make: `_wished`, or 0 after one has failed, until the next request
        for a sandbox."""
        self._ours = {control}
        """Sockets that a fork must not hold, in addition to those of spares: otherwise nobody would
        see them close."""
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve_one(self) -> bool:
        """Handle one event. False if the host has closed its side; that appears as a reset if it
        had not read our last message."""
        missing = self._ahead - len(self._free())
        tidying = self._cgroups if self._cgroups and self._cgroups.leaving else None
        heard = self._poll.poll(_PAUSE_MS if missing > 0 else _TIDY_MS if tidying else None)
        if not heard:
            self._make_spares(missing)
            if tidying:
                tidying.tidy()
        ready = {descriptor for descriptor, _ in heard}
        for descriptor in ready & self._spares.keys():
            self._hear_spare(self._spares[descriptor])
        return self._control.fileno() not in ready or self._hear()

    def _hear(self) -> bool:
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
        elif line.startswith(b"+"):
            self._wished = self._ahead = int(line)
        elif line.startswith(b"-"):
            gone = self._given.pop(line[1:].decode(), None)
            if gone and self._cgroups:
                self._cgroups.leave(gone.cgroup)
        else:
            link = socket.socket(fileno=self._descriptors.pop(0))
            self._open(Wanted(link, **json.loads(line)))

    def _open(self, wanted: Wanted) -> None:
        self._ahead = self._wished
        self._ours.add(wanted.link)
        if not self._free():
            self._make_spares(1 + self._ahead)
        spare = min(self._free(), key=lambda each: not each.is_up)
        origin = self._given.get(wanted.like or "")
        ids = origin.ids if origin else spare.ids
        self._given[wanted.name] = Given(ids, spare.name)
        if ids == spare.ids or spare.is_up:
            self._give(spare, wanted)
        else:
            self._promised[spare] = wanted

    def _free(self) -> list[Spare]:
        return [spare for spare in self._spares.values() if spare not in self._promised]

    def _make_spares(self, count: int) -> None:
        """Make them in direct succession: memory that this process changes in between is no longer
        shared with the earlier ones."""
        for _ in range(count):
            self._make_spare()

    def _make_spare(self) -> None:
        name, ids = next(self._spare_names), next(self._ids)
        if self._cgroups:
            self._cgroups.expect(name)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            try:
                for other in (ours, *self._ours):
                    other.close()
                for each in self._spares.values():
                    each.close()
                be_spare(theirs, name, ids, self._cgroups, lived_in=self._lived_in)
            finally:
                os._exit(1)
        theirs.close()
        self._spares[ours.fileno()] = Spare(name, ids, ours)
        self._poll.register(ours, select.POLLIN)

    def _hear_spare(self, spare: Spare) -> None:
        why = spare.hear()
        wanted = self._promised.pop(spare, None)
        if wanted and not why:
            self._give(spare, wanted)
        elif why:
            self._ahead = 0
            self._drop(spare)
            if wanted:
                self._refuse(wanted, why)
            elif self._cgroups:
                self._cgroups.leave(spare.name)

    def _give(self, spare: Spare, wanted: Wanted) -> None:
        ids = self._given[wanted.name].ids
        cgroup: list[int] = []
        try:
            if self._cgroups:
                cgroup = self._cgroups.bound(spare.name, wanted.memory_bytes, wanted.cpus)
            if ids != spare.ids:
                self._name_user(spare, ids)
            spare.give(wanted.link, cgroup, named=ids != spare.ids, bounds=wanted.bounds)
            self._let_go(wanted)
        except OSError as e:
            self._refuse(wanted, f"sandbox: {e.strerror}")
        for descriptor in cgroup:
            os.close(descriptor)
        self._drop(spare)

    def _name_user(self, spare: Spare, ids: Ids) -> None:
        """Set a spare's user as the maker of its user namespace, which nobody else may do."""
        os.seteuid(spare.ids.user)
        try:
            kernel.drop_capabilities(*self._rights)  # makes these effective again
            spare.name_user(ids)
        finally:
            os.seteuid(0)

    def _refuse(self, wanted: Wanted, why: str) -> None:
        said = {"error": ["RolloutFailure", why]}
        with contextlib.suppress(OSError):  # nobody waits for it any more
            wanted.link.sendall(json.dumps(said).encode() + b"\n")
        self._let_go(wanted)

    def _let_go(self, wanted: Wanted) -> None:
        self._ours.remove(wanted.link)
        wanted.link.close()

    def _drop(self, spare: Spare) -> None:
        del self._spares[spare.fileno()]
        self._poll.unregister(spare)
        spare.close()

    def try_one(self) -> str:
        """Open a sandbox and close it again. Empty, or the call that the kernel refused."""
        here, there = socket.socketpair()
        here.settimeout(_TRIAL_S)
        self._ours.add(here)
        self._open(Wanted(there, "trial", MEMORY_BYTES, None, []))
        with here, here.makefile("r") as lines:
            line = lines.readline()
        self._ours.remove(here)
        self._do(b"-trial")
        answer = (
            json.loads(line)
            if line
            else {"error": ["", "the first process of a sandbox ended without a word"]}
        )
        return str(answer["error"][1]) if "error" in answer else ""

    def close(self) -> None:
        for spare in self._spares.values():
            spare.close()


def _open_cgroups() -> tuple[Cgroups | None, str]:
    """The cgroups, or the reason why there are none."""
    try:
        return Cgroups(), ""
    except OSError as e:
        return None, str(e.strerror)


def _wall_in(mountpoint: str, shown: Shown, *, with_cgroups: bool) -> tuple[int, ...]:
    """Build the walls of this process. Return the capabilities that it keeps, if it is root."""
    kernel.forbid_new_privileges()
    kernel.adopt_orphans()
    if root := os.geteuid() == 0:
        kernel.unshare(kernel.CLONE_NEWNS)
    else:
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        map_ids("/proc/self", Ids(user, group), Ids(user, group))
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    build_root(mountpoint, shown)
    kernel.change_root(mountpoint)
    if not root:
        return ()
    os.setgroups([])
    # the uppermost cgroups are writable to nobody, root included
    tidying = (kernel.CAP_DAC_OVERRIDE,) if with_cgroups else ()
    rights = (kernel.CAP_SETUID, kernel.CAP_SETGID, *tidying)
    kernel.drop_capabilities(*rights)
    return rights


def _own_ids() -> Iterator[Ids]:
    """A user of its own for each sandbox: the kernel counts pipes, watches and more by user. All
    sandboxes share one if this root is that of a container with too few users."""
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as ranges:
            spans = [[int(word) for word in line.split()] for line in ranges]
        if not any(start <= OWN_IDS.start and OWN_IDS.stop <= start + n for start, _, n in spans):
            return itertools.repeat(Ids(NOBODY, NOBODY))
    # where another pool of this machine is unlikely to be
    start = int.from_bytes(os.urandom(4))
    numbers = (OWN_IDS[(start + number) % len(OWN_IDS)] for number in itertools.count())
    return (Ids(number, number) for number in numbers)


def _become_template() -> None:
    """Prepare the state that a script in a fork of this process finds: a Python that has just
    started, with no packages but its own."""
    os.environ.clear()
    os.environ.update(environment())
    site.setquit()
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.partition(".")[0] == "etude"]:
        del sys.modules[name]
