"""System calls for which Python 3.11 has no function. Each failure is an OSError that names the
call.

Standard library only: this runs in the zygote, before any of the walls that it builds.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

from etude.sandbox import syscalls

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = (
    0x00020000,
    0x02000000,
    0x04000000,
    0x08000000,
)
CLONE_NEWTIME = 0x00000080
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

CAP_DAC_OVERRIDE, CAP_SETGID, CAP_SETUID = 1, 6, 7

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18

_MNT_DETACH = 2
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4
_RESOLVE_NO_XDEV, _RESOLVE_NO_MAGICLINKS, _RESOLVE_BENEATH = 0x01, 0x02, 0x08
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
_SECCOMP_MODE_FILTER = 2
_KEYCTL_JOIN_SESSION_KEYRING = 1
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40
# newer than the split of the tables: the same on every architecture
_SYS_open_tree, _SYS_move_mount, _SYS_openat2, _SYS_mount_setattr = 428, 429, 437, 442

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_machine = os.uname().machine
_filter = syscalls.program(_machine)


def _check(result: int, call: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def join_pid_namespace(descriptor: int) -> None:
    """Start the children of this process in that namespace from now on."""
    _check(_libc.setns(descriptor, CLONE_NEWPID), "setns(pid)")


def leave_keyring() -> None:
    """Take a new and empty session keyring instead of the inherited one, which no namespace
    separates. Without effect if a container or the quota of keys refuses; `syscalls` keeps commands
    from every keyring as well."""
    if (number := syscalls.number_of_keyctl(_machine)) is not None:
        _libc.syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None)


def mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount({source}, {target})")


def bind(source: str, target: str) -> None:
    mount(source, target, None, MS_BIND | MS_REC)


def clone_mount(path: str) -> int:
    """A descriptor of the mount at `path`, which another mount namespace can attach."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    return _check(
        _libc.syscall(_SYS_open_tree, _AT_FDCWD, path.encode(), flags), f"open_tree({path})"
    )


def attach_mount(descriptor: int, target: str) -> None:
    result = _libc.syscall(
        _SYS_move_mount,
        descriptor,
        b"",
        _AT_FDCWD,
        target.encode(),
        _MOVE_MOUNT_F_EMPTY_PATH,
    )
    _check(result, f"move_mount({target})")


def unmount(target: str) -> None:
    """Unmount the uppermost mount at this path; other binds of it remain."""
    _check(_libc.umount2(target.encode(), _MNT_DETACH), f"umount2({target})")


def protect(target: str) -> None:
    """Make the mount and all below it read-only, without set-user-id programs and devices. Unlike a
    remount, this keeps the flags that an ordinary user's namespace may not clear."""
    flags = _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV
    attributes = struct.pack("=QQQQ", flags, 0, 0, 0)
    result = _libc.syscall(
        _SYS_mount_setattr, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, len(attributes)
    )
    _check(result, f"mount_setattr({target})")


def change_root(root: str) -> None:
    """Make the mount at `root` the whole file system, and detach the previous root."""
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."), f"pivot_root({root})")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2(old root)")
    os.chdir("/")


def open_beneath(directory: int, path: str, flags: int, mode: int = 0) -> int:
    """Open without ever leaving the directory: the kernel refuses `..`, absolute links and other
    mounts (EXDEV)."""
    resolve = _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_XDEV
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode if flags & os.O_CREAT else 0, resolve)
    return _check(
        _libc.syscall(_SYS_openat2, directory, os.fsencode(path), how, len(how)), f"openat2({path})"
    )


def put(path: str, text: str) -> None:
    """Write a file in one write, as the files of /proc require. Cheaper than `open`, which matters
    in a fresh fork."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(descriptor, text.encode(errors="surrogateescape"))
        os.close(descriptor)
    except OSError as e:
        raise OSError(e.errno, f"write({path}): {e.strerror}") from e


def _prctl(option: int, value: int, name: str, address: int = 0) -> None:
    zero = ctypes.c_ulong(0)
    _check(
        _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(address), zero, zero),
        f"prctl({name})",
    )


def raise_loopback() -> None:
    """Let the processes of this network namespace reach each other, and nothing else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("=16sH22x", b"lo", _IFF_UP | _IFF_RUNNING)
        try:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)
        except OSError as e:
            raise OSError(e.errno, f"ioctl(lo): {e.strerror}") from e


def forbid_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")


def adopt_orphans() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "child_subreaper")


def own_proc_entry() -> None:
    """Make a process that has changed its user the owner of its files in /proc again."""
    _prctl(_PR_SET_DUMPABLE, 1, "dumpable")


def drop_capabilities(*kept: int) -> None:
    """Drop all capabilities except for these."""
    header = struct.pack("=Ii", 0x20080522, 0)  # version 3, this thread
    low = sum(1 << each for each in kept)
    _check(_libc.capset(header, struct.pack("=6I", low, low, 0, 0, 0, 0)), "capset")


def can_filter_calls() -> bool:
    return _filter is not None


def filter_calls() -> None:
    """Install the filter of `syscalls` for this process and all of its future children. Does
    nothing on machines unknown there."""
    if _filter is not None:
        steps = ctypes.create_string_buffer(_filter, len(_filter))
        described = ctypes.create_string_buffer(
            struct.pack("@HP", len(_filter) // 8, ctypes.addressof(steps))
        )
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, "seccomp", ctypes.addressof(described))
