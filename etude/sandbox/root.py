"""The one root directory that all sandboxes of a zygote share, read-only.

It shows either the programs of this machine and a Python, but nothing of the host's /etc, /home,
/var or /sys; or the system of an image, with its layers below the sandbox's own files (overlayfs).
Standard library only: this runs in the zygote.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import stat
import sys
from typing import NamedTuple

from etude.sandbox import guest, kernel
from etude.sandbox.command import PLAIN, PROGRAMS
from etude.sandbox.guest import COVERED, GUEST_ID
from etude.sandbox.output import TERMINALS
from etude.sandbox.places import LINKS

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ETC = ("ld.so.cache", "alternatives", "ssl/certs")
_NOBODY = "user"


class Shown(NamedTuple):
    """The parts of a root."""

    mounts: list[tuple[str, str]]
    """Directories of the host, and their paths in a sandbox."""
    layers: list[str]
    """Layers of an image, from the lowest on."""
    system: bool
    """True if the layers are a complete system."""
    hostname: str
    user: str
    """Empty: a user without a home."""
    packages: bool = False
    """True if the packages of this machine's Python belong to the image."""


def build_root(root: str, shown: Shown) -> None:
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=0755")
    if shown.system:
        _build_system(root, shown)
    else:
        _build_from_host(root, shown)
    # The kernel lets a user namespace mount its own /proc only if an unobstructed one is visible.
    # Every sandbox covers this one before it runs anything untrusted.
    kernel.bind("/proc", f"{root}/proc")
    # a remount drops flags that are not given again
    flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", root, None, kernel.MS_REMOUNT | kernel.MS_BIND | flags)


def _build_from_host(root: str, shown: Shown) -> None:
    for name in _SYSTEM:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            _show(f"/{name}", root)
    if not f"{sys.base_prefix}/".startswith("/usr/"):
        _show(sys.base_prefix, root)
    if shown.packages:
        PROGRAMS.append("/usr/local/bin")  # commands should find the Python with the packages
    else:
        _hide_packages(root)
    for name in _ETC:
        if os.path.exists(f"/etc/{name}"):
            _show(f"/etc/{name}", root)
    for layer in shown.layers:
        if os.path.isdir(f"{layer}/etc"):
            shutil.copytree(f"{layer}/etc", f"{root}/etc", symlinks=True, dirs_exist_ok=True)
    _own_places(root, shown)
    _show_devices(root)
    _show_mounts(root, shown.mounts)


def _build_system(root: str, shown: Shown) -> None:
    """Mount the image's layers, with the sandbox's own files as the uppermost layer."""
    _own_places(root, shown)
    for number, (_, target) in enumerate(shown.mounts):
        os.makedirs(f"{root}/mnt/{number}" if _covered(target) else root + target, exist_ok=True)
    layers = [os.open(path, os.O_PATH) for path in (*shown.layers, root)]
    lower = ":".join(f"/proc/self/fd/{layer}" for layer in reversed(layers))
    flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("overlay", root, "overlay", flags, f"lowerdir={lower},userxattr")
    for layer in layers:
        os.close(layer)
    _show_devices(root)
    _show_mounts(root, shown.mounts)
    # commands should find programs and the Python of the system, not the one that runs this process
    PROGRAMS.append("/usr/local/bin")


def _own_places(root: str, shown: Shown) -> None:
    user = shown.user or _NOBODY
    home = f"/home/{user}" if shown.user else "/tmp"
    shell = "/bin/bash" if shown.user else "/bin/sh"
    os.makedirs(f"{root}/etc", exist_ok=True)
    accounts = f"{user}:x:{GUEST_ID}:{GUEST_ID}::{home}:{shell}\n"
    kernel.put(f"{root}/etc/passwd", _others(shown.layers, "passwd") + accounts)
    kernel.put(f"{root}/etc/group", _others(shown.layers, "group") + f"{user}:x:{GUEST_ID}:\n")
    own = f"127.0.1.1 {shown.hostname}\n" if shown.hostname != "localhost" else ""
    kernel.put(f"{root}/etc/hosts", f"127.0.0.1 localhost\n{own}::1 localhost\n")
    kernel.put(f"{root}/etc/nsswitch.conf", "hosts: files\n")
    guest.HOSTNAME = shown.hostname
    if shown.user:
        guest.HOME = home
        PLAIN.update(HOME=home, USER=user, LOGNAME=user, SHELL=shell)
    os.mkdir(f"{root}/dev")
    for name in _DEVICES:
        kernel.put(f"{root}/dev/{name}", "")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    os.symlink("/tmp", f"{root}/dev/shm")
    os.mkdir(root + TERMINALS)  # a sandbox mounts its own there
    os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    for name in ("work", "tmp", "proc", *([home[1:]] if shown.user else [])):
        os.makedirs(f"{root}/{name}")
    for name, target in () if shown.user else LINKS.items():
        os.symlink(target, root + name)


def _others(layers: list[str], name: str) -> str:
    """The accounts of an image, other than that of commands. The image is not trusted: following a
    link could lead to a file of this machine."""
    for layer in reversed(layers):
        with contextlib.suppress(OSError):
            etc = os.open(f"{layer}/etc", os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=etc)
            finally:
                os.close(etc)
            with open(found, encoding="utf-8", errors="surrogateescape") as file:
                if stat.S_ISREG(os.fstat(found).st_mode):
                    return "".join(line for line in file if f":x:{GUEST_ID}:" not in line)
    return ""


def _show_devices(root: str) -> None:
    for name in _DEVICES:
        kernel.bind(f"/dev/{name}", f"{root}/dev/{name}")


def _show_mounts(root: str, mounts: list[tuple[str, str]]) -> None:
    """Show the mounts of the pool. Every sandbox has its own /tmp, and binds mounts below it
    again."""
    for number, (source, target) in enumerate(mounts):
        if _covered(target):
            COVERED.append((f"/mnt/{number}", target))
            target = f"/mnt/{number}"
        _show(source, root, target)
        if os.path.isdir(f"{source}/bin"):
            PROGRAMS.append(f"{mounts[number][1]}/bin")


def _covered(target: str) -> bool:
    return f"{target}/".startswith("/tmp/")


def _show(path: str, root: str, place: str = "") -> None:
    """Bind a file or directory of the host to the same path under the new root, or to `place`,
    read-only."""
    target = root + (place or path)
    os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(path):
        kernel.put(target, "")
    kernel.bind(path, target)
    kernel.protect(target)


def _hide_packages(root: str) -> None:
    """Cover the packages of every Python in the root, this program included: a sandbox has only the
    standard library."""
    for prefix in {"/usr", "/usr/local", sys.base_prefix}:
        for path in glob.glob(f"{prefix}/lib*/python*/*-packages"):
            # A link may lead to another one of these, or to a path that is not shown. It does no
            # harm to cover a directory twice.
            if os.path.isdir(target := root + os.path.realpath(path)):
                kernel.mount(
                    "tmpfs", target, "tmpfs", kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
                )
