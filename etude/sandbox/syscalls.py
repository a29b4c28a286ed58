"""System calls that commands must not make, as a filter that the kernel runs before every call
(seccomp).

The filter refuses calls that keep memory outside of every limit, that outlive or reach beyond a
process, or that expose a large part of the kernel and are of no use to code and its tests. All
others are allowed, so that ordinary programs run. Standard library only.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable

_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machines whose numbers are known below, with the kernel's constant for each in a filter."""
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)
_KEYCTL = (250, 219)
_IOCTL = (16, 29)
_REFUSED_IOCTLS = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "TIOCSETD": 0x5423}
"""Terminal requests: typing for others, the console, and other line disciplines."""
_FCNTL = (72, 25)
_REFUSED_FCNTLS = {"F_SETPIPE_SZ": 1031}
"""The kernel itself refuses it only once a user's pipes have taken too much memory; the user of a
sandbox has not reached that."""
_SETSOCKOPT = (54, 208)
_IGNORED_OPTIONS = {"SO_SNDBUF": socket.SO_SNDBUF, "SO_RCVBUF": socket.SO_RCVBUF}
"""Buffers in kernel memory, megabytes per socket. The kernel silently caps values that are too
large; here all values are ignored."""
_SHMGET = (29, 194)
_SHM_BYTES = 4096
"""PostgreSQL marks its directory as taken with a segment of 56 bytes. Larger ones are refused:
memory that belongs to no process is outside of its limits. A namespace has at most 4,096 segments,
16 MiB."""
_REFUSED = {
    "io_setup": (206, 0),  # limited for the machine as a whole
    "semget": (64, 190),
    "msgget": (68, 186),
    "ptrace": (101, 117),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": _KEYCTL,
    "perf_event_open": (298, 241),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "memfd_create": (319, 279),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_secret": (447, 447),
}
# 16: AF_NETLINK, with which libc lists interfaces
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)
"""All of these are confined by the network namespace; others (AF_VSOCK) are not."""

_NUMBER, _MACHINE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 24, 32
_UPPER = 4
"""Offsets in the data that a filter reads of a call. An argument's offset is that of its lower
half, which comes first on both machines; the upper half follows at `_UPPER`."""
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _IGNORE, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x00050000 | errno.EPERM, 0x80000000
_X32 = 0x40000000
"""Numbers from here on are a second table for the same calls on x86_64; the other machine has no
such numbers."""


def number_of_keyctl(machine: str) -> int | None:
    return _column(_KEYCTL, machine) if machine in _MACHINES else None


def program(machine: str) -> bytes | None:
    """The filter, or None for a machine whose numbers are not in the table: there, sandboxes have
    only the other walls."""
    if machine not in _MACHINES:
        return None
    # Another architecture's calls (those of 32 bits on x86_64) have other numbers, which would pass
    # for harmless ones.
    steps = [
        _step(_LOAD, _MACHINE),
        _step(_IF_EQUAL, _MACHINES[machine], yes=1),
        _step(_RETURN, _KILL),
    ]
    steps += [_step(_LOAD, _NUMBER), _step(_IF_AT_LEAST, _X32, no=1), _step(_RETURN, _KILL)]
    for numbers in _REFUSED.values():
        steps += [_step(_IF_EQUAL, _column(numbers, machine), no=1), _step(_RETURN, _REFUSE)]
    of_sockets = [
        _step(_LOAD, _SECOND_ARGUMENT),
        _step(_IF_EQUAL, socket.SOL_SOCKET, yes=1),
        _step(_RETURN, _ALLOW),
    ]
    of_segments = [
        _step(_LOAD, _SECOND_ARGUMENT + _UPPER),
        _step(_IF_EQUAL, 0, yes=1),
        _step(_RETURN, _REFUSE),
        _step(_LOAD, _SECOND_ARGUMENT),
        _step(_IF_AT_LEAST, _SHM_BYTES + 1, no=1),
        _step(_RETURN, _REFUSE),
        _step(_RETURN, _ALLOW),
    ]
    of_families = _by_argument(_FIRST_ARGUMENT, _FAMILIES, _ALLOW, otherwise=_REFUSE)
    for call, inner in (
        (_SHMGET, of_segments),
        (_IOCTL, _by_argument(_SECOND_ARGUMENT, _REFUSED_IOCTLS.values(), _REFUSE)),
        (_FCNTL, _by_argument(_SECOND_ARGUMENT, _REFUSED_FCNTLS.values(), _REFUSE)),
        (
            _SETSOCKOPT,
            of_sockets + _by_argument(_THIRD_ARGUMENT, _IGNORED_OPTIONS.values(), _IGNORE),
        ),
        (_SOCKET, of_families),
        (_SOCKETPAIR, of_families),
    ):
        steps += [_step(_IF_EQUAL, _column(call, machine), no=len(inner)), *inner]
    return b"".join([*steps, _step(_RETURN, _ALLOW)])


def _by_argument(
    place: int, values: Iterable[int], verdict: int, *, otherwise: int = _ALLOW
) -> list[bytes]:
    steps = [_step(_LOAD, place)]
    for value in values:
        steps += [_step(_IF_EQUAL, value, no=1), _step(_RETURN, verdict)]
    return [*steps, _step(_RETURN, otherwise)]


def _column(numbers: tuple[int, int], machine: str) -> int:
    return numbers[list(_MACHINES).index(machine)]


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """One instruction. A comparison skips `yes` or `no` of the next instructions."""
    return struct.pack("=HBBI", code, yes, no, value)
