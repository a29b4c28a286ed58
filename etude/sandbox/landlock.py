"""Irrevocable rules about files that a process imposes on itself and its children (Landlock).

The mounts of a sandbox enforce the same; this is a second wall behind them, in another part of the
kernel. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION = 1
_PATH_BENEATH = 1
_SCOPE_SIGNALS = 2

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of rights by version of the interface; 16 from the fifth on."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def version() -> int:
    """Version of the interface; 0 if this kernel lacks it or has it turned off."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _VERSION)))


def rules(writable: Sequence[str], devices: str) -> int | None:
    """Descriptor of rules that allow reading everything, writing in these directories, and using
    devices. None if the kernel has no Landlock."""
    if not (has := version()):
        return None
    handled = (1 << _NUM_RIGHTS.get(has, 16)) - 1
    size = 8 if has < 4 else 16 if has < 6 else 24
    attributes = struct.pack("=QQQ", handled, 0, _SCOPE_SIGNALS)[:size]
    made = _check(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    _allow(made, "/", _READ & handled)
    _allow(made, devices, (_READ | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV) & handled)
    for path in writable:
        _allow(made, path, handled & ~(_MAKE_CHAR | _MAKE_BLOCK))
    return made


def _allow(made: int, path: str, rights: int) -> None:
    directory = os.open(path, os.O_PATH)
    try:
        rule = struct.pack("=Qi", rights, directory)
        _check(_libc.syscall(_ADD_RULE, made, _PATH_BENEATH, rule, 0))
    finally:
        os.close(directory)


def restrict(made: int) -> None:
    """Impose the rules on this process and all of its future children."""
    _check(_libc.syscall(_RESTRICT_SELF, made, 0))


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return result
